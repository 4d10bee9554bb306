// Weights in 8 and 4 bits: rounded, unpacked and multiplied with, by rows as they are and by rows in
// int8.

#include "driver.hpp"
#include "packed/quantised.hpp"

namespace driver {
namespace {

using Bytes = std::vector<std::uint8_t>;
using Pack = void(int, int, int, const void*, const float*, std::uint8_t*, long, long);
using Unpack = void(int, int, const void*, long, long, const std::int64_t*, long, long, bf16*);

struct Shape {
    long num_outs, num_k;
};
constexpr Shape SHAPES[] = {{1, 1},    {5, 64},   {7, 130},  {9, 63},
                            {33, 192}, {17, 1100}, {64, 320}, {900, 520}};
constexpr long LARGE = 1 << 16;  // from so many weights on, some rows are enough

// What multiplies: its functions' names begin with `prefix`.
struct Kind {
    const Library& library;
    std::string prefix;
    bool rounds_rows;
    int num_variants;

    static Kind exact(const Library& library) {
        const int best = library.function<int()>("lowtide_best_own")();
        return {library, "lowtide_packed_", false, best + 1};
    }

    static Kind int8(const Library& library) {
        const int best = library.function<int()>("lowtide_best_int8")();
        return {library, "lowtide_rounded_", true, best + 1};
    }

    // Of one expert.
    long max_rows(int variant) const {
        if (rounds_rows) return 1000;
        return library.function<long(int)>("lowtide_max_own_rows")(variant);
    }

    template <class Function>
    Function* function(const char* name) const {
        return library.function<Function>((prefix + name).c_str());
    }

