// The team of threads in a library beside the one that has it: a process has one team.

#include "team.hpp"

using namespace lowtide;

namespace {

using RunTogether = void (*)(int, long, Piece, const void*);
RunTogether team = nullptr;

}  // namespace

namespace lowtide {

void run_together(int num_threads, long num_pieces, Piece piece, const void* work) {
    if (team != nullptr) return team(num_threads, num_pieces, piece, work);
    for (long number = 0; number < num_pieces; ++number) piece(work, number);
}

}  // namespace lowtide

extern "C" {

// What divides work from now on: `lowtide_run_together` of the library that has the team.
void lowtide_borrow_team(RunTogether of_process) { team = of_process; }

}
