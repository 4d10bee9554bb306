// Norms, rotation, attention, and the team of threads.

#include <atomic>
#include <thread>

#include "driver.hpp"

namespace driver {
namespace {

using RmsNorm = void(int, int, const bf16*, long, const bf16*, float, bf16*, long, long, long,
                     long);
template <class Number>
using Rotate = void(int, int, bf16*, long, const Number*, const Number*, long, long, long, long);
using Attend = void(int, int, const bf16*, const bf16*, const bf16*, long, bf16*, long, long, long,
                    long, float);
using RunTogether = void(int, long, void (*)(const void*, long), const void*);

void normalise_and_rotate(const Library& library, int best, long num_rows, long num_heads,
                          long length) {
    auto* norm = library.function<RmsNorm>("lowtide_rms_norm");
    auto* rotate = library.function<Rotate<bf16>>("lowtide_rotate");
    auto* rotate_wide = library.function<Rotate<float>>("lowtide_rotate_in_float32");
    const long stride = num_heads * length + 5, half = length / 2;
    const Numbers x = numbers(strided(num_rows, stride, num_heads * length));
    const Numbers weight = numbers(length), cos = numbers(num_rows * half);
    const Numbers sin = numbers(num_rows * half);
    const Floats wide_cos = floats(num_rows * half), wide_sin = floats(num_rows * half);
    Numbers first;
    for (int variant = 0; variant <= best; ++variant)
        for (int num_threads : THREADS) {
            Numbers out = x;
            norm(variant, num_threads, x.data(), stride, weight.data(), 1e-6f, out.data(), stride,
                 num_rows, num_heads, length);
            rotate(variant, num_threads, out.data(), stride, cos.data(), sin.data(), num_rows,
                   num_heads, length, half);
            rotate_wide(variant, num_threads, out.data(), stride, wide_cos.data(), wide_sin.data(),
                        num_rows, num_heads, length, half);
            if (first.empty()) first = out;
            expect(out == first, "bits of norm and rotation", variant, num_rows, length);
        }
}

// One head's, in double precision.
double attended(const Numbers& query, const Numbers& keys, const Numbers& values, long head,
                long key_head, long num_tokens, long dim, long i, float scale) {
    double total = 0, sum = 0;
    for (long t = 0; t < num_tokens; ++t) {
        const long at = (key_head * num_tokens + t) * dim;
        double score = 0;
        for (long d = 0; d < dim; ++d)
            score += double(lowtide::widen(query[head * dim + d])) * lowtide::widen(keys[at + d]);
        const double weight = std::exp(score * scale);
        total += weight, sum += weight * lowtide::widen(values[at + i]);
    }
    return sum / total;
}

void attend(Attend* call, int best, long num_key_heads, long group, long num_tokens, long dim) {
    const float scale = 0.3f;
    const long num_heads = num_key_heads * group, num_k = num_key_heads * num_tokens * dim;
    const Numbers query = numbers(num_heads * dim), keys = numbers(num_k), values = numbers(num_k);
    Numbers first;
    for (int variant = 0; variant <= best; ++variant)
        for (int num_threads : THREADS) {
            Numbers out(num_heads * dim);
            call(variant, num_threads, query.data(), keys.data(), values.data(), num_tokens * dim,
                 out.data(), num_key_heads, group, num_tokens, dim, scale);
            if (first.empty()) first = out;
            expect(out == first, "bits of attention", variant, num_threads, num_tokens);
        }
    const long head = below(num_heads), i = below(dim);
    const double wanted =
        attended(query, keys, values, head, head / group, num_tokens, dim, i, scale);
    expect(is_near(first[head * dim + i], wanted, 1), "attention", num_tokens, dim, group);
}

// Whose pieces are counted.
struct Counted {
    std::vector<std::atomic<int>> times;
    explicit Counted(long num_pieces) : times(num_pieces) {}

    static void piece(const void* work, long number) {
        const auto* own = static_cast<const Counted*>(work);
        const_cast<Counted*>(own)->times[number].fetch_add(1, std::memory_order_relaxed);
    }
};

}  // namespace

void check_rows(const Library& kernels) {
    const int best = kernels.function<int()>("lowtide_best_variant")();
    for (long num_rows : {0, 1, 3})
        for (long num_heads : {1, 5})
            for (long length : {1, 2, 15, 16, 18, 128, 515})
                normalise_and_rotate(kernels, best, num_rows, num_heads, length);
    normalise_and_rotate(kernels, best, 700, 4, 128);  // enough for several threads
}

void check_attention(const Library& kernels) {
    const int best = kernels.function<int()>("lowtide_best_variant")();
    auto* call = kernels.function<Attend>("lowtide_attend");
    for (long dim : {1, 33, 128})
        for (long num_tokens : {1, 127, 128, 131, 300})
            for (long group : {1, 3, 9}) attend(call, best, 2, group, num_tokens, dim);
    attend(call, best, 4, 2, 300, 128);
    attend(call, best, 1, 1, 5, 1024);
}

void check_team(const Library& kernels) {
    auto* run = kernels.function<RunTogether>("lowtide_run_together");
    const auto many = [run](long num_calls) {
        for (long call = 0; call < num_calls; ++call) {
            const long num_pieces = call % 23;
            Counted counted(num_pieces);
            run(1 + call % 4, num_pieces, Counted::piece, &counted);
            for (const auto& times : counted.times)
                if (times.load() != 1) std::abort();  // expect() is for one thread
            if (call % 97 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
    };
    many(2000);
    std::thread other(many, 2000);  // two callers, one team
    many(2000);
    other.join();
}

}  // namespace driver
