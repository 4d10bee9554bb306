// Products of a few bfloat16 rows, one expert's and several experts'.

#include "driver.hpp"

namespace driver {
namespace {


struct Shape {
    long num_outs, num_k;
};
constexpr Shape SHAPES[] = {{1, 1}, {5, 31}, {16, 32}, {33, 130}, {17, 64}, {300, 515}};
constexpr long ROWS[] = {0, 1, 2, 3, 5, 8, 13, 17, 31, 32};
constexpr long LARGE = 1 << 16;  // from so many weights on, some rows are enough

void multiply(MultiplyFunction* call, int variant, long max_rows, const Shape& shape) {
    const auto [num_outs, num_k] = shape;
    const Numbers w = numbers(num_outs * num_k), bias = numbers(num_outs);
    for (long num_rows : ROWS) {
        if (num_rows > max_rows || (num_outs * num_k > LARGE && num_rows % 3 != 2)) continue;
        const long x_stride = num_k + 3, out_stride = num_outs + 1;
        const Numbers x = numbers(strided(num_rows, x_stride, num_k));
        Numbers first;
        for (int num_threads : THREADS) {
            Numbers out(strided(num_rows, out_stride, num_outs), 7);
            call(variant, num_threads, 0, x.data(), x_stride, w.data(), bias.data(), out.data(),
                 out_stride, num_rows, num_outs, num_k);
            if (num_threads == 1) first = out;
            expect(out == first, "bits of a product by threads", variant, num_rows, num_outs);
        }
        for (long row = 0; row < num_rows; ++row)
            for (long o = 0; o < num_outs; o += 1 + num_outs / 3) {
                double sum = lowtide::widen(bias[o]);
                for (long k = 0; k < num_k; ++k)
                    sum += double(lowtide::widen(x[row * x_stride + k])) *
                           lowtide::widen(w[o * num_k + k]);
                expect(is_near(first[row * out_stride + o], sum, num_k), "a product", variant, row,
                       o);
            }
        Numbers plain(strided(num_rows, num_outs, num_outs));
        call(variant, 1, 0, x.data(), x_stride, w.data(), nullptr, plain.data(), num_outs, num_rows,
             num_outs, num_k);
    }
}

// Slots of gate | up | down, one behind the other.
struct Experts {
    long num, hidden, width;
    Numbers weights = numbers(num * 3 * hidden * width);

    const bf16* part(long number) const { return weights.data() + number * hidden * width; }
    ExpertPlaces places() const {
        return {part(0), part(1), part(2), 3 * hidden * width * long(sizeof(bf16))};
    }
};

constexpr std::int32_t NO_TYPES[3] = {};  // bfloat16 weights have no other than this

void run_experts(const Library& library, int variant, const Routed& routed, const Experts& own) {
    auto* groups = library.function<MlpsFunction>("lowtide_plain_mlps");
    auto* whole = library.function<ExpertsFunction>("lowtide_plain_experts");
    const auto [num_tokens, k, num_experts] = routed;
    const long hidden = own.hidden, width = own.width, num_pairs = num_tokens * k;
    const Numbers x = numbers(num_tokens * hidden);
    const Floats weights = floats(num_pairs);
    const ExpertPlaces places = own.places();
    const Ids experts = chosen_experts(num_tokens, k, num_experts), slots = slots_of(experts);
    Floats wanted(num_tokens * hidden, 0.0f);
    for (long pair = 0; pair < num_pairs; ++pair) {
        Numbers row(x.begin() + pair / k * hidden, x.begin() + (pair / k + 1) * hidden);
        Numbers gate(width), up(width);
        const std::int64_t group[] = {experts[pair], 0, 1};
        groups(variant, 1, NO_TYPES, group, 1, &places, row.data(), gate.data(), up.data(), hidden,
               width);
        for (long i = 0; i < hidden; ++i)
            wanted[pair / k * hidden + i] += weights[pair] * lowtide::widen(row[i]);
    }
    for (int num_threads : THREADS) {
        Numbers parts(num_pairs * hidden), gate(num_pairs * width), up(num_pairs * width);
        Floats out(num_tokens * hidden, 3.0f);
        whole(variant, num_threads, NO_TYPES, x.data(), experts.data(), weights.data(),
              slots.data(), &places, parts.data(), gate.data(), up.data(), out.data(), num_tokens, k,
              hidden, width);
        expect(out == wanted, "experts at once", variant, num_tokens, k);
        const Ids of_groups = num_pairs == 0 ? Ids{} : Ids{slots[0], 0, num_pairs};
        groups(variant, num_threads, NO_TYPES, of_groups.data(), long(of_groups.size()) / 3,
               &places, parts.data(), gate.data(), up.data(), hidden, width);
    }
}

}  // namespace

void check_products(const Library& kernels) {
    const int best = kernels.function<int()>("lowtide_best_variant")();
    auto* max_rows = kernels.function<long(int)>("lowtide_max_rows");
    auto* call = kernels.function<MultiplyFunction>("lowtide_plain_multiply");
    for (int variant = 0; variant <= best; ++variant)
        for (const Shape& shape : SHAPES) multiply(call, variant, max_rows(variant), shape);
}

void check_experts(const Library& kernels) {
    const int best = kernels.function<int()>("lowtide_best_variant")();
    const Shape sizes[] = {{1, 1}, {40, 24}, {130, 67}};
    for (const auto& [hidden, width] : sizes)
        for (const Routed& routed : ROUTED) {
            const Experts own{routed.num_experts, hidden, width};
            for (int variant = 0; variant <= best; ++variant)
                run_experts(kernels, variant, routed, own);
        }
}

}  // namespace driver
