#include "team/reader.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstring>
#include <thread>

namespace lowtide {
namespace {

using Seconds = std::chrono::duration<double>;

long align_down(long number) { return number - number % SECTOR_BYTES; }
long align_up(long number) { return align_down(number + SECTOR_BYTES - 1); }

// Bytes `start` to `stop` of a file. They are a range's of which `first` is in the file what
// `align_down` makes of its start.
struct Piece {
    long start, stop;

    Piece(const Range& range, long number, long piece_bytes)
        : start(std::max<long>(range.start, align_down(range.start) + number * piece_bytes)),
          stop(std::min<long>(range.start + range.num_bytes,
                              align_down(range.start) + (number + 1) * piece_bytes)) {}
};

long num_pieces(const Range& range, long piece_bytes) {
    const long num_bytes = range.start + range.num_bytes - align_down(range.start);
    return (num_bytes + piece_bytes - 1) / piece_bytes;
}

// At least `wanted` of `most` bytes; an error or READY.
int read_all(int descriptor, std::uint8_t* target, long offset, long wanted, long most, bool is_direct) {
    for (long filled = 0; filled < wanted;) {
        const ssize_t got = pread(descriptor, target + filled, most - filled, offset + filled);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return errno;
        filled += got;
        if (filled < wanted && (got == 0 || (is_direct && got % SECTOR_BYTES))) return FILE_ENDED;
    }
    return READY;
}

// Calls part(segment's target, where it begins in the file, its bytes) for what a piece has of each.
template <class Part>
int each_part(const Source& source, const Range& range, const Piece& piece, const Part& part) {
    const Segment* segment = source.segments + range.first_segment;
    for (const Segment* end = segment + range.num_segments; segment < end; ++segment) {
        const long start = std::max<long>(piece.start, segment->start);
        const long stop = std::min<long>(piece.stop, segment->start + segment->num_bytes);
        if (start >= stop) continue;
        const int error = part(segment->target + start - segment->start, start, stop - start);
        if (error != READY) return error;
    }
    return READY;
}

// Whether any segment has bytes of a piece: gaps between them are no reason to read.
bool has_bytes(const Source& source, const Range& range, const Piece& piece) {
    return each_part(source, range, piece, [](long, long, long) { return PENDING; }) != READY;
}

std::uint8_t* end_of(const iovec& place) {
    return static_cast<std::uint8_t*>(place.iov_base) + place.iov_len;
}

// Weights of two versions of a file make no model.
bool has_changed(const File& file) {
    struct stat now;
    if (fstat(static_cast<int>(file.descriptor), &now) != 0) return false;
    const std::int64_t modified_ns = now.st_mtim.tv_sec * 1000000000L + now.st_mtim.tv_nsec;
    // Some programs set the time of modification back; this one they cannot. To delete a file
    // changes it, too, and nothing in the file.
    const std::int64_t changed_ns = now.st_ctim.tv_sec * 1000000000L + now.st_ctim.tv_nsec;
    return now.st_size != file.num_bytes || modified_ns != file.modified_ns ||
           (changed_ns != file.changed_ns && now.st_nlink > 0);
}

// Where a piece goes in memory if all of it, and nothing else, can be read straight there: sectors of
// the file are sectors of the slot. Else empty.
std::vector<iovec> places_of(
    const Source& source, const Range& range, const Piece& piece, std::uint8_t* slot
) {
    std::vector<iovec> places;
    long stop = piece.start, most = IOV_MAX;
    each_part(source, range, piece, [&](long target, long start, long num_bytes) {
        if (start != stop || most-- == 0) return FILE_ENDED;
        stop = start + num_bytes;
        const bool goes_on = !places.empty() && slot + target == end_of(places.back());
        if (goes_on) places.back().iov_len += num_bytes;
        else places.push_back({slot + target, static_cast<std::size_t>(num_bytes)});
        return READY;
    });
    const bool is_whole = stop == piece.stop && piece.start % SECTOR_BYTES == 0;
    const bool fits = std::all_of(places.begin(), places.end(), [](const iovec& place) {
        const auto first = reinterpret_cast<std::uintptr_t>(place.iov_base);
        return first % SECTOR_BYTES == 0 && place.iov_len % SECTOR_BYTES == 0;
    });
    if (!is_whole || !fits) places.clear();
    return places;
}

// All of the places, which are whole sectors.
int read_places(int descriptor, std::vector<iovec>& places, long offset) {
    for (std::size_t first = 0; first < places.size();) {
        const ssize_t got = preadv(descriptor, &places[first],
                                   static_cast<int>(places.size() - first), offset);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return errno;
        if (got == 0 || got % SECTOR_BYTES) return FILE_ENDED;
        offset += got;
        std::size_t left = got;
        while (first < places.size() && left >= places[first].iov_len)
            left -= places[first++].iov_len;
        if (left == 0) continue;
        places[first].iov_base = static_cast<std::uint8_t*>(places[first].iov_base) + left;
        places[first].iov_len -= left;
    }
    return READY;
}

int read_piece(const Source& source, int thread, const Range& range, const Piece& piece, long slot) {
    const int descriptor = static_cast<int>(source.files[range.file].descriptor);
    std::uint8_t* const target = source.slots + slot * source.slot_bytes;
    if (source.buffers == nullptr) {
        const int error = each_part(source, range, piece, [&](long to, long from, long length) {
            return read_all(descriptor, target + to, from, length, length, false);
        });
        posix_fadvise(descriptor, piece.start, piece.stop - piece.start, POSIX_FADV_DONTNEED);
        return error;
    }
    std::vector<iovec> places = places_of(source, range, piece, target);
    if (!places.empty()) return read_places(descriptor, places, piece.start);
    std::uint8_t* const buffer =
        source.buffers + thread * (source.piece_bytes + 2 * SECTOR_BYTES);
    const long first = align_down(piece.start);
    const int error = read_all(descriptor, buffer, first, piece.stop - first,
                               align_up(piece.stop) - first, true);
    if (error != READY) return error;
    return each_part(source, range, piece, [&](long to, long from, long length) {
        std::memcpy(target + to, buffer + (from - first), length);
        return READY;
    });
}

}  // namespace

Readiness::Readiness(long num_slots) : slots_(new Slot[num_slots]) {}

std::uint32_t Readiness::begin(long number, std::uint32_t num_pieces) {
    const std::lock_guard<std::mutex> lock(changes_);
    Slot& slot = slots_[number];
    slot.num_missing = num_pieces;
    slot.error = READY;
    slot.state.store(num_pieces > 0 ? PENDING : READY, std::memory_order_release);
    return ++slot.filling;
}

void Readiness::end_piece(long number, std::uint32_t filling, int error) {
    {
        const std::lock_guard<std::mutex> lock(changes_);
        Slot& slot = slots_[number];
        if (slot.filling != filling || slot.num_missing == 0) return;
        // The first error stays; that a piece was given up explains less than what another met.
        const bool has_failed = slot.error != READY && slot.error != CANCELLED;
        if (error != READY && !has_failed) slot.error = error;
        if (--slot.num_missing > 0) return;
        slot.state.store(slot.error, std::memory_order_release);
    }
    changed_.notify_all();
}

int Readiness::state(long slot) const {
    return slots_[slot].state.load(std::memory_order_acquire);
}

int Readiness::wait(long slot, double seconds) {
    if (state(slot) != PENDING) return state(slot);
    std::unique_lock<std::mutex> lock(changes_);
    changed_.wait_for(lock, Seconds(seconds), [&] { return state(slot) != PENDING; });
    return state(slot);
}

struct Reader::State {
    const Source source;
    const std::shared_ptr<Readiness> readiness;
    std::mutex lock;
    std::condition_variable work, idle;
    std::deque<Task> tasks;
    int num_busy = 0, num_threads = 0;
    bool is_closed = false;

