// Several experts of a few tokens each in one call, with the same bits as one by one, for any kind
// of weights.
//
// The threads share every expert's weights: first gates and ups, then downs. All experts of a few
// tokens are also summed here:
//
//   out[t] = sum over t's experts e, ascending, of weight[t, e] * expert_e(x[t])
//
// with one multiplication and one addition in float32 for each expert.
//
// `Weights` is a matrix with `row_bytes()`, `from(row)`, `moved(num_bytes)` (the same matrix in
// another slot) and `start()`, its address. `Rows` (call_rows.hpp) multiply with it; unrounded
// rows by its `multiply(variant, product)`, in which the product's own weights are not set.

#pragma once

#include "experts/call_rows.hpp"
#include "signatures.hpp"
#include "team/team.hpp"

namespace lowtide {

// The experts' weights in slot 0, at the places that `places` has.
template <class Weights>
struct ExpertSlots {
    Weights gate, up, down;
    ExpertPlaces places;
    long hidden, width;
};

// A row for each (token, expert) pair: parts [.., hidden], gate and up [.., width].
struct ExpertScratch {
    bf16 *parts, *gate, *up;
};

template <class Weights, class Rows>
class ExpertLayer {
   public:
    ExpertLayer(
        int variant, int num_threads, const ExpertSlots<Weights>& slots,
        const ExpertScratch& scratch
    ) : vectors_(vectors_of(variant)), num_threads_(num_threads), slots_(slots), scratch_(scratch),
        rows_(variant) {}

    // Computes the groups' rows of parts, from inputs to outputs. are_alike: all groups have the
    // same row.
    void run(const Group* groups, long num_groups, bool are_alike = false) {
        are_alike_ = are_alike;
        for (long count = 0; num_groups > 0; groups += count, num_groups -= count) {
            count = num_at_once(groups, num_groups);
            run_some(groups, count);
        }
    }

   private:
    static constexpr long PIECE_BYTES = WORTH_BYTES / 2;  // of a matrix, as far as tiles stay whole

    // Number of groups, from the first on, with few enough rows together; at least one.
    static long num_at_once(const Group* groups, long num_groups) {
        long count = 0;
        for (long num_rows = 0; count < num_groups; ++count) {
            num_rows += groups[count].num_rows;
            if (count > 0 && num_rows > Rows::MOST_ROWS) break;
        }
        return count;
    }

    void run_some(const Group* groups, long num_groups) {
        const long hidden = slots_.hidden, width = slots_.width;
        const long expert_bytes = width * (slots_.gate.row_bytes() + slots_.up.row_bytes()) +
                                  hidden * slots_.down.row_bytes();
        if (num_groups * expert_bytes < WORTH_BYTES) num_threads_ = 1;
        gates_ = pieces(slots_.gate, width, groups, num_groups);
        downs_ = pieces(slots_.down, hidden, groups, num_groups);
        const long num_inputs = are_alike_ ? 1 : num_groups;
        rows_.take(num_threads_, {scratch_.parts, hidden, hidden, groups, num_inputs},
                   {slots_.gate, slots_.up});
        together(num_threads_, gates_.count(), [this](long number) { run_gate(number); });
        rows_.take(num_threads_, {scratch_.gate, width, width, groups, num_groups}, {slots_.down});
        together(num_threads_, downs_.count(), [this](long number) { run_down(number); });
    }

    // The groups' work in pieces: some output features of each.
    struct Pieces {
        const Group* groups;
        long num_groups, num_features, length;

        long of_group() const { return (num_features + length - 1) / length; }
        long count() const { return num_groups * of_group(); }
        long group(long number) const { return number / of_group(); }
        long first(long number) const { return number % of_group() * length; }
        long size(long number) const { return std::min(length, num_features - first(number)); }
    };

    Pieces pieces(
        const Weights& weights, long num_features, const Group* groups, long num_groups
    ) const {
        const long row_bytes = weights.row_bytes();
        const long share = num_groups * num_features * row_bytes / num_threads_;
        const long bytes = rows_.piece_bytes(PIECE_BYTES, share, groups, num_groups);
        const long length = even_pieces(num_features, whole_tiles(bytes / row_bytes));
        return {groups, num_groups, num_features, length};
    }

