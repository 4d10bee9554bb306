// Blocks of ggml's types, and substitution.

#include "driver.hpp"

namespace driver {
namespace {

using Bytes = std::vector<std::uint8_t>;
using Unpack = void(int, int, const std::uint8_t*, long, bf16*);

// In the order of ggml.cpp: bytes and weights of a block.
struct BlockType {
    long num_bytes, size;
};
constexpr BlockType BLOCKS[] = {{18, 32},   {20, 32},   {22, 32},   {34, 32},
                                {18, 32},   {17, 32},   {84, 256},  {110, 256},
                                {144, 256}, {176, 256}, {210, 256}, {136, 256}};

// As in buddies.cpp.
struct Rules {
    const std::int32_t* lists;
    std::int64_t num_experts, length, search_rank, exact_kinds;
    double temperature, entropy, margin, beta;
};
struct Queues {
    const std::uint8_t* queue_of;
    const double* host_s;
    double starts_s[2], each_s[2], deadline_s;
};
using Replace = long(const Rules*, const std::int64_t*, const float*, const std::uint8_t*, long,
                     long, const std::uint8_t*, const double*, const std::uint8_t*,
                     const std::int32_t*, const std::int64_t*, const double*, long, long, long,
                     std::int64_t*, float*);
using GiveUp = long(const Rules*, const std::int64_t*, const float*, const std::uint8_t*, long,
                    long, const std::uint8_t*, const double*, const std::uint8_t*,
                    const std::int32_t*, const std::int64_t*, const double*, long, long,
                    const Queues*, std::int64_t*, float*);
using Count = long(const std::int64_t*, const float*, const std::int64_t*, const float*, long,
                   long, long, const std::int64_t*, long, std::uint8_t*, double*, std::int64_t*,
                   std::int64_t*);

bool is_ascending(const Ids& ids, long k) {
    for (std::size_t i = 0; i < ids.size(); ++i)
        if (long(i) % k != 0 && ids[i - 1] >= ids[i]) return false;
    return true;
}

// Of every expert: some others, best first.
std::vector<std::int32_t> buddy_lists(long num_lists, long length, long num_experts) {
    std::vector<std::int32_t> out;
    for (long i = 0; i < num_lists * length; ++i)
        out.push_back(below(8) == 0 ? -1 : std::int32_t(below(num_experts)));
    return out;
}

// has: bits; which of the facts that may be lacking there are.
void substitute(const Library& library, const Routed& routed, unsigned has) {
    auto* replace = library.function<Replace>("lowtide_replace_absent");
    auto* give_up = library.function<GiveUp>("lowtide_give_up_late");
    auto* count = library.function<Count>("lowtide_count_moved");
    const auto [num_tokens, k, num_experts] = routed;
    const long num_pairs = num_tokens * k, length = 5, num_owners = 2;
    const Ids experts = chosen_experts(num_tokens, k, num_experts);
    Floats weights = floats(num_pairs);
    for (float& each : weights) each = std::abs(each) + 1e-3f;
    std::vector<std::uint8_t> kinds(num_tokens), is_here(num_experts), is_open(num_tokens);
    std::vector<std::uint8_t> queue_of(num_experts), is_affected(num_tokens);
    for (auto& each : kinds) each = std::uint8_t(below(3));
    for (auto* all : {&is_here, &is_open})
        for (auto& each : *all) each = std::uint8_t(below(2));
    for (auto& each : queue_of) each = std::uint8_t(below(4));
    std::vector<double> arriving_s(slots_of(experts).size()), host_s(num_experts, 1e-3);
    for (double& each : arriving_s) each = below(2) ? INFINITY : 1e-3;
    Ids owner(num_tokens);
    for (auto& each : owner) each = below(num_owners);
    const std::vector<double> left(num_owners, 0.2);
    const auto lists = buddy_lists(num_experts, length, num_experts);
    const auto own_lists = buddy_lists(num_pairs, length, num_experts);
    const bool gates = has & 1, has_bound = has & 8;
    const Rules rules = {lists.data(), num_experts, length, 4, 2, 1.5, gates ? 0.4 : -1.0,
                         gates ? 0.3 : INFINITY, 2.0};
    const Queues queues = {has & 16 ? queue_of.data() : nullptr, host_s.data(), {0, 1e-3},
                           {1e-3, 2e-3}, 1.5e-3};
    const auto* arriving = has & 2 ? arriving_s.data() : nullptr;
    const auto* open = has & 4 ? is_open.data() : nullptr;
    const auto* pairs_own = has & 32 ? own_lists.data() : nullptr;
    for (long way : {0, 1}) {
        Ids out(num_pairs, -1);
        Floats out_weights(num_pairs, -1.0f);
        const auto* of = has_bound ? owner.data() : nullptr;
        const auto* bound = has_bound ? left.data() : nullptr;
        const long num_moved = way == 0
            ? replace(&rules, experts.data(), weights.data(), kinds.data(), num_tokens, k,
                      is_here.data(), arriving, open, pairs_own, of, bound,
                      has_bound ? num_owners : 0, 2, has & 64 ? 1 : 0, out.data(),
                      out_weights.data())
            : give_up(&rules, experts.data(), weights.data(), kinds.data(), num_tokens, k,
                      is_here.data(), arriving, open, pairs_own, of, bound,
                      has_bound ? num_owners : 0, 2, &queues, out.data(), out_weights.data());
        if (num_moved == 0) continue;
        expect(is_ascending(out, k), "order of who runs", num_tokens, k, has);
        std::vector<double> masses(num_owners);
        Ids pairs(num_owners), tokens(num_owners);
        expect(count(experts.data(), weights.data(), out.data(), out_weights.data(), num_tokens, k,
                     num_experts, owner.data(), num_owners, is_affected.data(), masses.data(),
                     pairs.data(), tokens.data()) == 1,
               "what is run can be", num_tokens, k, has);
        expect(std::accumulate(pairs.begin(), pairs.end(), 0L) == num_moved, "pairs moved",
               num_tokens, k, has);
    }
}

// Random bytes may be scales that are not numbers: variants differ in which.
bool is_same(const Numbers& left, const Numbers& right) {
    const auto same = [](bf16 a, bf16 b) {
        return a == b || (std::isnan(lowtide::widen(a)) && std::isnan(lowtide::widen(b)));
    };
    return std::equal(left.begin(), left.end(), right.begin(), right.end(), same);
}

// By some threads as by one; what one thread finds.
Numbers multiply_packed(MultiplyFunction* multiply, int variant, int type, long num_rows,
                        const Bytes& any) {
    const long num_k = 768, num_outs = 37;
    const Bytes w(any.begin(),
                  any.begin() + num_outs * num_k / BLOCKS[type].size * BLOCKS[type].num_bytes);
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

}  // namespace

void check_ggml(const Library& ggml, const Library& few_rows) {
    lend_team(few_rows, ggml);
    const int best = ggml.function<int()>("lowtide_best_variant")();
    auto* unpack = ggml.function<Unpack>("lowtide_ggml_unpack");
    for (int type = 0; type < int(std::size(BLOCKS)); ++type)
        for (long num_blocks : {0, 1, 7}) {
            std::vector<std::uint8_t> stored(num_blocks * BLOCKS[type].num_bytes);
            for (auto& each : stored) each = std::uint8_t(below(256));
            Numbers first;
            for (int variant = 0; variant <= best; ++variant) {
                Numbers out(num_blocks * BLOCKS[type].size);
                unpack(variant, type, stored.data(), num_blocks, out.data());
                if (variant == 0) first = out;
                expect(is_same(out, first), "bits of a block", variant, type, num_blocks);
            }
        }
    auto* max_rows = ggml.function<long(int)>("lowtide_max_rows");
    auto* multiply = ggml.function<MultiplyFunction>("lowtide_ggml_multiply");
    const Bytes any = any_bytes();
    for (int type = 0; type < int(std::size(BLOCKS)); ++type)
        for (int variant = 0; variant <= best; ++variant)
            for (long num_rows : {0L, 1L, 5L, max_rows(variant)})
                multiply_packed(multiply, variant, type, num_rows, any);
}

// Rows in int8, whose bits are the same in all variants.
void check_ggml_int8(const Library& ggml_int8, const Library& few_rows) {
    lend_team(few_rows, ggml_int8);
    const int best = ggml_int8.function<int()>("lowtide_best_int8")();
    auto* multiply = ggml_int8.function<MultiplyFunction>("lowtide_ggml_int8_multiply");
    const Bytes any = any_bytes();
    for (int type = 0; type < int(std::size(BLOCKS)); ++type)
        for (long num_rows : {0L, 1L, 5L, 19L}) {
            const Numbers plain = multiply_packed(multiply, 0, type, num_rows, any);
            for (int variant = 1; variant <= best; ++variant)
                expect(is_same(multiply_packed(multiply, variant, type, num_rows, any), plain),
                       "bits of rows in int8", variant, type, num_rows);
        }
}

void check_buddies(const Library& buddies) {
    for (const Routed& routed : ROUTED)
        for (unsigned has = 0; has < 128; ++has)
            if (routed.num_tokens > 0) substitute(buddies, routed, has);
}

}  // namespace driver