    State(const Source& source, std::shared_ptr<Readiness> readiness)
        : source(source), readiness(std::move(readiness)) {}

    // Those for which `is_it` holds, out of the queue; their bytes.
    template <class Predicate>
    long give_up(const Predicate& is_it) {
        std::vector<Task> given_up;
        {
            const std::lock_guard<std::mutex> own(lock);
            std::deque<Task> left;
            for (const Task& task : tasks)
                if (is_it(task)) given_up.push_back(task);
                else left.push_back(task);
            tasks.swap(left);
        }
        long num_bytes = 0;
        for (const Task& task : given_up) {
            const Piece piece(source.ranges[task.range], task.number, source.piece_bytes);
            num_bytes += piece.stop - piece.start;
            readiness->end_piece(task.slot, task.filling, CANCELLED);
        }
        return num_bytes;
    }
};

Reader::Reader(const Source& source, std::shared_ptr<Readiness> readiness)
    : state_(std::make_shared<State>(source, std::move(readiness))) {
    sigset_t all, before;  // signals are for Python's threads
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
        for (int thread = 0; thread < source.num_threads; ++thread) {
            std::thread(&Reader::run, state_, thread).detach();
            const std::lock_guard<std::mutex> own(state_->lock);
            ++state_->num_threads;
        }
    } catch (const std::system_error&) {
        // The system has no more threads to give: those there are will do.
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (state_->num_threads == 0) throw std::system_error(EAGAIN, std::generic_category());
}

void Reader::start(long expert, long slot) {
    const Source& source = state_->source;
    const long first = source.first_range[expert], last = source.first_range[expert + 1];
    std::vector<Task> tasks;
    for (long i = first; i < last; ++i) {
        const Range& range = source.ranges[i];
        for (long n = 0; n < num_pieces(range, source.piece_bytes); ++n)
            if (has_bytes(source, range, Piece(range, n, source.piece_bytes)))
                tasks.push_back({i, n, slot, 0});
    }
    const std::uint32_t filling =
        state_->readiness->begin(slot, static_cast<std::uint32_t>(tasks.size()));
    for (Task& task : tasks) task.filling = filling;
    bool is_closed;
    {
        const std::lock_guard<std::mutex> own(state_->lock);
        is_closed = state_->is_closed;
        state_->tasks.insert(state_->tasks.end(), tasks.begin(), tasks.end());
    }
    if (is_closed) state_->give_up([](const Task&) { return true; });
    else if (tasks.size() > 1) state_->work.notify_all();
    else state_->work.notify_one();
}

long Reader::cancel(long slot) {
    return state_->give_up([=](const Task& task) { return task.slot == slot; });
}

bool Reader::drain(double seconds) {
    state_->give_up([](const Task&) { return true; });
    std::unique_lock<std::mutex> own(state_->lock);
    return state_->idle.wait_for(own, Seconds(seconds), [this] { return state_->num_busy == 0; });
}

bool Reader::close(double seconds) {
    {
        const std::lock_guard<std::mutex> own(state_->lock);
        state_->is_closed = true;
    }
    state_->give_up([](const Task&) { return true; });
    std::unique_lock<std::mutex> own(state_->lock);
    state_->work.notify_all();
    return state_->idle.wait_for(own, Seconds(seconds),
                                 [this] { return state_->num_threads == 0; });
}

long Reader::num_bytes(long expert) const {
    const Source& source = state_->source;
    long num_bytes = 0;
    for (long i = source.first_range[expert]; i < source.first_range[expert + 1]; ++i)
        num_bytes += source.ranges[i].num_bytes;
    return num_bytes;
}

void Reader::run(std::shared_ptr<State> state, int thread) {
    std::unique_lock<std::mutex> own(state->lock);
    for (;;) {
        state->work.wait(own, [&] { return state->is_closed || !state->tasks.empty(); });
        if (state->is_closed) break;
        const Task task = state->tasks.front();
        state->tasks.pop_front();
        ++state->num_busy;
        own.unlock();
        const Range& range = state->source.ranges[task.range];
        const Piece piece(range, task.number, state->source.piece_bytes);
        int error = read_piece(state->source, thread, range, piece, task.slot);
        if (error == READY && has_changed(state->source.files[range.file])) error = FILE_CHANGED;
        state->readiness->end_piece(task.slot, task.filling, error);
        own.lock();
        --state->num_busy;
        state->idle.notify_all();
    }
    --state->num_threads;
    state->idle.notify_all();
}

}  // namespace lowtide

