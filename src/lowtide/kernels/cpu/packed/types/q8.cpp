#include "packed/own_blocks.hpp"

BLOCK_TYPE(q8, lowtide::Own<8>)
