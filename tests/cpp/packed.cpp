// Blocks of ggml's types: unpacked, multiplied with, and as experts.

#include "driver.hpp"
#include "dense/vnni.hpp"

namespace driver {
namespace {

using Bytes = std::vector<std::uint8_t>;
using Unpack = void(int, int, const void*, long, long, const std::int64_t*, long, long, bf16*);

// By type (block_types.hpp): bytes and weights of a block.
struct BlockType {
    long num_bytes, size;
};
constexpr BlockType BLOCKS[] = {{18, 32},   {20, 32},   {22, 32},   {24, 32},   {34, 32},
                                {18, 32},   {17, 32},   {84, 256},  {110, 256}, {144, 256},
                                {176, 256}, {210, 256}, {136, 256}, {66, 256},  {74, 256},
                                {82, 256},  {98, 256},  {110, 256}};

constexpr int NUM_TYPES = int(std::size(BLOCKS));
static_assert(NUM_TYPES == Q8, "all types but our own");

BlockType block_of(int type) { return type == PLAIN ? BlockType{2, 1} : BLOCKS[type]; }

// Random bytes may be scales that are not numbers: variants differ in which.
bool is_same(float left, float right) {
    return left == right || (std::isnan(left) && std::isnan(right));
}

bool is_same(const Floats& left, const Floats& right) {
    const auto same = [](float a, float b) { return is_same(a, b); };
    return std::equal(left.begin(), left.end(), right.begin(), right.end(), same);
}

bool is_same(const Numbers& left, const Numbers& right) {
    const auto same = [](bf16 a, bf16 b) {
        return a == b || is_same(lowtide::widen(a), lowtide::widen(b));
    };
    return std::equal(left.begin(), left.end(), right.begin(), right.end(), same);
}

// By some threads as by one; what one thread finds.
Numbers multiply_packed(MultiplyFunction* multiply, int variant, int type, long num_rows,
                        const Bytes& any) {
    const long num_k = 768, num_outs = 37;
    const Bytes w(any.begin(),
                  any.begin() + num_outs * num_k / block_of(type).size * block_of(type).num_bytes);
    Numbers x(num_rows * num_k), first;
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = bf16((i % 3 ? 0x3f00 : 0xbf00) + i * i * 37 % 256);
    const Numbers bias(num_outs, 0x3f80);
    for (int num_threads : THREADS) {
        Numbers out(num_rows * num_outs, 7);
        multiply(variant, num_threads, type, x.data(), num_k, w.data(), bias.data(), out.data(),
                 num_outs, num_rows, num_outs, num_k);
        if (num_threads == 1) first = out;
        expect(is_same(out, first), "bits of a packed product", variant, type, num_rows);
    }
    return first;
}

// Enough for the matrices of `multiply_packed`.
Bytes any_bytes() {
    Bytes any(37 * 768 * 2);
    for (auto& each : any) each = std::uint8_t(below(256));
    return any;
}

// Types of gate, up and down, as files mix them: each is in one of these, and bfloat16.
constexpr std::int32_t EXPERTS[][3] = {{0, 1, 2},  {3, 4, 5},   {6, 7, 8}, {9, 10, 11},
                                       {9, 9, 11}, {12, 10, 3}, {13, 14, 15},
                                       {16, 17, 7}, {PLAIN, 0, PLAIN}};

// Slots of gate | up | down, one behind the other, each part of a type of its own.
struct PackedSlots {
    Bytes content;
    long offsets[3], slot_bytes;
};

PackedSlots packed_slots(const std::int32_t (&types)[3], long num, long hidden, long width) {
    PackedSlots out{};
    long weights_of[3] = {width * hidden, width * hidden, hidden * width};
    for (long part = 0; part < 3; ++part) {
        const BlockType block = block_of(types[part]);
        out.offsets[part] = out.slot_bytes;
        out.slot_bytes += weights_of[part] / block.size * block.num_bytes;
    }
    for (long i = 0; i < num * out.slot_bytes; ++i)
        out.content.push_back(std::uint8_t(below(256)));
    out.content.shrink_to_fit();
    return out;
}

// By some threads as by one, where numbers are numbers.
void run_packed(ExpertsFunction* whole, MlpsFunction* groups, int variant,
                const std::int32_t (&types)[3], const Routed& routed, long hidden, long width) {
    const auto [num_tokens, k, num_experts] = routed;
    const PackedSlots own = packed_slots(types, num_experts, hidden, width);
    const std::uint8_t* start = own.content.data();
    const ExpertPlaces places = {start + own.offsets[0], start + own.offsets[1],
                                 start + own.offsets[2], own.slot_bytes};
    const long num_pairs = num_tokens * k;
    const Numbers x = numbers(num_tokens * hidden);
    const Floats weights = floats(num_pairs);
    const Ids experts = chosen_experts(num_tokens, k, num_experts), slots = slots_of(experts);
    Floats first;
    for (int num_threads : THREADS) {
        Numbers parts(num_pairs * hidden), gate(num_pairs * width), up(num_pairs * width);
        Floats out(num_tokens * hidden, 3.0f);
        whole(variant, num_threads, types, x.data(), experts.data(), weights.data(), slots.data(),
              &places, parts.data(), gate.data(), up.data(), out.data(), num_tokens, k, hidden,
              width);
        if (num_threads == 1) first = out;
        expect(is_same(out, first), "bits of packed experts", variant, types[0], num_tokens);
        const Ids of_groups = num_pairs == 0 ? Ids{} : Ids{slots[0], 0, num_pairs};
        groups(variant, num_threads, types, of_groups.data(), long(of_groups.size()) / 3, &places,
               parts.data(), gate.data(), up.data(), hidden, width);
    }
}

// mixes: of the types of gate, up and down; the last one is of blocks that need no more than 32.
void run_all_packed(ExpertsFunction* whole, MlpsFunction* groups, int best, long num_mixes) {
    for (const Routed& routed : ROUTED)
        for (int variant = 0; variant <= best; ++variant) {
            for (long mix = 0; mix < num_mixes; ++mix)
                run_packed(whole, groups, variant, EXPERTS[mix], routed, 512, 256);
            run_packed(whole, groups, variant, {0, 4, 6}, routed, 96, 32);
        }
}

}  // namespace

void check_blocks(const Library& kernels) {
    const int best = kernels.function<int()>("lowtide_best_variant")();
    auto* unpack = kernels.function<Unpack>("lowtide_packed_unpack");
    auto* layout =
        kernels.function<const char*(const char*, long, const char**, long*)>("lowtide_layout");
    for (int type = 0; type < NUM_TYPES; ++type) {
        const char* none = nullptr;
        long place[3] = {};
        expect(layout("BlockType", type, &none, place) != nullptr, "a type's name", type);
        expect(place[0] == BLOCKS[type].size && place[1] == BLOCKS[type].num_bytes, "blocks", type);
        for (long num_blocks : {0, 1, 7}) {
            std::vector<std::uint8_t> stored(num_blocks * BLOCKS[type].num_bytes);
            for (auto& each : stored) each = std::uint8_t(below(256));
            const long num_k = num_blocks * BLOCKS[type].size;
            Numbers first;
            for (int variant = 0; variant <= best; ++variant) {
                Numbers out(num_k);
                unpack(variant, type, stored.data(), 1, num_k, nullptr, 0, 1, out.data());
                if (variant == 0) first = out;
                expect(is_same(out, first), "bits of a block", variant, type, num_blocks);
            }
        }
    }
    auto* max_rows = kernels.function<long(int)>("lowtide_max_rows");
    auto* multiply = kernels.function<MultiplyFunction>("lowtide_packed_multiply");
    const Bytes any = any_bytes();
    for (int type = 0; type < NUM_TYPES; ++type)
        for (int variant = 0; variant <= best; ++variant)
            for (long num_rows : {0L, 1L, 5L, max_rows(variant)})
                multiply_packed(multiply, variant, type, num_rows, any);
    run_all_packed(kernels.function<ExpertsFunction>("lowtide_packed_experts"),
                   kernels.function<MlpsFunction>("lowtide_packed_mlps"), best,
                   long(std::size(EXPERTS)));
}

// Rows in int8, whose bits are the same in all variants.
void check_rounded_rows(const Library& kernels) {
    const int best = kernels.function<int()>("lowtide_best_int8")();
    const int has_avx_vnni = kernels.function<int()>("lowtide_has_avx_vnni")();
    expect(best != lowtide::INT8_AVX_VNNI || has_avx_vnni, "AVX-VNNI", best, has_avx_vnni, 0);
    const bool has_vbmi = kernels.function<int()>("lowtide_has_vbmi")() != 0;
    const int best_own = kernels.function<int()>("lowtide_best_own")();
    expect(has_vbmi || best_own <= lowtide::WITH_AVX512, "VBMI", best_own);
    auto* multiply = kernels.function<MultiplyFunction>("lowtide_rounded_multiply");
    const Bytes any = any_bytes();
    for (int type = 0; type < NUM_TYPES; ++type)
        for (long num_rows : {0L, 1L, 5L, 14L, 39L}) {
            const Numbers plain = multiply_packed(multiply, 0, type, num_rows, any);
            for (int variant = 1; variant <= best; ++variant)
                expect(is_same(multiply_packed(multiply, variant, type, num_rows, any), plain),
                       "bits of rows in int8", variant, type, num_rows);
        }
    // Not the last mix: there bfloat16 is another's.
    run_all_packed(kernels.function<ExpertsFunction>("lowtide_rounded_experts"),
                   kernels.function<MlpsFunction>("lowtide_rounded_mlps"), best,
                   long(std::size(EXPERTS)) - 1);
}

}  // namespace driver
