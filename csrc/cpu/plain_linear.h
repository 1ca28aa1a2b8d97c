// y = x W^T (+ bias) with an unpacked f32 matrix: routers and shared-expert gates, which stay unquantized.
#pragma once

#include <cstddef>

#include "cpu/thread_pool.h"

namespace strata::cpu {

// x: f32 [rows, cols], matrix: f32 [outputs, cols], bias: [outputs] or null, y: f32 [rows, outputs].
// Each result is summed in the same order whatever the number of rows and threads.
void plain_linear(ThreadPool& pool, const float* x, const float* matrix, const float* bias, float* y,
                  size_t rows, size_t cols, size_t outputs);

}  // namespace strata::cpu
