// Assignment of a layer's experts to device and host, in one call. The plain twin is `Balance` in
// policies/assignment.py: sums are added in the same order, in double precision, so that both
// decide identically.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace {

// Indices among the activated experts.
using Places = std::vector<long>;

// Seconds until each side has ended.
struct Ends {
    double device_s = 0.0, host_s = 0.0;
};

struct Asked {
    const std::int64_t* num_tokens;
    const double* device_s;    // of each, its weights present
    const double* host_s;
    const double* arriving_s;  // infinite: not on its way; null: none is

    double due_s(long place) const { return arriving_s ? arriving_s[place] : INFINITY; }
};

// The soonest due, then those with most tokens; a stable sort keeps equals by id.
void queue_up(Places& absent, const Asked& asked) {
    std::stable_sort(absent.begin(), absent.end(), [&](long a, long b) {
        const double due_a = asked.due_s(a), due_b = asked.due_s(b);
        return due_a != due_b ? due_a < due_b : asked.num_tokens[a] > asked.num_tokens[b];
    });
}

// Returns how many absent experts, from the front of the queue, go to the device. The host works
// from the back and never reaches an expert that the device finishes by then.
long share(const Places& absent, const Asked& asked, double link_end_s, double fetch_s, Ends& ends) {
    std::vector<double> rest_s(absent.size());
    double sum_s = 0.0;
    for (long place = static_cast<long>(absent.size()) - 1; place >= 0; --place)
        rest_s[place] = sum_s += asked.host_s[absent[place]];
    for (std::size_t front = 0; front < absent.size(); ++front) {
        const double due_s = asked.due_s(absent[front]);
        const bool is_coming = due_s < INFINITY;
        const double here_s = is_coming ? due_s : link_end_s + fetch_s;
        const double done_s = std::max(here_s, ends.device_s) + asked.device_s[absent[front]];
        if (done_s > rest_s[front]) {
            ends.host_s = rest_s[front];
            return static_cast<long>(front);
        }
        ends.device_s = done_s;
        if (!is_coming) link_end_s = here_s;
    }
    ends.host_s = 0.0;
    return static_cast<long>(absent.size());
}

// Moves residents to the host while the layer ends sooner by it, cheapest first for what they save
// the device. A NaN ratio comes last, as in numpy's sort.
void relieve(Places residents, const Asked& asked, Ends ends, std::vector<std::uint8_t>& on_device) {
    std::vector<double> ratio(on_device.size());
    for (long place : residents) ratio[place] = asked.host_s[place] / asked.device_s[place];
    std::stable_sort(residents.begin(), residents.end(), [&](long a, long b) {
        return std::isnan(ratio[b]) ? !std::isnan(ratio[a]) : ratio[a] < ratio[b];
    });
    for (long place : residents) {
        ends.host_s += asked.host_s[place];
        if (ends.host_s >= ends.device_s) return;
        ends.device_s -= asked.device_s[place];
        on_device[place] = 0;
    }
}

}

extern "C" {

// experts [num], ascending. out [num]: residents that the device runs, then its fetched experts,
// then the host's, each by id. ends [2]: where the first and the second of these end.
void lowtide_balance(
    const std::int64_t* experts, const std::int64_t* num_tokens, const std::uint8_t* is_resident,
    const double* device_s, const double* host_s, const double* arriving_s, long num,
    double link_s, double fetch_s, std::int64_t* out, std::int64_t* ends_of
) {
    const Asked asked{num_tokens, device_s, host_s, arriving_s};
    Places residents, absent;
    Ends ends;
    std::vector<std::uint8_t> on_device(num, 0);
    for (long place = 0; place < num; ++place) {
        (is_resident[place] ? residents : absent).push_back(place);
        on_device[place] = is_resident[place];
        if (is_resident[place]) ends.device_s += device_s[place];
    }
    queue_up(absent, asked);
    const long num_fetched = share(absent, asked, link_s, fetch_s, ends);
    for (long front = 0; front < num_fetched; ++front) on_device[absent[front]] = 1;
    if (ends.host_s < ends.device_s) relieve(residents, asked, ends, on_device);
    std::int64_t* next = out;
    for (long place = 0; place < num; ++place)
        if (on_device[place] && is_resident[place]) *next++ = experts[place];
    ends_of[0] = next - out;
    for (long place = 0; place < num; ++place)
        if (on_device[place] && !is_resident[place]) *next++ = experts[place];
    ends_of[1] = next - out;
    for (long place = 0; place < num; ++place)
        if (!on_device[place]) *next++ = experts[place];
}

}
