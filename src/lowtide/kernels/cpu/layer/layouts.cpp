// Structs that Python hands over, field by field, of which it makes its own (`struct` of library.py),
// and the types that blocks of weights have (`block_numbers` of packed.py).

#include <cstddef>
#include <cstring>

#include "layer/mixers.hpp"
#include "packed/block_types.hpp"

using namespace lowtide;

namespace {

// count: of an array; 0: none.
struct Field {
    const char *of, *name, *type;
    long offset, num_bytes, count;
};

// Names of types: of numbers, "address" of every pointer, or a struct's own.
template <class Type>
struct Named;

#define NAMED(Type, text)                          \
    template <>                                    \
    struct Named<Type> {                           \
        static constexpr const char* name = text;  \
        static constexpr long count = 0;           \
    }

NAMED(int, "int");
NAMED(long, "long");
NAMED(float, "float");
NAMED(double, "double");
NAMED(Choice, "Choice");
NAMED(ExpertPlaces, "ExpertPlaces");
NAMED(DeltaSpec, "DeltaSpec");
NAMED(DeltaWeights, "DeltaWeights");
NAMED(Matrix, "Matrix");
NAMED(Norm, "Norm");
NAMED(Experts, "Experts");
NAMED(Shared, "Shared");

template <class Type>
struct Named<Type*> {
    static constexpr const char* name = "address";
    static constexpr long count = 0;
};

template <class Type, std::size_t length>
struct Named<Type[length]> {
    static constexpr const char* name = Named<Type>::name;
    static constexpr long count = length;
};

#define FIELD(Struct, field)                                                                      \
    {#Struct, #field, Named<decltype(Struct::field)>::name, offsetof(Struct, field),              \
     sizeof(Struct::field), Named<decltype(Struct::field)>::count}

// All fields of a struct, in order.
constexpr Field FIELDS[] = {
    FIELD(Choice, num_experts), FIELD(Choice, num_chosen), FIELD(Choice, num_groups),
    FIELD(Choice, num_groups_kept), FIELD(Choice, num_group_best), FIELD(Choice, is_sigmoid),
    FIELD(Choice, normalise), FIELD(Choice, rounds_weights), FIELD(Choice, scaling_factor),
    FIELD(Choice, sum_epsilon), FIELD(Choice, of_chosen),
    FIELD(ExpertPlaces, gate), FIELD(ExpertPlaces, up), FIELD(ExpertPlaces, down),
    FIELD(ExpertPlaces, slot_bytes), FIELD(ExpertPlaces, gate_bias), FIELD(ExpertPlaces, up_bias),
    FIELD(ExpertPlaces, down_bias),
    FIELD(Matrix, multiply), FIELD(Matrix, variant), FIELD(Matrix, type), FIELD(Matrix, weight),
    FIELD(Matrix, bias), FIELD(Matrix, num_outs),
    FIELD(Norm, weight), FIELD(Norm, is_float32), FIELD(Norm, length), FIELD(Norm, eps),
    FIELD(Angles, cos), FIELD(Angles, sin), FIELD(Angles, half), FIELD(Angles, is_float32),
    FIELD(GroupedAttention, norm), FIELD(GroupedAttention, projections),
    FIELD(GroupedAttention, num_projections), FIELD(GroupedAttention, has_gates),
    FIELD(GroupedAttention, query_norm),
    FIELD(GroupedAttention, key_norm), FIELD(GroupedAttention, output),
    FIELD(GroupedAttention, keys), FIELD(GroupedAttention, values),
    FIELD(GroupedAttention, head_stride), FIELD(GroupedAttention, num_heads),
    FIELD(GroupedAttention, num_key_heads), FIELD(GroupedAttention, head_dim),
    FIELD(GroupedAttention, angles), FIELD(GroupedAttention, window),
    FIELD(GroupedAttention, sinks), FIELD(GroupedAttention, scale),
    FIELD(GroupedAttention, group),
    FIELD(LatentAttention, norm), FIELD(LatentAttention, query_down),
    FIELD(LatentAttention, query_norm), FIELD(LatentAttention, query),
    FIELD(LatentAttention, latent_down), FIELD(LatentAttention, latent_norm),
    FIELD(LatentAttention, expansion), FIELD(LatentAttention, output),
    FIELD(LatentAttention, cache), FIELD(LatentAttention, num_heads),
    FIELD(LatentAttention, fixed_dim), FIELD(LatentAttention, rotary_dim),
    FIELD(LatentAttention, rank), FIELD(LatentAttention, value_dim),
    FIELD(LatentAttention, angles), FIELD(LatentAttention, scale),
    FIELD(DeltaSpec, key_heads), FIELD(DeltaSpec, value_heads), FIELD(DeltaSpec, key_width),
    FIELD(DeltaSpec, value_width), FIELD(DeltaSpec, kernel), FIELD(DeltaSpec, is_tiled),
    FIELD(DeltaWeights, spec), FIELD(DeltaWeights, conv), FIELD(DeltaWeights, decay),
    FIELD(DeltaWeights, time_bias),
    FIELD(DeltaRows, mixed), FIELD(DeltaRows, mixed_stride), FIELD(DeltaRows, beta),
    FIELD(DeltaRows, beta_stride), FIELD(DeltaRows, time), FIELD(DeltaRows, time_stride),
    FIELD(DeltaRows, tail_before), FIELD(DeltaRows, tail_after), FIELD(DeltaRows, before),
    FIELD(DeltaRows, after), FIELD(DeltaRows, out), FIELD(DeltaRows, out_stride),
    FIELD(DeltaRows, num_rows),
    FIELD(DeltaChunk, keys_queries), FIELD(DeltaChunk, values), FIELD(DeltaChunk, beta),
    FIELD(DeltaChunk, log_decay),
    FIELD(ShortConvolution, norm), FIELD(ShortConvolution, inward),
    FIELD(ShortConvolution, kernel), FIELD(ShortConvolution, bias),
    FIELD(ShortConvolution, num_taps), FIELD(ShortConvolution, outward),
    FIELD(ShortConvolution, state),
    FIELD(DeltaNet, norm), FIELD(DeltaNet, mixed), FIELD(DeltaNet, gates), FIELD(DeltaNet, beta),
    FIELD(DeltaNet, time), FIELD(DeltaNet, weights), FIELD(DeltaNet, head_norm),
    FIELD(DeltaNet, outward), FIELD(DeltaNet, tail), FIELD(DeltaNet, matrices),
    FIELD(Experts, router), FIELD(Experts, is_float32), FIELD(Experts, logit_bias),
    FIELD(Experts, bias), FIELD(Experts, choice), FIELD(Experts, run), FIELD(Experts, mlps),
    FIELD(Experts, variant), FIELD(Experts, types), FIELD(Experts, places), FIELD(Experts, width),
    FIELD(Shared, gate), FIELD(Shared, up), FIELD(Shared, down), FIELD(Shared, share),
    FIELD(Layer, mix), FIELD(Layer, mixer), FIELD(Layer, mlp_norm), FIELD(Layer, experts),
    FIELD(Layer, shared), FIELD(Layer, hidden),
    FIELD(Pass, variant), FIELD(Pass, num_threads), FIELD(Pass, num_rows), FIELD(Pass, x),
    FIELD(Pass, angles), FIELD(Pass, tokens), FIELD(Pass, sequences),
    FIELD(Pass, num_sequences), FIELD(Pass, normed), FIELD(Pass, projected),
    FIELD(Pass, attended), FIELD(Pass, update), FIELD(Pass, query_latent), FIELD(Pass, latent),
    FIELD(Pass, latent_query), FIELD(Pass, value), FIELD(Pass, product), FIELD(Pass, gates),
    FIELD(Pass, strengths), FIELD(Pass, mlp_input),
    FIELD(Pass, router_input), FIELD(Pass, logits), FIELD(Pass, parts), FIELD(Pass, gate),
    FIELD(Pass, up), FIELD(Pass, routed), FIELD(Pass, shared_gate), FIELD(Pass, shared_up),
    FIELD(Pass, shared), FIELD(Pass, share),
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
    FIELD(Residency, foresight),
    FIELD(Residency, num_hits), FIELD(Residency, num_misses), FIELD(Residency, num_admitted),
    FIELD(Residency, num_left_out), FIELD(Residency, num_evicted), FIELD(Residency, read_bytes),
    FIELD(Residency, num_ahead), FIELD(Residency, num_late), FIELD(Residency, num_wasted),
    FIELD(Residency, num_begun_ahead), FIELD(Residency, num_rows),
    FIELD(Residency, num_here_rows), FIELD(Residency, num_absent_rows),
    FIELD(Residency, num_read), FIELD(Residency, given_up_bytes),
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

// The `number`-th field of a struct: its name, or null where there are no more, its type, and three
// numbers: the bytes before it, its own, and how many it has of the type, 0 for one that is not an array.
// Or, as if they were fields of "BlockType", the type of blocks with that number: its name, and a
// block's weights and bytes.
const char* lowtide_layout(const char* of, long number, const char** type, long* place) {
    if (std::strcmp(of, "BlockType") == 0) {
        if (number >= NUM_BLOCK_TYPES) return nullptr;
        const BlockShape& block = BLOCK_SHAPES[number];
        *type = "", place[0] = block.size, place[1] = block.num_bytes, place[2] = 0;
        return block.name;
    }
    for (const Field& field : FIELDS) {
        if (std::strcmp(field.of, of) != 0 || number-- > 0) continue;
        *type = field.type;
        place[0] = field.offset, place[1] = field.num_bytes, place[2] = field.count;
        return field.name;
    }
    return nullptr;
}

}