    // Computes some features of a gate and an up, and their activation.
    void run_gate(long number) const {
        const Group& group = gates_.groups[gates_.group(number)];
        const long hidden = slots_.hidden, width = slots_.width;
        const long first = gates_.first(number), size = gates_.size(number);
        bf16 *const gate = scratch_.gate + group.first * width + first;
        bf16 *const up = scratch_.up + group.first * width + first;
        Product<bf16> product = {
            scratch_.parts + group.first * hidden, hidden, nullptr, nullptr, gate, width,
            group.num_rows, size, hidden,
        };
        product.next = start(slots_.up, gates_, number);
        const long inputs = are_alike_ ? 0 : gates_.group(number);
        rows_.multiply(weights(slots_.gate, gates_, number), product, inputs);
        product.out = up;
        const long next = number + num_threads_;
        product.next = next < gates_.count() ? start(slots_.gate, gates_, next)
                                             : start(slots_.down, downs_, next - gates_.count());
        rows_.multiply(weights(slots_.up, gates_, number), product, inputs);
        const bf16* const gate_bias = bias(slots_.places.gate_bias, gates_, number);
        const bf16* const up_bias = bias(slots_.places.up_bias, gates_, number);
        for (long row = 0; row < group.num_rows; ++row) {
            bf16 *const of_gate = gate + row * width, *const of_up = up + row * width;
            if (gate_bias == nullptr) silu_times(vectors_, of_gate, of_up, size);
            else clamped_swiglu(vectors_, of_gate, of_up, gate_bias, up_bias, size);
        }
    }

    void run_down(long number) const {
        const Group& group = downs_.groups[downs_.group(number)];
        const long hidden = slots_.hidden, width = slots_.width;
        Product<bf16> product = {
            scratch_.gate + group.first * width, width, nullptr, nullptr,
            scratch_.parts + group.first * hidden + downs_.first(number), hidden, group.num_rows,
            downs_.size(number), width,
        };
        product.next = start(slots_.down, downs_, number + num_threads_);
        rows_.multiply(weights(slots_.down, downs_, number), product, downs_.group(number));
        const bf16* const own_bias = bias(slots_.places.down_bias, downs_, number);
        for (long row = 0; own_bias != nullptr && row < group.num_rows; ++row)
            add_bias(vectors_, product.out + row * hidden, own_bias, downs_.size(number));
    }

    // The weights of a piece.
    Weights weights(const Weights& of_slot_0, const Pieces& pieces, long number) const {
        const Group& group = pieces.groups[pieces.group(number)];
        return of_slot_0.moved(group.slot * slots_.places.slot_bytes).from(pieces.first(number));
    }

    // The bias of a piece; null if there is none.
    const bf16* bias(const void* of_slot_0, const Pieces& pieces, long number) const {
        if (of_slot_0 == nullptr) return nullptr;
        const Group& group = pieces.groups[pieces.group(number)];
        const auto* bytes = static_cast<const std::uint8_t*>(of_slot_0);
        bytes += group.slot * slots_.places.slot_bytes;
        return reinterpret_cast<const bf16*>(bytes) + pieces.first(number);
    }

    // Address of a piece's weights; null if there is no such piece.
    const void* start(const Weights& of_slot_0, const Pieces& pieces, long number) const {
        return number < pieces.count() ? weights(of_slot_0, pieces, number).start() : nullptr;
    }

    const int vectors_;  // of what comes between products
    int num_threads_;
    const ExpertSlots<Weights> slots_;
    const ExpertScratch scratch_;
    Rows rows_;
    bool are_alike_ = false;
    Pieces gates_{}, downs_{};
};

// See `ExpertsFunction`.
template <class Weights, class Rows>
void run_experts(
    int variant, int num_threads, const bf16* x, const std::int64_t* experts, const float* weights,
    const std::int64_t* slots, const ExpertSlots<Weights>& places, const ExpertScratch& scratch,
    float* out, long num_tokens, long k
) {
    const long hidden = places.hidden;
    const SortedPairs sorted(x, experts, slots, scratch.parts, num_tokens, k, hidden);
    const auto num_groups = static_cast<long>(sorted.groups.size());
    ExpertLayer<Weights, Rows>(variant, num_threads, places, scratch)
        .run(sorted.groups.data(), num_groups, num_tokens == 1);

    combine(variant, scratch.parts, sorted.row_of.data(), weights, out, num_tokens, k, hidden);
}

}  // namespace lowtide
