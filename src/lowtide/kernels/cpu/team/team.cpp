// One team for the process. Its threads sleep while nothing is decoded, and die with the process.
//
// What is on offer is one number, `offer`: which work it is (upper half), and how many of its
// pieces are not taken yet (lower half). A piece is taken by lowering it. A thread that manages to
// knows that what it had read of the work before is of this very work: the next one is not written
// before all pieces of this one are taken and done.

#include "team/team.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace lowtide {
namespace {

using Clock = std::chrono::steady_clock;

// A pass has a handover every 50 to 100 us; waking a thread takes as long.
constexpr auto AWAKE = std::chrono::microseconds(200);

// Pieces are alike, so the others are done soon after the caller's own. Who waits so much longer,
// waits for a thread that another process has taken the core from, for milliseconds: likely one that
// has used up its time by waiting for work. So it gives its own core away, and for some passes
// threads sleep between handovers (docs/log).
constexpr auto PATIENCE = std::chrono::microseconds(300);
constexpr int CROWDED_CALLS = 1000;

inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#else
    std::this_thread::yield();
#endif
}

// A thread that makes a helper may be kept to a share of the cores, which a new thread inherits;
// helpers are to go wherever the process may.
void use_every_core() {
    cpu_set_t cores;
    if (sched_getaffinity(getpid(), sizeof cores, &cores) == 0)
        sched_setaffinity(0, sizeof cores, &cores);
}

class Team {
   public:
    void run(int num_threads, long num_pieces, Piece piece, const void* work) {
        num_threads = static_cast<int>(std::min<long>(num_threads, num_pieces));
        if (num_threads > 1) {
            const std::unique_lock<std::mutex> own(in_use_, std::try_to_lock);
            if (own.owns_lock()) return share(num_threads, num_pieces, piece, work);
        }
        for (long number = 0; number < num_pieces; ++number) piece(work, number);
    }

    // Until the next work.
    void rest() { rest_since_.store(offer_.load() >> 32, std::memory_order_relaxed); }

   private:
    void share(int num_threads, long num_pieces, Piece piece, const void* work) {
        grow(num_threads - 1);
        if (num_crowded_calls_ > 0) --num_crowded_calls_;
        piece_.store(piece, std::memory_order_relaxed);
        work_.store(work, std::memory_order_relaxed);
        num_pieces_.store(num_pieces, std::memory_order_relaxed);
        num_done_.store(0, std::memory_order_relaxed);
        num_invited_.store(num_threads - 1, std::memory_order_relaxed);
        const std::uint64_t turn = (offer_.load() >> 32) + 1;
        offer_.store(turn << 32 | static_cast<std::uint32_t>(num_pieces));
        // Without the sleepers' lock: who misses this call hears the next.
        if (num_asleep_.load() > 0) wake_.notify_all();
        const auto begun = Clock::now();
        take_pieces();
        await(num_pieces, PATIENCE + (Clock::now() - begun));
    }

    void grow(int num_helpers) {
        try {
            for (; num_helpers_ < num_helpers; ++num_helpers_)
                std::thread(&Team::help, this, num_helpers_).detach();
        } catch (const std::system_error&) {
            // The system has no more threads to give: those there are will do.
        }
    }

    void await(long num_pieces, Clock::duration patience) {
        const auto patient_until = Clock::now() + patience;
        while (num_done_.load(std::memory_order_acquire) < num_pieces) {
            if (Clock::now() < patient_until) {
                pause();
            } else {
                num_crowded_calls_ = CROWDED_CALLS;
                std::this_thread::yield();
            }
        }
    }

    void take_pieces() {
        std::uint64_t offer = offer_.load();
        while (static_cast<std::uint32_t>(offer) > 0) {
            const Piece piece = piece_.load(std::memory_order_relaxed);
            const void* work = work_.load(std::memory_order_relaxed);
            const long num_pieces = num_pieces_.load(std::memory_order_relaxed);
            if (!offer_.compare_exchange_weak(offer, offer - 1)) continue;
            piece(work, num_pieces - static_cast<std::uint32_t>(offer));
            num_done_.fetch_add(1, std::memory_order_release);
            offer = offer_.load();
        }
    }

    void help(int number) {
        use_every_core();
        auto awake_until = bedtime();
        for (;;) {
            if (is_wanted(number)) {
                take_pieces();
                awake_until = bedtime();
            }
            for (int i = 0; i < 64 && !is_wanted(number); ++i) pause();
            if (Clock::now() < awake_until && !has_rest()) continue;
            std::unique_lock<std::mutex> lock(sleep_);
            num_asleep_.fetch_add(1);
            wake_.wait(lock, [this, number] { return is_wanted(number); });
            num_asleep_.fetch_sub(1);
            awake_until = bedtime();
        }
    }

    Clock::time_point bedtime() const {
        return num_crowded_calls_ > 0 ? Clock::now() : Clock::now() + AWAKE;
    }

    bool is_wanted(int number) const {
        const bool is_offered = static_cast<std::uint32_t>(offer_.load()) > 0;
        return is_offered && number < num_invited_.load(std::memory_order_relaxed);
    }

    bool has_rest() const {
        return rest_since_.load(std::memory_order_relaxed) == offer_.load() >> 32;
    }

    std::mutex in_use_;
    int num_helpers_ = 0;

    alignas(64) std::atomic<std::uint64_t> offer_{0};
    alignas(64) std::atomic<long> num_done_{0};
    alignas(64) std::atomic<Piece> piece_{nullptr};
    std::atomic<const void*> work_{nullptr};
    std::atomic<long> num_pieces_{0};
    std::atomic<int> num_invited_{0};
    std::atomic<int> num_crowded_calls_{0};
    std::atomic<std::uint64_t> rest_since_{~0ull};

    std::mutex sleep_;
    std::condition_variable wake_;
    std::atomic<int> num_asleep_{0};
};

// Never destroyed: its threads end with the process. A fork has none of them, and may be made in the
// midst of a call: it begins with a team of its own.
Team* present = new Team;

[[maybe_unused]] const int told_of_forks =
    pthread_atfork(nullptr, nullptr, [] { present = new Team; });

}  // namespace

void run_together(int num_threads, long num_pieces, Piece piece, const void* work) {
    present->run(num_threads, num_pieces, piece, work);
}

void rest_together() { present->rest(); }

}  // namespace lowtide

// For tests of how pieces are divided.
extern "C" void lowtide_run_together(
    int num_threads, long num_pieces, lowtide::Piece piece, const void* work
) {
    lowtide::run_together(num_threads, num_pieces, piece, work);
}
