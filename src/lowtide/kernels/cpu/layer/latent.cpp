// Attention over latents: the matrices that would expand a latent into a head's key and value are
// applied to the head's query and output instead, so that the cache is read as one key head.

#include <algorithm>

#include "layer/attention.hpp"
#include "layer/mixers.hpp"
#include "layer/steps.hpp"

using namespace lowtide;

namespace {

void rotate(const Pass& p, const Angles& angles, bf16* x, long x_stride, long num_heads,
            long head_stride) {
    lowtide_rotate_pairs(p.variant, p.num_threads, x, x_stride, head_stride,
                         static_cast<const float*>(angles.cos),
                         static_cast<const float*>(angles.sin), p.num_rows, num_heads, angles.half);
}

// Each row's latent and rotating key, to their places in the cache.
void cache_rows(const Pass& p, const LatentAttention& a, long hidden) {
    const long width = a.rank + a.rotary_dim;
    multiply(p, p.normed, hidden, a.latent_down, p.latent, width);
    normalise(p, a.latent_norm, p.latent, width, p.latent, width, 1);
    rotate(p, p.angles[a.angles], p.latent + a.rank, width, 1, a.rotary_dim);
    for (long row = 0; row < p.num_rows; ++row) {
        const std::int64_t* tokens = p.tokens + 2 * row;
        std::copy_n(p.latent + row * width, width, a.cache + (tokens[0] + tokens[1] - 1) * width);
    }
}

// Queries for what is cached: [rows, heads, latent | rotating].
void make_queries(const Pass& p, const LatentAttention& a, long hidden) {
    const long length = a.fixed_dim + a.rotary_dim, size = a.num_heads * length;
    const long width = a.rank + a.rotary_dim;
    if (a.query_down.num_outs == 0) {
        multiply(p, p.normed, hidden, a.query, p.projected, size);
    } else {
        const long rank = a.query_down.num_outs;
        multiply(p, p.normed, hidden, a.query_down, p.query_latent, rank);
        normalise(p, a.query_norm, p.query_latent, rank, p.query_latent, rank, 1);
        multiply(p, p.query_latent, rank, a.query, p.projected, size);
    }
    rotate(p, p.angles[a.angles], p.projected + a.fixed_dim, size, a.num_heads, length);
    for (long head = 0; head < p.num_rows * a.num_heads; ++head)
        std::copy_n(p.projected + head * length + a.fixed_dim, a.rotary_dim,
                    p.latent_query + head * width + a.rank);
    lowtide_multiply_heads(p.variant, p.num_threads, p.projected, size, length, a.expansion,
                           (a.fixed_dim + a.value_dim) * a.rank, a.rank, 0, p.latent_query,
                           a.num_heads * width, width, p.num_rows, a.num_heads, a.rank,
                           a.fixed_dim);
}

}  // namespace

extern "C" {

// parts: a LatentAttention.
void lowtide_mix_latent(const Pass* pass, const void* parts, long hidden) {
    const Pass& p = *pass;
    const auto& a = *static_cast<const LatentAttention*>(parts);
    const long width = a.rank + a.rotary_dim, size = a.num_heads * a.value_dim;
    normalise(p, a.norm, p.normed);
    cache_rows(p, a, hidden);
    make_queries(p, a, hidden);
    attend(p.variant, p.num_threads, {
        p.latent_query, a.num_heads * width, a.cache, a.cache, 0, p.attended,
        a.num_heads * a.rank, p.tokens, 0, p.num_rows, 1, a.num_heads, width, a.rank, a.scale,
        nullptr,
    });
    lowtide_multiply_heads(p.variant, p.num_threads, p.attended, a.num_heads * a.rank, a.rank,
                           a.expansion + a.fixed_dim * a.rank,
                           (a.fixed_dim + a.value_dim) * a.rank, a.rank, 1, p.value, size,
                           a.value_dim, p.num_rows, a.num_heads, a.value_dim, a.rank);
    multiply(p, p.value, size, a.output, p.update, hidden);
    add(p, p.update, hidden);
}

}
