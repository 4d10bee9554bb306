// Threads that divide one short piece of work: tens of microseconds, a handover of one or two.

#pragma once

namespace lowtide {

using Piece = void (*)(const void* work, long piece);

// Bytes of weights, keys or values that are worth another thread: fewer are read before it begins.
constexpr long WORTH_BYTES = 256 << 10;

// Calls piece(work, 0) to piece(work, num_pieces - 1), each once, on the calling thread and up to
// `num_threads - 1` others, and returns when all have. Threads that have not begun are not waited
// for: on a busy machine, or beside another call, the caller does it all.
void run_together(int num_threads, long num_pieces, Piece piece, const void* work);

// The caller waits for something else than the team's work: its threads sleep at once, so that their
// cores are free for what is waited for.
void rest_together();

template <class Work>
void together(int num_threads, long num_pieces, const Work& work) {
    const auto piece = [](const void* of, long number) { (*static_cast<const Work*>(of))(number); };
    run_together(num_threads, num_pieces, piece, &work);
}

}  // namespace lowtide
