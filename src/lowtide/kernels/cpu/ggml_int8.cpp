// Products of rows rounded to int8 with weights of ggml's packed types: with one matrix, and with
// many experts'.

#include "expert_layer.hpp"
#include "ggml_int8.hpp"
#include "signatures.hpp"

using namespace lowtide;
using namespace lowtide::ggml;

namespace {

constexpr long CHUNK_ROWS = 256;  // rounded at a time
constexpr long PIECE_BYTES = WORTH_BYTES / 4;  // of a matrix, as far as tiles stay whole

struct RoundedType {
    long block_bytes, block_size;
    void (*multiply)(int variant, const RoundedProduct& p);
    const Order& (*order)(int variant);
};

template <class Type>
void multiply_with(int variant, const RoundedProduct& p) {
#ifdef HAS_VNNI
    if (variant == INT8_VNNI) return multiply_dots<Type>(p);
#endif
    vectorised(variant, [&p]() INLINED_LAMBDA { multiply_plainly<Type>(p); });
}

template <class Type>
const Order& order_of(int variant) {
    static constexpr Order PLAIN = plain_order<Type>();
#ifdef HAS_VNNI
    static constexpr Order IN_LANES = lane_order<Type>();
    if (variant == INT8_VNNI) return IN_LANES;
#endif
    return PLAIN;
}

template <class Type>
constexpr RoundedType of() {
    return {Type::BYTES, Type::SIZE, multiply_with<Type>, order_of<Type>};
}

// Of at most CHUNK_ROWS rows. A thread keeps them, since the same inputs meet several pieces of a
// matrix, and often two matrices.
const RoundedRows& rounded(int variant, const Order& order, const Product<bf16>& p) {
    thread_local RoundedRows rows;
    thread_local std::uint64_t kept = 0;
    thread_local const Order* kept_order = nullptr;
    if (p.inputs == 0 || p.inputs != kept || &order != kept_order)
        rows.round(variant, order, p.x, p.x_stride, p.num_rows, p.num_k);
    kept = p.inputs, kept_order = &order;
    return rows;
}

// In the order of `NAMES` in ggml.py.
constexpr RoundedType TYPES[] = {
    of<Q4_0>(), of<Q4_1>(), of<Q5_0>(), of<Q8_0>(), of<Iq4Nl>(), of<Mxfp4>(),
    of<Q2K>(),  of<Q3K>(),  of<Q4K>(),  of<Q5K>(),  of<Q6K>(),   of<Iq4Xs>(),
};

// A matrix [.., num_k], as `ExpertLayer` takes it.
struct RoundingWeights {
    const RoundedType* type;
    const u8* rows;
    long num_k;

    long row_bytes() const { return num_k / type->block_size * type->block_bytes; }
    const void* start() const { return rows; }
    RoundingWeights from(long row) const { return {type, rows + row * row_bytes(), num_k}; }
    RoundingWeights moved(long num_bytes) const { return {type, rows + num_bytes, num_k}; }

    void multiply(int variant, Product<bf16> p) const {
        for (; p.num_rows > CHUNK_ROWS; p.num_rows -= CHUNK_ROWS) {
            Product<bf16> some = p;
            some.num_rows = CHUNK_ROWS, some.inputs = p.inputs = 0, some.next = rows;
            multiply_rounded(variant, some);
            p.x += CHUNK_ROWS * p.x_stride, p.out += CHUNK_ROWS * p.out_stride;
        }
        multiply_rounded(variant, p);
    }

    void multiply_rounded(int variant, const Product<bf16>& p) const {
        const RoundedRows& x = rounded(variant, type->order(variant), p);
        for (long row = 0; row < p.num_rows; row += MOST_ROUNDED) {
            const long num_rows = std::min(MOST_ROUNDED, p.num_rows - row);
            const void* next = row + num_rows < p.num_rows ? rows : p.next;
            type->multiply(variant, {&x, row, num_rows, rows, p.bias, p.out + row * p.out_stride,
                                     p.out_stride, p.num_outs, num_k, next});
        }
    }
};

RoundingWeights weights_of(int type, const void* stored, long num_k) {
    return {&TYPES[type], static_cast<const u8*>(stored), num_k};
}

// types: of gate, up and down.
ExpertSlots<RoundingWeights> slots_of(
    const std::int32_t* types, const void* gate, const void* up, const void* down, long slot_bytes,
    long hidden, long width
) {
    return {weights_of(types[0], gate, hidden), weights_of(types[1], up, hidden),
            weights_of(types[2], down, width),  slot_bytes, hidden, width};
}

// Some rows' product, in pieces of output features.
void multiply_rows(int num_threads, int variant, const RoundingWeights& w, Product<bf16> p) {
    p.inputs = new_inputs();
    const long length = whole_tiles(PIECE_BYTES / w.row_bytes());
    together(num_threads, (p.num_outs + length - 1) / length, [&, p](long number) {
        const long first = number * length, next = first + num_threads * length;
        Product<bf16> some = p;
        some.out += first, some.num_outs = std::min(length, p.num_outs - first);
        if (p.bias != nullptr) some.bias += first;
        if (next < p.num_outs) some.next = w.from(next).start();
        w.from(first).multiply(variant, some);
    });
}

}  // namespace

extern "C" {

MultiplyFunction lowtide_ggml_int8_multiply;
MlpsFunction lowtide_ggml_int8_mlps;
ExpertsFunction lowtide_ggml_int8_experts;

// Of any number of rows.
void lowtide_ggml_int8_multiply(
    int variant, int num_threads, int type, const bf16* x, long x_stride, const void* w,
    const bf16* bias, bf16* out, long out_stride, long num_rows, long num_outs, long num_k
) {
    const RoundingWeights weights = weights_of(type, w, num_k);
    if (num_outs * weights.row_bytes() < WORTH_BYTES) num_threads = 1;
    for (long row = 0; row < num_rows; row += CHUNK_ROWS)
        multiply_rows(num_threads, variant, weights,
                      {x + row * x_stride, x_stride, nullptr, bias, out + row * out_stride,
                       out_stride, std::min(CHUNK_ROWS, num_rows - row), num_outs, num_k});
}

void lowtide_ggml_int8_mlps(
    int variant, int num_threads, const std::int32_t* types, const std::int64_t* groups,
    long num_groups, const void* gate_w, const void* up_w, const void* down_w, long slot_bytes,
    bf16* parts, bf16* gate, bf16* up, long hidden, long width
) {
    const auto slots = slots_of(types, gate_w, up_w, down_w, slot_bytes, hidden, width);
    ExpertLayer<RoundingWeights>(variant, num_threads, slots, {parts, gate, up})
        .run(reinterpret_cast<const Group*>(groups), num_groups);
}

void lowtide_ggml_int8_experts(
    int variant, int num_threads, const std::int32_t* types, const bf16* x,
    const std::int64_t* experts, const float* weights, const std::int64_t* slots,
    const void* gate_w, const void* up_w, const void* down_w, long slot_bytes, bf16* parts,
    bf16* gate, bf16* up, float* out, long num_tokens, long k, long hidden, long width
) {
    run_experts(
        variant, num_threads, x, experts, weights, slots,
        slots_of(types, gate_w, up_w, down_w, slot_bytes, hidden, width), {parts, gate, up}, out,
        num_tokens, k);
}

}
