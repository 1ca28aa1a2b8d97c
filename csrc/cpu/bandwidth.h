// The memory's read speed, the yardstick of every decode speed.
#pragma once

#include "cpu/cpu.h"

namespace strata::cpu {

// Bytes per second of each pass over a fresh buffer of `bytes` bytes, read by all workers of the pool
// (worker w reads its own contiguous part, which it touched first) until `seconds` have passed.
// Throws std::bad_alloc when the memory is not there.
std::vector<double> read_bandwidth(Cpu& cpu, size_t bytes, double seconds);

}  // namespace strata::cpu
