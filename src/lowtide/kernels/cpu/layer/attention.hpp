// Attention of rows, each over its own keys and values.

#pragma once

#include "numbers.hpp"

namespace lowtide {

// Rows of queries and outputs are some stride apart; the heads of a row are adjacent.
struct AttendedRows {
    const bf16* queries;  // [num_rows, num_key_heads * group, dim]
    long query_stride;
    const bf16 *keys, *values;  // of key head h at h * head_stride: [.., dim], of which values have
                                // the first value_dim numbers of each token
    long head_stride;
    bf16* out;  // [num_rows, num_key_heads * group, value_dim]
    long out_stride;
    const std::int64_t* tokens;  // [num_rows, 2]: the first that a row sees, and how many
    long window;  // only the last `window` of these; 0: all
    long num_rows, num_key_heads, group, dim, value_dim;
    float scale;
    const float* sinks;  // [num_key_heads * group]: a further score of each head, without a value;
                         // or null
};

// A row's bits depend only on the row and the tokens that it sees.
void attend(int variant, int num_threads, const AttendedRows& rows);

}  // namespace lowtide
