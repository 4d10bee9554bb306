#include "rounded/rounded.hpp"

ROUNDED_TYPE(q8, lowtide::Own<8>)
