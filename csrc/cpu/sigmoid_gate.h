// The gate of a shared expert: rows multiplied by the sigmoid of one number each.
#pragma once

#include <cstddef>

#include "cpu/thread_pool.h"

namespace strata::cpu {

// x[r] *= sigmoid(gate[r]); x f32 [rows, cols], gate f32 [rows].
void scale_by_sigmoid(ThreadPool& pool, float* x, const float* gate, size_t rows, size_t cols);

}  // namespace strata::cpu
