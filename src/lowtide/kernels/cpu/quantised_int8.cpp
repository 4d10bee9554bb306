// The products of `int8_products.hpp` for Python: with one weight, and with many experts'.

#include "int8_products.hpp"
#include "quantised_experts.hpp"

using namespace lowtide;

namespace {

constexpr long CHUNK_ROWS = 64;  // rounded at a time
constexpr long WORTH_NUMBERS = 1 << 15;  // less is rounded by one thread

// Of rows rounded to int8, each once. One for all calls of a thread, so that memory is kept.
struct Rounded {
    int variant, num_bits;
    int plain = variant == INT8_VNNI ? static_cast<int>(INT8_AVX512) : variant;
    RoundedRows& rows = own();

    static RoundedRows& own() {
        thread_local RoundedRows of;
        return of;
    }

    void prepare(const bf16* x, long stride, long first, long num_rows, long num_k, int threads) {
        rows.make_room(first + num_rows, num_k);
        if (num_rows * num_k < WORTH_NUMBERS) threads = 1;
        together(threads, num_rows, [&, x, stride, first, num_k](long number) {
            const long row = first + number;
            rows.round(plain, x + row * stride, row, num_k, variant == INT8_VNNI ? num_bits : 0);
        });
    }

    void multiply(const RowsTimes& p) const {
        for (long done = 0; done < p.num_rows; done += MOST_ROUNDED) {
            const long num_rows = std::min(MOST_ROUNDED, p.num_rows - done);
            const Int8Product some = {
                &rows, p.row + done, num_rows, p.w, p.bias, p.out + done * p.out_stride,
                p.out_stride, p.num_outs, done + num_rows < p.num_rows ? p.w.rows : p.next,
            };
            if (num_bits == 4) multiply_int8<4>(variant, some);
            else multiply_int8<8>(variant, some);
        }
    }
};

}  // namespace

extern "C" {

MultiplyFunction lowtide_int8_multiply;
MlpsFunction lowtide_int8_mlps;
ExpertsFunction lowtide_int8_experts;

// Of any number of rows.
void lowtide_int8_multiply(
    int variant, int num_threads, int num_bits, const bf16* x, long x_stride, const void* w,
    const bf16* bias, bf16* out, long out_stride, long num_rows, long num_outs, long num_k
) {
    Rounded products = {variant, num_bits};
    const QuantisedWeights weights = {static_cast<const std::uint8_t*>(w), num_k, num_bits};
    for (long row = 0; row < num_rows; row += CHUNK_ROWS)
        multiply_in_pieces(
            products,
            {x + row * x_stride, x_stride, 0, std::min(CHUNK_ROWS, num_rows - row), weights,
             num_outs, bias, out + row * out_stride, out_stride, nullptr},
            num_threads);
}

// types: three times the number of bits.
void lowtide_int8_mlps(
    int variant, int num_threads, const std::int32_t* types, const std::int64_t* groups,
    long num_groups, const void* gate_w, const void* up_w, const void* down_w, long slot_bytes,
    bf16* parts, bf16* gate, bf16* up, long hidden, long width
) {
    Rounded products = {variant, types[0]};
    const QuantisedSlots slots = {gate_w, up_w, down_w, slot_bytes, hidden, width, types[0]};
    run_groups(products, num_threads, reinterpret_cast<const Group*>(groups), num_groups, slots,
               {parts, gate, up});
}

// types: three times the number of bits.
void lowtide_int8_experts(
    int variant, int num_threads, const std::int32_t* types, const bf16* x,
    const std::int64_t* experts, const float* weights, const std::int64_t* slots,
    const void* gate_w, const void* up_w, const void* down_w, long slot_bytes, bf16* parts,
    bf16* gate, bf16* up, float* out, long num_tokens, long k, long hidden, long width
) {
    Rounded products = {variant, types[0]};
    const QuantisedSlots places = {gate_w, up_w, down_w, slot_bytes, hidden, width, types[0]};
    run_tokens(products, num_threads, x, experts, weights, slots, places, {parts, gate, up}, out,
               num_tokens, k);
}

}
