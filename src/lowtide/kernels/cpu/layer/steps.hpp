// Steps of which layers of every kind consist. The operators are those that Python calls one by one,
// in the same order: so are the bits. What multiplies with a matrix comes with it, as an address,
// whatever it is stored in.

#pragma once

#include <algorithm>

#include "layer/layer.hpp"

namespace lowtide {

// out = x w^T + bias, rows of all adjacent but for out's stride.
inline void multiply(const Pass& p, const bf16* x, long num_k, const Matrix& w, bf16* out,
                     long stride) {
    w.multiply(w.variant, p.num_threads, w.type, x, num_k, w.weight, w.bias, out, stride,
               p.num_rows, w.num_outs, num_k);
}

// The same of a matrix in bfloat16.
inline void multiply_plainly(const Pass& p, const bf16* x, long num_k, const void* w,
                             const void* bias, long num_outs, bf16* out) {
    const Matrix plain = {lowtide_plain_multiply, p.variant, 0, w, static_cast<const bf16*>(bias),
                          num_outs};
    multiply(p, x, num_k, plain, out, num_outs);
}

// Heads of `norm.length` numbers side by side; out may be x.
inline void normalise(const Pass& p, const Norm& norm, const bf16* x, long x_stride, bf16* out,
                      long out_stride, long num_heads) {
    if (norm.is_float32)
        lowtide_rms_norm_in_float32(p.variant, p.num_threads, x, x_stride,
                                    static_cast<const float*>(norm.weight), norm.eps, out,
                                    out_stride, p.num_rows, num_heads, norm.length);
    else
        lowtide_rms_norm(p.variant, p.num_threads, x, x_stride,
                         static_cast<const bf16*>(norm.weight), norm.eps, out, out_stride,
                         p.num_rows, num_heads, norm.length);
}

// x, of all rows, before a layer's part.
inline void normalise(const Pass& p, const Norm& norm, bf16* out) {
    normalise(p, norm, p.x, norm.length, out, norm.length, 1);
}

// `width` numbers of each head from `first` on, of rows whose heads have `length` side by side.
inline void gather(const Pass& p, const bf16* x, long num_heads, long length, long first, long width,
                   bf16* out, long stride) {
    for (long row = 0; row < p.num_rows; ++row)
        for (long head = 0; head < num_heads; ++head)
            std::copy_n(x + (row * num_heads + head) * length + first, width,
                        out + row * stride + head * width);
}

// x += update
inline void add(const Pass& p, const bf16* update, long hidden) {
    const long length = p.num_rows * hidden;
    bf16* x = p.x;
    vectorised(p.variant, [=]() INLINED_LAMBDA {
        for (long i = 0; i < length; ++i) x[i] = round_bf16(widen(x[i]) + widen(update[i]));
    });
}

}  // namespace lowtide
