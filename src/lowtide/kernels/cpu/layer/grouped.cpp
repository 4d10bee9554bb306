// Attention of query heads that share key heads, perhaps of a window, beside sinks or gated.

#include <algorithm>

#include "layer/attention.hpp"
#include "layer/mixers.hpp"
#include "layer/steps.hpp"

using namespace lowtide;

namespace {

// Where the tokens of all rows are, as in `Pass::tokens`.
const std::int64_t* places(const Pass& p, const GroupedAttention& a) {
    return p.tokens + 2 * p.num_rows * a.group;
}

void store_rows(const Pass& p, const GroupedAttention& a, long width) {
    const long dim = a.head_dim;
    for (long row = 0; row < p.num_rows; ++row) {
        const std::int64_t* tokens = places(p, a) + 2 * row;
        const long place = (tokens[0] + tokens[1] - 1) * dim;
        const bf16* key = p.projected + row * width + a.num_heads * dim;
        const bf16* value = key + a.num_key_heads * dim;
        for (long head = 0; head < a.num_key_heads; ++head) {
            const long at = head * a.head_stride + place;
            std::copy_n(key + head * dim, dim, a.keys + at);
            std::copy_n(value + head * dim, dim, a.values + at);
        }
    }
}

// Queries, keys and values side by side; gates stay where the queries' product has them.
void project(const Pass& p, const GroupedAttention& a, long hidden, long width) {
    bf16* out = p.projected;
    long i = 0;
    if (a.has_gates) {
        const long size = a.num_heads * a.head_dim;
        multiply(p, p.normed, hidden, a.projections[i++], p.product, 2 * size);
        gather(p, p.product, a.num_heads, 2 * a.head_dim, 0, a.head_dim, out, width);
        out += size;
    }
    for (; i < a.num_projections; out += a.projections[i++].num_outs)
        multiply(p, p.normed, hidden, a.projections[i], out, width);
}

// Queries and keys, in place. width: of a row of all that was projected.
void turn(const Pass& p, const GroupedAttention& a, long width) {
    const long query_size = a.num_heads * a.head_dim, key_size = a.num_key_heads * a.head_dim;
    bf16 *queries = p.projected, *keys = queries + query_size;
    if (a.query_norm.length != 0)
        normalise(p, a.query_norm, queries, width, queries, width,
                  query_size / a.query_norm.length);
    if (a.key_norm.length != 0)
        normalise(p, a.key_norm, keys, width, keys, width, key_size / a.key_norm.length);
    const Angles& angles = p.angles[a.angles];
    const long num_heads = a.num_heads + a.num_key_heads;
    if (angles.is_float32)
        lowtide_rotate_in_float32(p.variant, p.num_threads, queries, width,
                                  static_cast<const float*>(angles.cos),
                                  static_cast<const float*>(angles.sin), p.num_rows, num_heads,
                                  a.head_dim, angles.half);
    else
        lowtide_rotate(p.variant, p.num_threads, queries, width,
                       static_cast<const bf16*>(angles.cos), static_cast<const bf16*>(angles.sin),
                       p.num_rows, num_heads, a.head_dim, angles.half);
}

}  // namespace

extern "C" {

// parts: a GroupedAttention.
void lowtide_mix_grouped(const Pass* pass, const void* parts, long hidden) {
    const Pass& p = *pass;
    const auto& a = *static_cast<const GroupedAttention*>(parts);
    const long size = a.num_heads * a.head_dim, width = size + 2 * a.num_key_heads * a.head_dim;
    normalise(p, a.norm, p.normed);
    project(p, a, hidden, width);
    turn(p, a, width);
    store_rows(p, a, width);
    attend(p.variant, p.num_threads, {
        p.projected, width, a.keys, a.values, a.head_stride, p.attended, size, places(p, a),
        a.window, p.num_rows, a.num_key_heads, a.num_heads / a.num_key_heads, a.head_dim,
        a.head_dim, a.scale, a.sinks,
    });
    if (a.has_gates)
        lowtide_sigmoid_weigh(p.variant, p.num_threads, p.attended, size, p.product + a.head_dim,
                              2 * size, 2 * a.head_dim, p.num_rows, a.num_heads, a.head_dim);
    multiply(p, p.attended, size, a.output, p.update, hidden);
    add(p, p.update, hidden);
}

}
