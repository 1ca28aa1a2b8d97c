#include "cpu/norm.h"

#include <cmath>

#include "cpu/parallel.h"
#include "cpu/vec8.h"

namespace strata::cpu {

static float sum_of_squares(const float* x, size_t dim) {
    __m256 total0 = _mm256_setzero_ps(), total1 = _mm256_setzero_ps();
    size_t i = 0;
    for (; i + 16 <= dim; i += 16) {
        const __m256 a = _mm256_loadu_ps(x + i), b = _mm256_loadu_ps(x + i + 8);
        total0 = _mm256_fmadd_ps(a, a, total0);
        total1 = _mm256_fmadd_ps(b, b, total1);
    }
    float total = vec8::sum(_mm256_add_ps(total0, total1));
    for (; i < dim; ++i) total += x[i] * x[i];
    return total;
}

void rms_norm_run(const float* x, const float* weight, float* y, size_t dim, float eps) {
    const float mean = sum_of_squares(x, dim) / static_cast<float>(dim);
    const float factor = 1.0f / std::sqrt(mean + eps);
    const __m256 factors = _mm256_set1_ps(factor);
    size_t i = 0;
    for (; i + 8 <= dim; i += 8) {
        const __m256 scaled = _mm256_mul_ps(_mm256_loadu_ps(x + i), factors);
        _mm256_storeu_ps(y + i, _mm256_mul_ps(scaled, _mm256_loadu_ps(weight + i)));
    }
    for (; i < dim; ++i) y[i] = x[i] * factor * weight[i];
}

static void add_run(float* residual, const float* branch, float scale, size_t dim) {
    const __m256 factor = _mm256_set1_ps(scale);
    size_t i = 0;
    for (; i + 8 <= dim; i += 8) {
        const __m256 sum =
            _mm256_fmadd_ps(_mm256_loadu_ps(branch + i), factor, _mm256_loadu_ps(residual + i));
        _mm256_storeu_ps(residual + i, sum);
    }
    for (; i < dim; ++i) residual[i] = std::fma(branch[i], scale, residual[i]);
}

void rms_norm(ThreadPool& pool, const float* x, const float* weight, float* y, size_t groups, size_t dim,
              float eps) {
    parallel_for(pool, groups, dim, [&](size_t begin, size_t end) {
        for (size_t g = begin; g < end; ++g) rms_norm_run(x + g * dim, weight, y + g * dim, dim, eps);
    });
}

void add_scaled(ThreadPool& pool, float* residual, const float* branch, float scale, size_t rows,
                size_t dim) {
    parallel_for(pool, rows, dim, [&](size_t begin, size_t end) {
        add_run(residual + begin * dim, branch + begin * dim, scale, (end - begin) * dim);
    });
}

}  // namespace strata::cpu
