// A router's product and choice, and what its layer does to rows beside products.

#include "driver.hpp"
#include "operators.hpp"

namespace driver {
namespace {

using lowtide::Choice;
using MultiplyFloat32 = void(int, int, const float*, long, const float*, float*, long, long, long,
                             long);
using ChooseExperts = void(int, const void*, int, const float*, const Choice*, std::int64_t*,
                           float*, long);
using SiluTimes = void(int, int, bf16*, const bf16*, long);
using WeighRows = void(int, bf16*, const bf16*, long, long);

// Experts, chosen ones, groups, those kept, and how many of a group are its rank.
constexpr long CHOICES[][5] = {
    {1, 1, 1, 1, 1},  {7, 3, 1, 1, 1},   {24, 24, 1, 1, 1}, {64, 8, 1, 1, 1}, {257, 8, 1, 1, 1},
    {15, 3, 5, 2, 2}, {32, 8, 8, 4, 2},  {8, 2, 8, 2, 2},   {64, 6, 8, 3, 1},
};

void multiply(const Library& library, int best, long num_rows, long num_outs, long num_k) {
    auto* call = library.function<MultiplyFloat32>("lowtide_multiply_float32");
    const long x_stride = num_k + 3, out_stride = num_outs + 1;
    const Floats x = floats(strided(num_rows, x_stride, num_k)), w = floats(num_outs * num_k);
    Floats first;
    for (int variant = 0; variant <= best; ++variant)
        for (int num_threads : THREADS) {
            Floats out(strided(num_rows, out_stride, num_outs), 7);
            call(variant, num_threads, x.data(), x_stride, w.data(), out.data(), out_stride,
                 num_rows, num_outs, num_k);
            if (variant == 0 && num_threads == 1) first = out;
            expect(out == first, "bits of a product in float32", variant, num_rows, num_outs);
        }
    for (long row = 0; row < num_rows; ++row) {
        const long o = below(num_outs);
        double sum = 0;
        for (long k = 0; k < num_k; ++k)
            sum += double(x[row * x_stride + k]) * w[o * num_k + k];
        expect(std::abs(first[row * out_stride + o] - sum) <= 1e-5 * num_k, "a product in float32",
               row, o, num_k);
    }
}

// Ascending, different ones that there are; without groups and bias those of greatest ranks, which
// may be equal once they are rounded to bfloat16.
void check_chosen(const Choice& choice, bool is_plain, const Floats& ranks, const Ids& experts,
                  bool are_rounded) {
    const long length = choice.num_experts, k = choice.num_chosen;
    for (long first = 0; first < long(experts.size()); first += k) {
        const long row = first / k;
        std::vector<bool> is_chosen(length);
        float least = INFINITY, most = -INFINITY;
        for (long i = first; i < first + k; ++i) {
            const bool is_known = 0 <= experts[i] && experts[i] < length;
            expect(is_known && (i == first || experts[i - 1] < experts[i]), "who is chosen", row,
                   i - first, experts[i]);
            if (!is_known) return;
            is_chosen[experts[i]] = true;
        }
        for (long i = 0; i < length; ++i) {
            const float rank = ranks[row * length + i];
            if (is_chosen[i]) least = std::min(least, rank);
            else most = std::max(most, rank);
        }
        if (are_rounded) most *= 1 - 0x1p-7f;
        expect(!is_plain || least >= most, "the best are chosen", row, length, k);
    }
}

// has: bits; which of the rules that a router may have it has.
void choose(const Library& library, int best, const long (&sizes)[5], long num_rows, unsigned has) {
    auto* call = library.function<ChooseExperts>("lowtide_choose_experts");
    const bool has_bias = has & 8, has_nan = has & 16;
    const Choice choice = {sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], int(has & 1),
                           int(has >> 1 & 1), int(has >> 2 & 1), 2.5f, 1e-6f,
                           int(has >> 5 & 1)};
    const long num_logits = num_rows * choice.num_experts;
    Floats logits(num_logits);
    Numbers narrow;
    for (float& each : logits) {
        narrow.push_back(lowtide::round_bf16(30 * floats(1)[0]));
        each = lowtide::widen(narrow.back());
    }
    if (has_nan && num_logits > 0)
        logits[below(num_logits)] = NAN, narrow[below(num_logits)] = lowtide::round_bf16(NAN);
    Floats sigmoids = logits;
    for (float& each : sigmoids) each = 1 / (1 + std::exp(-each));
    const Floats bias = floats(choice.num_experts);
    for (int is_float32 : {1, 0}) {
        Ids first;
        for (int variant = 0; variant <= best; ++variant) {
            Ids experts(num_rows * choice.num_chosen, -1);
            Floats weights(experts.size(), NAN);
            const void* given = is_float32 ? static_cast<const void*>(logits.data()) : narrow.data();
            call(variant, given, is_float32, has_bias ? bias.data() : nullptr, &choice,
                 experts.data(), weights.data(), num_rows);
            if (variant == 0) first = experts;
            const bool is_plain = !has_nan && !has_bias && choice.num_groups == 1;
            const bool are_rounded = choice.is_sigmoid && !choice.of_chosen && !is_float32;
            check_chosen(choice, is_plain, are_rounded ? sigmoids : logits, experts, are_rounded);
            if (has_nan) continue;
            expect(experts == first, "who is chosen by variants", variant, num_rows, has);
            for (float each : weights)
                expect(each >= 0 && each < INFINITY, "a weight", variant, num_rows, has);
        }
    }
}

void change_rows(const Library& library, int best, long num_rows, long length) {
    auto* silu_times = library.function<SiluTimes>("lowtide_silu_times");
    auto* weigh_rows = library.function<WeighRows>("lowtide_weigh_rows");
    const Numbers x = numbers(num_rows * length), up = numbers(num_rows * length);
    const Numbers gates = numbers(num_rows);
    Numbers first;
    for (int variant = 0; variant <= best; ++variant) {
        Numbers out = x;
        silu_times(variant, 1 + variant % 3, out.data(), up.data(), long(out.size()));
        weigh_rows(variant, out.data(), gates.data(), num_rows, length);
        if (variant == 0) first = out;
        expect(out == first, "bits of weighed rows by variants", variant, num_rows, length);
    }
    for (long i = 0; i < long(x.size()); ++i) {
        const double value = lowtide::widen(x[i]), gate = lowtide::widen(gates[i / length]);
        const double wanted = value / (1 + std::exp(-value)) * lowtide::widen(up[i]);
        expect(is_near(first[i], wanted / (1 + std::exp(-gate)), 1), "a weighed row", i, length);
    }
}

}  // namespace

void check_router(const Library& kernels) {
    const int best = kernels.function<int()>("lowtide_best_variant")();
    for (long num_rows : {0, 1, 5, 32})
        for (long num_outs : {1, 17, 256})
            for (long num_k : {1, 63, 130, 515}) multiply(kernels, best, num_rows, num_outs, num_k);
    for (const auto& sizes : CHOICES)
        for (long num_rows : {0, 1, 7})
            for (unsigned has = 0; has < 64; ++has) choose(kernels, best, sizes, num_rows, has);
    for (long num_rows : {0, 1, 3})
        for (long length : {1, 2, 15, 18, 515}) change_rows(kernels, best, num_rows, length);
}

}  // namespace driver
