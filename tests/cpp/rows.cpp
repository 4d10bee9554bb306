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
using WideRmsNorm = void(int, int, const bf16*, long, const float*, float, bf16*, long, long, long,
                         long);
using RotatePairs = void(int, int, bf16*, long, long, const float*, const float*, long, long, long);
using Attend = void(int, int, const bf16*, const bf16*, const bf16*, long, bf16*, long, long, long,
                    long, long, float, const float*);
using MultiplyHeads = void(int, int, const bf16*, long, long, const bf16*, long, long, int, bf16*,
                           long, long, long, long, long, long);
using RunTogether = void(int, long, void (*)(const void*, long), const void*);

void normalise_and_rotate(const Library& library, int best, long num_rows, long num_heads,
                          long length) {
    auto* norm = library.function<RmsNorm>("lowtide_rms_norm");
    auto* wide_norm = library.function<WideRmsNorm>("lowtide_rms_norm_in_float32");
    auto* rotate_pairs = library.function<RotatePairs>("lowtide_rotate_pairs");
    auto* rotate = library.function<Rotate<bf16>>("lowtide_rotate");
    auto* rotate_wide = library.function<Rotate<float>>("lowtide_rotate_in_float32");
    const long stride = num_heads * length + 5, half = length / 2;
    const Numbers x = numbers(strided(num_rows, stride, num_heads * length));
    const Numbers weight = numbers(length), cos = numbers(num_rows * half);
    const Numbers sin = numbers(num_rows * half);
    const Floats wide_weight = floats(length);
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
            rotate_pairs(variant, num_threads, out.data(), stride, length, wide_cos.data(),
                         wide_sin.data(), num_rows, num_heads, half);
            wide_norm(variant, num_threads, out.data(), stride, wide_weight.data(), 1e-6f,
                      out.data(), stride, num_rows, num_heads, length);
            wide_norm(variant, num_threads, out.data(), stride, nullptr, 1e-6f, out.data(), stride,
                      num_rows, num_heads, length);
            if (first.empty()) first = out;
            expect(out == first, "bits of norm and rotation", variant, num_rows, length);
        }
}

// One head's, in double precision.
double attended(const Numbers& query, const Numbers& keys, const Numbers& values, long head,
                long key_head, long num_tokens, long dim, long i, float scale, const float* sinks) {
    double total = sinks == nullptr ? 0 : std::exp(sinks[head]), sum = 0;
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

void attend(Attend* call, int best, long num_key_heads, long group, long num_tokens, long dim,
            long value_dim, bool has_sinks) {
    const float scale = 0.3f;
    const long num_heads = num_key_heads * group, num_k = num_key_heads * num_tokens * dim;
    const Numbers query = numbers(num_heads * dim), keys = numbers(num_k), values = numbers(num_k);
    const Floats of_heads = floats(num_heads);
    const float* const sinks = has_sinks ? of_heads.data() : nullptr;
    Numbers first;
    for (int variant = 0; variant <= best; ++variant)
        for (int num_threads : THREADS) {
            Numbers out(num_heads * value_dim);
            call(variant, num_threads, query.data(), keys.data(), values.data(), num_tokens * dim,
                 out.data(), num_key_heads, group, num_tokens, dim, value_dim, scale, sinks);
            if (first.empty()) first = out;
            expect(out == first, "bits of attention", variant, num_threads, num_tokens);
        }
    const long head = below(num_heads), i = below(value_dim);
    const double wanted =
        attended(query, keys, values, head, head / group, num_tokens, dim, i, scale, sinks);
    expect(is_near(first[head * value_dim + i], wanted, 1), "attention", num_tokens, dim, group);
}

// by_outs: weights are [heads, outs, k], else [heads, k, outs].
void multiply_heads(MultiplyHeads* call, int best, long num_rows, long num_heads, long num_outs,
                    long num_k, bool by_outs) {
    const Numbers x = numbers(num_rows * num_heads * num_k);
    const Numbers w = numbers(num_heads * num_outs * num_k);
    const long w_row = by_outs ? num_k : num_outs;
    for (int variant = 0; variant <= best; ++variant) {
        Numbers first;
        for (int num_threads : THREADS) {
            Numbers out(num_rows * num_heads * num_outs);
            call(variant, num_threads, x.data(), num_heads * num_k, num_k, w.data(),
                 num_outs * num_k, w_row, by_outs, out.data(), num_heads * num_outs, num_outs,
                 num_rows, num_heads, num_outs, num_k);
            if (first.empty()) first = out;
            expect(out == first, "bits of heads' products", variant, num_threads, num_k);
        }
        for (long row = 0; row < num_rows; ++row) {
            const long head = below(num_heads), o = below(num_outs);
            double sum = 0;
            for (long k = 0; k < num_k; ++k) {
                const long at = by_outs ? o * num_k + k : k * num_outs + o;
                sum += double(lowtide::widen(x[(row * num_heads + head) * num_k + k])) *
                       lowtide::widen(w[head * num_outs * num_k + at]);
            }
            expect(is_near(first[(row * num_heads + head) * num_outs + o], sum, num_k),
                   "a head's product", variant, row, o);
        }
    }
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
            for (long group : {1, 3, 9}) attend(call, best, 2, group, num_tokens, dim, dim, group == 3);
    attend(call, best, 4, 2, 300, 128, 128, false);
    attend(call, best, 1, 1, 5, 1024, 1024, true);
    attend(call, best, 1, 9, 131, 71, 49, false);
    auto* heads = kernels.function<MultiplyHeads>("lowtide_multiply_heads");
    for (long num_rows : {0, 1, 3})
        for (long num_k : {1, 31, 130})
            for (long num_outs : {1, 63, 64, 200})
                for (bool by_outs : {false, true})
                    multiply_heads(heads, best, num_rows, 3, num_outs, num_k, by_outs);
    multiply_heads(heads, best, 2, 5, 512, 128, false);  // enough for several threads
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
