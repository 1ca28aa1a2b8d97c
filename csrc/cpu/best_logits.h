// The best logits of every row, for a sampler that needs no more.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/cpu.h"

namespace strata::cpu {

// Of each row of f32 [rows, stride] the `count` best of its first `columns`, best first, the lowest column
// first among equals: values f32 and ids i32 [rows, count]. count: 1 to columns. Returns false, and leaves
// the results undefined, where a row has NaN, +infinity, or fewer above -infinity.
bool best_logits(Cpu& cpu, const float* logits, size_t rows, size_t stride, size_t columns, size_t count,
                 float* values, int32_t* ids);

}  // namespace strata::cpu
