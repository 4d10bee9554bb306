// Algorithm 1 of BuddyMoE: absent experts of each token, replaced by buddies that are here.

#include <algorithm>
#include <cstdint>
#include <vector>

extern "C" {

// experts [num_tokens, k], ascending for each token, and their weights; may [num_tokens, k]: which
// are to be replaced. lists [.., length]: buddies, best first, -1 behind the last; list_of
// [num_tokens, k]: which list each walks, or null where that is the expert's own. is_here: who may
// stand in. At most search_rank buddies are looked at, and rho of a token replaced.
// out [num_tokens, k]: who runs.
void lowtide_find_buddies(
    const std::int64_t* experts, const float* weights, const std::uint8_t* may,
    const std::int32_t* lists, long length, const std::int64_t* list_of,
    const std::uint8_t* is_here, long search_rank, long rho, std::int64_t* out, long num_tokens,
    long k
) {
    std::vector<long> by_rank(k);
    std::vector<std::int64_t> in_use(2 * k);
    const long depth = std::min(length, search_rank);
    for (long token = 0; token < num_tokens; ++token) {
        const long first = token * k;
        std::copy(experts + first, experts + first + k, out + first);
        if (rho < 1 || !std::any_of(may + first, may + first + k, [](auto one) { return one; }))
            continue;
        for (long place = 0; place < k; ++place) by_rank[place] = place;
        // Ids ascend: a stable order leaves ties by id.
        std::stable_sort(by_rank.begin(), by_rank.end(), [&](long a, long b) {
            return weights[first + a] > weights[first + b];
        });
        std::copy(experts + first, experts + first + k, in_use.begin());
        long num_in_use = k, num_left = rho;
        for (long place : by_rank) {
            const long pair = first + place;
            if (!may[pair] || num_left == 0) continue;
            const std::int32_t* list = lists + (list_of ? list_of[pair] : experts[pair]) * length;
            for (long rank = 0; rank < depth && list[rank] >= 0; ++rank) {
                const std::int64_t buddy = list[rank];
                const auto used = in_use.begin() + num_in_use;
                if (!is_here[buddy] || std::find(in_use.begin(), used, buddy) != used) continue;
                out[pair] = buddy;
                in_use[num_in_use++] = buddy;
                --num_left;
                break;
            }
        }
    }
}

}
