#pragma once

#include <atomic>

namespace driver {

// Whether reads of files are late, interrupted and give less than was asked for, as they may. Those of
// pipes, which have no offsets, block in any case.
extern std::atomic<bool> is_unruly;

// Since the program began.
extern std::atomic<long> num_reads;

}  // namespace driver
