// The products of `quantised_products.hpp` for Python: with one weight, and with many experts'.

#include <utility>

#include "pairs.hpp"
#include "quantised_products.hpp"
#include "team.hpp"

using namespace lowtide;

namespace {

constexpr long PIECE_BYTES = WORTH_BYTES / 4;  // of a matrix, as it is stored

using RunTogether = void (*)(int, long, Piece, const void*);
RunTogether team = nullptr;  // that of the other operators: a process has one

int plain_variant(int variant) { return variant == BF16_AVX512 ? WITH_AVX512 : variant; }

long features_of_piece(const QuantisedWeights& w, long num_outs) {
    return std::clamp(PIECE_BYTES / w.row_bytes(), 1L, num_outs);
}

QuantisedProduct some_features(const QuantisedProduct& p, long first, long last) {
    const bf16* bias = p.bias ? p.bias + first : nullptr;
    return {p.x, p.x_stride, p.w.from(first), bias, p.out + first, p.out_stride, p.num_rows,
            last - first};
}

// Where the experts' weights are: those of slot 0, the others at multiples of `slot_bytes`.
struct Slots {
    const char *gate, *up, *down;
    long slot_bytes, hidden, width;
    int num_bits;

    QuantisedWeights inward(const char* of_slot_0, const Group& group) const {
        return {at(of_slot_0, group), hidden, num_bits};
    }

    QuantisedWeights outward(const Group& group) const { return {at(down, group), width, num_bits}; }

    const std::uint8_t* at(const char* of_slot_0, const Group& group) const {
        return reinterpret_cast<const std::uint8_t*>(of_slot_0 + group.slot * slot_bytes);
    }
};

// A row for each pair of a token and an expert: parts [.., hidden], gate and up [.., width].
struct Scratch {
    bf16 *parts, *gate, *up;
};

// Gates and ups first, then downs: the groups' rows of parts, from inputs to outputs.
void run_groups(
    int variant, int num_threads, const Group* groups, long num_groups, const Slots& slots,
    const Scratch& scratch
) {
    if (num_groups == 0) return;
    const long hidden = slots.hidden, width = slots.width;
    const bf16* none = nullptr;
    const QuantisedWeights inward = slots.inward(slots.gate, groups[0]);
    const QuantisedWeights outward = slots.outward(groups[0]);
    if (num_groups * (2 * width * inward.row_bytes() + hidden * outward.row_bytes()) < WORTH_BYTES)
        num_threads = 1;

    const long wide = features_of_piece(inward, width), num_wide = (width + wide - 1) / wide;
    together(num_threads, num_groups * num_wide, [&](long number) {
        const Group& group = groups[number / num_wide];
        const long first = number % num_wide * wide, length = std::min(wide, width - first);
        const bf16* in = scratch.parts + group.first * hidden;
        const long start = group.first * width + first;
        for (auto [w, to] : {std::pair(slots.gate, scratch.gate), std::pair(slots.up, scratch.up)})
            multiply_quantised(variant, {
                in, hidden, slots.inward(w, group).from(first), none, to + start, width,
                group.num_rows, length,
            });
        for (long row = 0; row < group.num_rows; ++row)
            silu_times(plain_variant(variant), scratch.gate + start + row * width,
                       scratch.up + start + row * width, length);
    });

    const long tall = features_of_piece(outward, hidden), num_tall = (hidden + tall - 1) / tall;
    together(num_threads, num_groups * num_tall, [&](long number) {
        const Group& group = groups[number / num_tall];
        const long first = number % num_tall * tall, length = std::min(tall, hidden - first);
        multiply_quantised(variant, {
            scratch.gate + group.first * width, width, slots.outward(group).from(first), none,
            scratch.parts + group.first * hidden + first, hidden, group.num_rows, length,
        });
    });
}

}  // namespace

namespace lowtide {

void run_together(int num_threads, long num_pieces, Piece piece, const void* work) {
    if (team != nullptr) return team(num_threads, num_pieces, piece, work);
    for (long number = 0; number < num_pieces; ++number) piece(work, number);
}

}  // namespace lowtide

extern "C" {

// What divides work from now on: `lowtide_run_together` of the other operators' library.
void lowtide_quantised_team(RunTogether of_process) { team = of_process; }

// The best variant of this CPU; all before it run on it, too.
int lowtide_best_quantised() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return PLAIN;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw")) return PLAIN_AVX2;
#ifdef HAS_PAIRS
    if (__builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bf16") &&
        __builtin_cpu_supports("f16c"))
        return BF16_AVX512;
#endif
    return PLAIN_AVX512;
#else
    return PLAIN;
#endif
}

