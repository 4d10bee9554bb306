// Where structs that Python hands over have their fields, and which types blocks of weights have: its
// own are compared with these when they are loaded (`check_layouts` of library.py, `block_numbers` of
// packed.py).

#include <cstddef>
#include <cstring>

#include "layer/layer.hpp"
#include "packed/block_types.hpp"

using namespace lowtide;

namespace {

struct Field {
    const char *of, *name;
    long offset, num_bytes;
};

#define FIELD(Struct, name) {#Struct, #name, offsetof(Struct, name), sizeof(Struct::name)}

// All fields of a struct, in order.
constexpr Field FIELDS[] = {
    FIELD(Choice, num_experts), FIELD(Choice, num_chosen), FIELD(Choice, num_groups),
    FIELD(Choice, num_groups_kept), FIELD(Choice, num_group_best), FIELD(Choice, is_sigmoid),
    FIELD(Choice, normalise), FIELD(Choice, rounds_weights), FIELD(Choice, scaling_factor),
    FIELD(ExpertPlaces, gate), FIELD(ExpertPlaces, up), FIELD(ExpertPlaces, down),
    FIELD(ExpertPlaces, slot_bytes), FIELD(ExpertPlaces, gate_bias), FIELD(ExpertPlaces, up_bias),
    FIELD(ExpertPlaces, down_bias),
    FIELD(Matrix, multiply), FIELD(Matrix, variant), FIELD(Matrix, type), FIELD(Matrix, weight),
    FIELD(Matrix, bias), FIELD(Matrix, num_outs),
    FIELD(Attention, norm), FIELD(Attention, projections), FIELD(Attention, num_projections),
    FIELD(Attention, query_norm), FIELD(Attention, key_norm), FIELD(Attention, query_norm_length),
    FIELD(Attention, key_norm_length), FIELD(Attention, output), FIELD(Attention, keys),
    FIELD(Attention, values), FIELD(Attention, head_stride), FIELD(Attention, num_heads),
    FIELD(Attention, num_key_heads), FIELD(Attention, head_dim), FIELD(Attention, scale),
    FIELD(Experts, router), FIELD(Experts, is_float32), FIELD(Experts, bias),
    FIELD(Experts, choice), FIELD(Experts, run), FIELD(Experts, mlps), FIELD(Experts, variant),
    FIELD(Experts, types), FIELD(Experts, places), FIELD(Experts, width),
    FIELD(Shared, gate), FIELD(Shared, up), FIELD(Shared, down), FIELD(Shared, share),
    FIELD(Layer, attention), FIELD(Layer, mlp_norm), FIELD(Layer, experts), FIELD(Layer, shared),
    FIELD(Layer, hidden), FIELD(Layer, eps),
    FIELD(Pass, variant), FIELD(Pass, num_threads), FIELD(Pass, num_rows), FIELD(Pass, x),
    FIELD(Pass, cos), FIELD(Pass, sin), FIELD(Pass, half), FIELD(Pass, tokens),
    FIELD(Pass, normed), FIELD(Pass, qkv), FIELD(Pass, attended), FIELD(Pass, update),
    FIELD(Pass, mlp_input), FIELD(Pass, router_input), FIELD(Pass, logits), FIELD(Pass, parts),
    FIELD(Pass, gate), FIELD(Pass, up), FIELD(Pass, routed), FIELD(Pass, shared_gate),
    FIELD(Pass, shared_up), FIELD(Pass, shared), FIELD(Pass, share),
    FIELD(Turn, layer), FIELD(Turn, pass), FIELD(Turn, number),
    FIELD(Residency, table), FIELD(Residency, owner), FIELD(Residency, free),
    FIELD(Residency, free_state), FIELD(Residency, num_experts), FIELD(Residency, num_slots),
    FIELD(Residency, rank), FIELD(Residency, per_token),
    FIELD(Residency, per_expert), FIELD(Residency, per_share), FIELD(Residency, worth),
    FIELD(Residency, num_worth), FIELD(Residency, clock), FIELD(Residency, room),
    FIELD(Residency, most), FIELD(Residency, includes_all), FIELD(Residency, low_ids_leave),
    FIELD(Residency, is_forced),
    FIELD(Residency, hits), FIELD(Residency, asked), FIELD(Residency, readiness),
    FIELD(Residency, reader), FIELD(Residency, wait_limit_s), FIELD(Residency, reads_ahead),
    FIELD(Residency, num_hits), FIELD(Residency, num_misses), FIELD(Residency, num_admitted),
    FIELD(Residency, num_left_out), FIELD(Residency, num_evicted), FIELD(Residency, read_bytes),
    FIELD(Residency, num_ahead), FIELD(Residency, num_late), FIELD(Residency, num_wasted),
    FIELD(Residency, wait_s), FIELD(Residency, num_asked), FIELD(Residency, layer),
    FIELD(Residency, expert), FIELD(Residency, slot), FIELD(Residency, error),
    FIELD(ExpertCall, run), FIELD(ExpertCall, mlps), FIELD(ExpertCall, variant),
    FIELD(ExpertCall, num_threads), FIELD(ExpertCall, types), FIELD(ExpertCall, places),
    FIELD(ExpertCall, hidden), FIELD(ExpertCall, width), FIELD(ExpertCall, num_rows),
    FIELD(ExpertCall, num_chosen), FIELD(ExpertCall, x), FIELD(ExpertCall, parts),
    FIELD(ExpertCall, gate), FIELD(ExpertCall, up), FIELD(ExpertCall, out),
    FIELD(Source, first_range), FIELD(Source, ranges), FIELD(Source, segments),
    FIELD(Source, files), FIELD(Source, slots), FIELD(Source, buffers),
    FIELD(Source, slot_bytes), FIELD(Source, piece_bytes), FIELD(Source, num_threads),
};

}  // namespace

extern "C" {

// The `number`-th field of a struct: its name, or null where there are no more, and two numbers, the
// bytes before it and its own. Or, as if they were fields of "BlockType", the type of blocks with that
// number: its name, and a block's weights and bytes.
const char* lowtide_layout(const char* of, long number, long* place) {
    if (std::strcmp(of, "BlockType") == 0) {
        if (number >= NUM_BLOCK_TYPES) return nullptr;
        const BlockShape& type = BLOCK_SHAPES[number];
        place[0] = type.size, place[1] = type.num_bytes;
        return type.name;
    }
    for (const Field& field : FIELDS) {
        if (std::strcmp(field.of, of) != 0 || number-- > 0) continue;
        place[0] = field.offset, place[1] = field.num_bytes;
        return field.name;
    }
    return nullptr;
}

}