    // Of a product's exact sum: rows in int8 are off by half a step of 1/127 of their largest.
    bool is_near(bf16 found, double wanted, double size, long num_k) const {
        const double slack = rounds_rows ? size / 150 : 0.0;
        const double off = std::abs(lowtide::widen(found) - wanted);
        return off <= slack + std::abs(wanted) / 128 + 1e-5 * double(num_k) + 1e-4;
    }
};

long num_variants(const Library& library) {
    return library.function<int()>("lowtide_best_own")() + 1;
}

long row_bytes(long num_k, int num_bits) {
    return lowtide::QuantisedWeights{nullptr, num_k, num_bits}.row_bytes();
}

Bytes packed(
    Pack* pack, int num_bits, const Floats& weights, const Shape& shape, int variant = 0,
    const float* importance = nullptr
) {
    Bytes out(shape.num_outs * row_bytes(shape.num_k, num_bits), 9);
    pack(variant, num_bits, 0, weights.data(), importance, out.data(), shape.num_outs, shape.num_k);
    return out;
}

void multiply(const Kind& kind, int type, const Shape& shape) {
    const Library& library = kind.library;
    auto* unpack = library.function<Unpack>("lowtide_packed_unpack");
    auto* call = kind.function<MultiplyFunction>("multiply");
    const auto [num_outs, num_k] = shape;
    const Floats exact = floats(num_outs * num_k);
    const Bytes w = packed(
        library.function<Pack>("lowtide_quantised_pack"), num_bits_of(type), exact, shape);
    const Numbers bias = numbers(num_outs);
    Numbers weights;
    for (int variant = 0; variant < num_variants(library); ++variant) {
        Numbers whole(num_outs * num_k);
        unpack(variant, type, w.data(), num_outs, num_k, nullptr, 0, num_outs, whole.data());
        if (variant == 0) weights = whole;
        expect(whole == weights, "bits of what is unpacked", variant, num_outs, num_k);
    }
    for (int variant = 0; variant < kind.num_variants; ++variant) {
        for (long num_rows : {0, 1, 2, 3, 5, 8, 13, 16, 17, 25, 32, 65, 130}) {
            const bool is_long = num_outs * num_k > LARGE && num_rows != 3;
            if (is_long || num_rows > kind.max_rows(variant)) continue;
            const long x_stride = num_k + 3, out_stride = num_outs + 1;
            const Numbers x = numbers(strided(num_rows, x_stride, num_k));
            Numbers first;
            for (int num_threads : THREADS) {
                Numbers out(strided(num_rows, out_stride, num_outs), 7);
                call(variant, num_threads, type, x.data(), x_stride, w.data(), bias.data(),
                     out.data(), out_stride, num_rows, num_outs, num_k);
                if (num_threads == 1) first = out;
                expect(out == first, "bits of a product by threads", variant, num_rows, num_outs);
            }
            for (long row = 0; row < num_rows; row += 5) {
                const long o = below(num_outs);
                double sum = lowtide::widen(bias[o]), size = 0, largest = 0;
                for (long k = 0; k < num_k; ++k) {
                    const double weight = lowtide::widen(weights[o * num_k + k]);
                    const double input = lowtide::widen(x[row * x_stride + k]);
                    sum += input * weight, size += std::abs(weight);
                    largest = std::max(largest, std::abs(input));
                }
                expect(kind.is_near(first[row * out_stride + o], sum, size * largest, num_k),
                       "a product of few bits", variant, row, o);
            }
        }
    }
}

void run_experts(const Kind& kind, int type, const Routed& routed, long hidden, long width) {
    const int num_bits = num_bits_of(type);
    auto* pack = kind.library.function<Pack>("lowtide_quantised_pack");
    auto* whole = kind.function<ExpertsFunction>("experts");
    auto* groups = kind.function<MlpsFunction>("mlps");
    const auto [num_tokens, k, num_experts] = routed;
    Bytes slots_bytes;
    for (long part = 0; part < 3 * num_experts; ++part) {
        const Shape shape = part % 3 == 2 ? Shape{hidden, width} : Shape{width, hidden};
        const Bytes one = packed(pack, num_bits, floats(hidden * width), shape);
        slots_bytes.insert(slots_bytes.end(), one.begin(), one.end());
    }
    const long inward = width * row_bytes(hidden, num_bits);
    const long slot_bytes = 2 * inward + hidden * row_bytes(width, num_bits);
    const Bytes exact(slots_bytes);  // no room behind the last
    const ExpertPlaces places = {exact.data(), exact.data() + inward, exact.data() + 2 * inward,
                                 slot_bytes};
    const std::int32_t types[] = {type, type, type};
    const long num_pairs = num_tokens * k;
    const Numbers x = numbers(num_tokens * hidden);
    const Floats weights = floats(num_pairs);
    const Ids experts = chosen_experts(num_tokens, k, num_experts), slots = slots_of(experts);
    for (int variant = 0; variant < kind.num_variants; ++variant) {
        Floats first;
        for (int num_threads : THREADS) {
            Numbers parts(num_pairs * hidden), gate(num_pairs * width), up(num_pairs * width);
            Floats out(num_tokens * hidden, 3.0f);
            whole(variant, num_threads, types, x.data(), experts.data(), weights.data(),
                  slots.data(), &places, parts.data(), gate.data(), up.data(), out.data(),
                  num_tokens, k, hidden, width);
            if (num_threads == 1) first = out;
            expect(out == first, "bits of experts by threads", variant, num_tokens, num_threads);
            const long of_one = std::min(num_pairs, kind.max_rows(variant));
            const Ids of_groups = of_one == 0 ? Ids{} : Ids{slots[0], 0, of_one};
            groups(variant, num_threads, types, of_groups.data(), long(of_groups.size()) / 3,
                   &places, parts.data(), gate.data(), up.data(), hidden, width);
        }
    }
}

}  // namespace

void check_packing(const Library& kernels) {
    auto* pack = kernels.function<Pack>("lowtide_quantised_pack");
    for (const Shape& shape : SHAPES)
        for (int num_bits : {8, 4})
            for (float other : {0.0f, 60.0f, 1e30f, INFINITY, NAN}) {
                Floats weights = floats(shape.num_outs * shape.num_k);
                if (long(weights.size()) > LARGE && other != 0.0f) continue;
                if (other != 0.0f) weights[below(long(weights.size()))] = other;
                Numbers narrow;
                for (float& each : weights) {
                    narrow.push_back(lowtide::round_bf16(each));
                    each = lowtide::widen(narrow.back());
                }
                const Floats worth = floats(shape.num_k);
                const Bytes wanted = packed(pack, num_bits, weights, shape);
                const Bytes weighted = packed(pack, num_bits, weights, shape, 0, worth.data());
                const int last = int(std::min(3L, num_variants(kernels)));
                for (int variant = 0; variant < last; ++variant) {
                    Bytes of_narrow(wanted.size(), 9);
                    pack(variant, num_bits, 1, narrow.data(), nullptr, of_narrow.data(),
                         shape.num_outs, shape.num_k);
                    const bool is_same =
                        packed(pack, num_bits, weights, shape, variant) == wanted &&
                        packed(pack, num_bits, weights, shape, variant, worth.data()) == weighted;
                    expect(is_same && of_narrow == wanted, "bits of what is packed", variant,
                           shape.num_outs, shape.num_k);
                }
            }
}

void check_quantised(const Library& kernels) {
    const Shape sizes[] = {{1, 1}, {40, 24}, {130, 67}};
    for (const Kind& kind : {Kind::exact(kernels), Kind::int8(kernels)})
        for (int type : {Q8, Q4}) {
            for (const Shape& shape : SHAPES) multiply(kind, type, shape);
            for (const auto& [hidden, width] : sizes)
                for (const Routed& routed : ROUTED)
                    run_experts(kind, type, routed, hidden, width);
        }
}

}  // namespace driver
