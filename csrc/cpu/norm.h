// RMSNorm, alone and joined with the residual addition before it.
#pragma once

#include <cstddef>

#include "cpu/thread_pool.h"

namespace strata::cpu {

// y[i] = x[i] / sqrt(mean(x^2) + eps) * weight over each of `groups` consecutive runs of `dim` floats.
// x and y may be the same memory. The mean is accumulated in f64 blocks of f32 lanes.
void rms_norm(ThreadPool& pool, const float* x, const float* weight, float* y, size_t groups, size_t dim,
              float eps);

// residual += scale * branch, then y = rms_norm(residual); row by row, `dim` floats each.
void add_rms_norm(ThreadPool& pool, float* residual, const float* branch, float scale, const float* weight,
                  float* y, size_t rows, size_t dim, float eps);

// One run on the calling thread; other ops normalise heads with it.
void rms_norm_run(const float* x, const float* weight, float* y, size_t dim, float eps);

}  // namespace strata::cpu
