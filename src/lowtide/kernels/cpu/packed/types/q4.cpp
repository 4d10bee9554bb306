#include "packed/own_blocks.hpp"

BLOCK_TYPE(q4, lowtide::Own<4>)
