// RMSNorm, and the addition of a branch to the residual stream.
#pragma once

#include <cstddef>

#include "cpu/thread_pool.h"

namespace strata::cpu {

// y[i] = x[i] / sqrt(mean(x^2) + eps) * weight over each of `groups` consecutive runs of `dim` floats.
// x and y may be the same memory. The mean is accumulated in blocks of f32 lanes.
void rms_norm(ThreadPool& pool, const float* x, const float* weight, float* y, size_t groups, size_t dim,
              float eps);

// residual += scale * branch, `rows` rows of `dim` floats; each sum is rounded once.
void add_scaled(ThreadPool& pool, float* residual, const float* branch, float scale, size_t rows, size_t dim);

// One run on the calling thread; other ops normalise heads with it.
void rms_norm_run(const float* x, const float* weight, float* y, size_t dim, float eps);

}  // namespace strata::cpu
