// What the driver's parts share: the libraries as Python loads them, numbers, and a count of what is
// not as it should be.
//
// Arrays are as long as what they hold, so that one element too many is seen by a sanitizer.

#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "packed/block_types.hpp"
#include "signatures.hpp"

namespace driver {

using lowtide::bf16;
using lowtide::ExpertPlaces;
using lowtide::ExpertsFunction;
using lowtide::MlpsFunction;
using lowtide::MultiplyFunction;
using Numbers = std::vector<bf16>;
using Floats = std::vector<float>;
using Ids = std::vector<std::int64_t>;

constexpr int THREADS[] = {1, 2, 5};

// All that were asked for.
inline std::set<std::string>& called() {
    static std::set<std::string> names;
    return names;
}

class Library {
   public:
    // One or several, of which later ones need earlier ones.
    explicit Library(char** paths) {
        for (; *paths != nullptr; ++paths) {
            handles_.push_back(dlopen(*paths, RTLD_NOW | RTLD_GLOBAL));
            if (handles_.back() == nullptr) stop(dlerror());
        }
    }

    template <class Function>
    Function* function(const char* name) const {
        void* found = nullptr;
        for (void* handle : handles_)
            if (found == nullptr) found = dlsym(handle, name);
        if (found == nullptr) stop(name);
        called().insert(name);
        return reinterpret_cast<Function*>(found);
    }

   private:
    [[noreturn]] static void stop(const char* what) {
        std::fprintf(stderr, "cannot be loaded: %s\n", what);
        std::exit(2);
    }

    std::vector<void*> handles_;
};

inline long num_wrong = 0;

// Says so, the first times, where something is not as it should be.
inline void expect(bool is_so, const char* what, long a = 0, long b = 0, long c = 0) {
    if (is_so) return;
    if (++num_wrong <= 20) std::fprintf(stderr, "wrong: %s (%ld, %ld, %ld)\n", what, a, b, c);
}

inline std::mt19937& generator() {
    static std::mt19937 own(7);
    return own;
}

inline Floats floats(long count) {
    std::normal_distribution<float> normal(0.01f, 0.1f);
    Floats out(count);
    for (float& each : out) each = normal(generator());
    return out;
}

inline Numbers numbers(long count) {
    Numbers out;
    for (float each : floats(count)) out.push_back(lowtide::round_bf16(each));
    return out;
}

inline long below(long limit) {
    return std::uniform_int_distribution<long>(0, limit - 1)(generator());
}

// `k` of `num_experts` for each token, ascending.
inline Ids chosen_experts(long num_tokens, long k, long num_experts) {
    Ids all(num_experts), out;
    std::iota(all.begin(), all.end(), 0);
    for (long token = 0; token < num_tokens; ++token) {
        std::shuffle(all.begin(), all.end(), generator());
        out.insert(out.end(), all.begin(), all.begin() + k);
        std::sort(out.end() - k, out.end());
    }
    return out;
}

// Each of them once, ascending.
inline Ids distinct(const Ids& experts) {
    Ids out = experts;
    std::sort(out.begin(), out.end());
    out.erase(std::unique(out.begin(), out.end()), out.end());
    return out;
}

// Slots of the distinct ones, ascending by expert: expert e is in slot e.
inline Ids slots_of(const Ids& experts) { return distinct(experts); }

// How long an array is whose last row has no gap behind it.
inline long strided(long num_rows, long stride, long length) {
    return num_rows == 0 ? 0 : (num_rows - 1) * stride + length;
}

// Rounded to bfloat16 once, sums in any order of float32.
inline bool is_near(bf16 found, double wanted, double terms) {
    return std::abs(lowtide::widen(found) - wanted) <= std::abs(wanted) / 128 + 1e-5 * terms + 1e-4;
}

// By place: how many tokens, experts of each, experts in all.
struct Routed {
    long num_tokens, k, num_experts;
};
// Nobody, one expert for all, all experts for each, and what is usual.
constexpr Routed ROUTED[] = {{0, 2, 4}, {1, 1, 1}, {5, 1, 1}, {3, 6, 6}, {8, 2, 17}, {1, 8, 32}};

// Types of packed.hpp: our own, and what is bfloat16.
constexpr int Q8 = lowtide::BLOCK_q8, Q4 = lowtide::BLOCK_q4, PLAIN = 1 << 16;

inline int num_bits_of(int type) { return type == Q4 ? 4 : 8; }

void check_products(const Library& kernels);
void check_experts(const Library& kernels);
void check_rows(const Library& kernels);
void check_attention(const Library& kernels);
void check_router(const Library& kernels);
void check_layers(const Library& kernels);
void check_reader(const Library& kernels);
void check_foresight();
void check_residency(const Library& kernels);
void check_team(const Library& kernels);
void check_quantised(const Library& kernels);
void check_packing(const Library& kernels);
void check_blocks(const Library& kernels);
void check_rounded_rows(const Library& kernels);
void check_sections(const Library& kernels);
void check_buddies(const Library& kernels);
void check_delta(const Library& kernels);

}  // namespace driver