using namespace lowtide;

extern "C" {

std::shared_ptr<Readiness>* lowtide_open_readiness(long num_slots) {
    return new std::shared_ptr<Readiness>(std::make_shared<Readiness>(num_slots));
}

void lowtide_close_readiness(std::shared_ptr<Readiness>* readiness) { delete readiness; }

std::uint32_t lowtide_begin_slot(
    std::shared_ptr<Readiness>* readiness, long slot, std::uint32_t num_pieces
) {
    return (*readiness)->begin(slot, num_pieces);
}

void lowtide_end_piece(
    std::shared_ptr<Readiness>* readiness, long slot, std::uint32_t filling, int error
) {
    (*readiness)->end_piece(slot, filling, error);
}

int lowtide_wait_for_slot(std::shared_ptr<Readiness>* readiness, long slot, double seconds) {
    return (*readiness)->wait(slot, seconds);
}

// Null where the system has no thread to give.
Reader* lowtide_open_reader(const Source* source, std::shared_ptr<Readiness>* readiness) {
    try {
        return new Reader(*source, *readiness);
    } catch (const std::system_error&) {
        return nullptr;
    }
}

void lowtide_start_read(Reader* reader, long expert, long slot) { reader->start(expert, slot); }

long lowtide_cancel_read(Reader* reader, long slot) { return reader->cancel(slot); }

int lowtide_drain_reader(Reader* reader, double seconds) { return reader->drain(seconds); }

int lowtide_close_reader(Reader* reader, double seconds) { return reader->close(seconds); }

// The reader is closed and no longer used.
void lowtide_free_reader(Reader* reader) { delete reader; }

}
