// Several experts of a few tokens each in one call, with the bits of one by one.
//
// The threads share every expert's weights: gates and ups first, then downs. All experts of a few
// tokens are summed here, too:
//
//     out[t] = sum over t's experts e, ascending, of weight[t, e] * expert_e(x[t])
//
// which is one multiplication and one addition in float32 for each expert.

#include <vector>

#include "products.hpp"
#include "team.hpp"

using namespace lowtide;

namespace {

constexpr long PIECE_BYTES = WORTH_BYTES / 2;  // of a matrix

// The tokens of one expert: consecutive rows of the scratch. As Python hands them over.
struct Group {
    std::int64_t slot, first, num_rows;
};

// Where the experts' weights are: those of slot 0, the others at multiples of `slot_bytes`.
struct Slots {
    const char *gate, *up, *down;
    long slot_bytes, hidden, width;
};

// A row for each pair of a token and an expert: parts [.., hidden], gate and up [.., width].
struct Scratch {
    bf16 *parts, *gate, *up;
};

long features_of_piece(long num_k) {
    return std::max(1L, PIECE_BYTES / (num_k * static_cast<long>(sizeof(bf16))));
}

// The groups' rows of parts, from inputs to outputs.
void run_groups(
    int variant, int num_threads, const Group* groups, long num_groups, const Slots& slots,
    const Scratch& scratch
) {
    const long hidden = slots.hidden, width = slots.width;
    bf16 *const parts = scratch.parts, *const gate = scratch.gate, *const up = scratch.up;
    const auto weight = [&slots](const char* of_slot_0, const Group& group) {
        return reinterpret_cast<const bf16*>(of_slot_0 + group.slot * slots.slot_bytes);
    };
    const bf16* none = nullptr;
    const long num_bytes = num_groups * 3 * hidden * width * static_cast<long>(sizeof(bf16));
    if (num_bytes < WORTH_BYTES) num_threads = 1;

    const long wide = std::min(width, features_of_piece(hidden));
    const long num_wide = (width + wide - 1) / wide;
    together(num_threads, num_groups * num_wide, [&](long number) {
        const Group& group = groups[number / num_wide];
        const long first = number % num_wide * wide, length = std::min(wide, width - first);
        const bf16* in = parts + group.first * hidden;
        const long start = group.first * width + first;
        for (auto [w, to] : {std::pair(slots.gate, gate), std::pair(slots.up, up)})
            multiply<bf16>(variant, {
                in, hidden, weight(w, group) + first * hidden, none, to + start, width,
                group.num_rows, length, hidden,
            });
        for (long row = 0; row < group.num_rows; ++row)
            silu_times(variant, gate + start + row * width, up + start + row * width, length);
    });

    const long tall = std::min(hidden, features_of_piece(width));
    const long num_tall = (hidden + tall - 1) / tall;
    together(num_threads, num_groups * num_tall, [&](long number) {
        const Group& group = groups[number / num_tall];
        const long first = number % num_tall * tall, length = std::min(tall, hidden - first);
        multiply<bf16>(variant, {
            gate + group.first * width, width, weight(slots.down, group) + first * width, none,
            parts + group.first * hidden + first, hidden, group.num_rows, length, width,
        });
    });
}

}  // namespace

extern "C" {

// groups [num_groups, 3]: each expert's slot, first row and number of rows; no two share a row.
// gate_w, up_w, down_w: where slot 0 has them. parts [.., hidden], from inputs to outputs; scratch
// gate, up [.., width]. Rows of all are adjacent.
void lowtide_gated_mlps(
    int variant, int num_threads, const std::int64_t* groups, long num_groups, const char* gate_w,
    const char* up_w, const char* down_w, long slot_bytes, bf16* parts, bf16* gate, bf16* up,
    long hidden, long width
) {
    const Slots slots = {gate_w, up_w, down_w, slot_bytes, hidden, width};
    const auto* of_experts = reinterpret_cast<const Group*>(groups);
    run_groups(variant, num_threads, of_experts, num_groups, slots, {parts, gate, up});
}

// x [num_tokens, hidden]; experts [num_tokens, k], ascending for each token, and their weights;
// slots: one for each distinct expert, ascending by expert. gate_w, up_w, down_w: where slot 0 has
// them.
// Scratch, a row for each pair of a token and an expert: parts [.., hidden], gate and up
// [.., width]. out [num_tokens, hidden]. Rows of all are adjacent.
void lowtide_run_experts(
    int variant, int num_threads, const bf16* x, const std::int64_t* experts, const float* weights,
    const std::int64_t* slots, const char* gate_w, const char* up_w, const char* down_w,
    long slot_bytes, bf16* parts, bf16* gate, bf16* up, float* out, long num_tokens, long k,
    long hidden, long width
) {
    const long num_pairs = num_tokens * k;
    std::vector<long> order(num_pairs), row_of(num_pairs);
    for (long pair = 0; pair < num_pairs; ++pair) order[pair] = pair;
    std::stable_sort(order.begin(), order.end(), [&](long a, long b) {
        return experts[a] < experts[b];
    });
    std::vector<Group> groups;
    for (long row = 0; row < num_pairs; ++row) {
        const long pair = order[row];
        row_of[pair] = row;
        std::memcpy(parts + row * hidden, x + pair / k * hidden, hidden * sizeof(bf16));
        if (row == 0 || experts[order[row - 1]] != experts[pair])
            groups.push_back({slots[groups.size()], row, 0});
        groups.back().num_rows += 1;
    }
    const Slots places = {gate_w, up_w, down_w, slot_bytes, hidden, width};
    const auto num_groups = static_cast<long>(groups.size());
    run_groups(variant, num_threads, groups.data(), num_groups, places, {parts, gate, up});

    const long* rows = row_of.data();
    vectorised(variant, [=]() INLINED_LAMBDA {
        std::fill(out, out + num_tokens * hidden, 0.0f);
        for (long pair = 0; pair < num_pairs; ++pair) {
            const bf16* part = parts + rows[pair] * hidden;
            float* sum = out + pair / k * hidden;
            for (long i = 0; i < hidden; ++i) sum[i] += weights[pair] * widen(part[i]);
        }
    });
}

}