// Strides of x and out are in elements, w is [num_outs, row_bytes]. bias may be null.
void lowtide_quantised_multiply(
    int variant, int num_threads, int num_bits, const bf16* x, long x_stride,
    const std::uint8_t* w, const bf16* bias, bf16* out, long out_stride, long num_rows,
    long num_outs, long num_k
) {
    const QuantisedProduct p = {x, x_stride, {w, num_k, num_bits}, bias, out, out_stride, num_rows,
                                num_outs};
    if (num_outs * p.w.row_bytes() < WORTH_BYTES) num_threads = 1;
    const long length = features_of_piece(p.w, num_outs);
    together(num_threads, (num_outs + length - 1) / length, [&](long number) {
        const long first = number * length;
        multiply_quantised(variant, some_features(p, first, std::min(first + length, num_outs)));
    });
}

// See `lowtide_gated_mlps`.
void lowtide_quantised_mlps(
    int variant, int num_threads, int num_bits, const std::int64_t* groups, long num_groups,
    const char* gate_w, const char* up_w, const char* down_w, long slot_bytes, bf16* parts,
    bf16* gate, bf16* up, long hidden, long width
) {
    const Slots slots = {gate_w, up_w, down_w, slot_bytes, hidden, width, num_bits};
    const auto* of_experts = reinterpret_cast<const Group*>(groups);
    run_groups(variant, num_threads, of_experts, num_groups, slots, {parts, gate, up});
}

// See `lowtide_run_experts`.
void lowtide_quantised_experts(
    int variant, int num_threads, int num_bits, const bf16* x, const std::int64_t* experts,
    const float* weights, const std::int64_t* slots, const char* gate_w, const char* up_w,
    const char* down_w, long slot_bytes, bf16* parts, bf16* gate, bf16* up, float* out,
    long num_tokens, long k, long hidden, long width
) {
    const long num_pairs = num_tokens * k;
    const SortedPairs sorted(x, experts, slots, parts, num_tokens, k, hidden);
    const Slots places = {gate_w, up_w, down_w, slot_bytes, hidden, width, num_bits};
    const auto num_groups = static_cast<long>(sorted.groups.size());
    run_groups(variant, num_threads, sorted.groups.data(), num_groups, places, {parts, gate, up});

    const long* rows = sorted.row_of.data();
    vectorised(plain_variant(variant), [=]() INLINED_LAMBDA {
        std::fill(out, out + num_tokens * hidden, 0.0f);
        for (long pair = 0; pair < num_pairs; ++pair) {
            const bf16* part = parts + rows[pair] * hidden;
            float* sum = out + pair / k * hidden;
            for (long i = 0; i < hidden; ++i) sum[i] += weights[pair] * widen(part[i]);
        }
    });
}

// w [num_rows, row_bytes] to out [num_rows, num_k] bfloat16, each weight rounded once.
void lowtide_quantised_unpack(
    int variant, int num_bits, const std::uint8_t* w, bf16* out, long num_rows, long num_k
) {
    const QuantisedWeights weights = {w, num_k, num_bits};
#ifdef HAS_PAIRS
    if (variant == BF16_AVX512)
        return num_bits == 4 ? unpack_pairs<4>(weights, out, num_rows)
                             : unpack_pairs<8>(weights, out, num_rows);
#endif
    vectorised(plain_variant(variant), [=]() INLINED_LAMBDA {
        for (long row = 0; row < num_rows; ++row)
            for (long group = 0; group < weights.num_groups(); ++group) {
                const std::uint8_t* from = weights.row(row);
                const std::uint8_t* codes = from + group * weights.group_bytes();
                const float scale = weights.scale(from, group), zero = weights.zero(from, group);
                float numbers[GROUP];
                if (num_bits == 4)
                    unpack_group<4, false>(codes, scale, zero, numbers);
                else
                    unpack_group<8, false>(codes, scale, zero, numbers);
                bf16* to = out + row * num_k + group * GROUP;
                const long length = std::min(GROUP, num_k - group * GROUP);
                if (length == GROUP)
                    for (long i = 0; i < GROUP; ++i) to[i] = round_bf16(numbers[i]);
                else
                    for (long i = 0; i < length; ++i) to[i] = round_bf16(numbers[i]);
            }
    });
}

}
