#include "cpu/plain_linear.h"

#include <algorithm>

#include "cpu/parallel.h"
#include "cpu/vec8.h"

namespace strata::cpu {

// One output for Rows rows of x: the weights are read once for all of them.
template <int Rows>
static void dot_rows(const float* x, const float* weights, size_t cols, float* results) {
    __m256 acc[Rows];
    for (int r = 0; r < Rows; ++r) acc[r] = _mm256_setzero_ps();
    size_t i = 0;
    for (; i + 8 <= cols; i += 8) {
        const __m256 w = _mm256_loadu_ps(weights + i);
        for (int r = 0; r < Rows; ++r)
            acc[r] = _mm256_fmadd_ps(w, _mm256_loadu_ps(x + static_cast<size_t>(r) * cols + i), acc[r]);
    }
    for (int r = 0; r < Rows; ++r) {
        results[r] = vec8::sum(acc[r]);
        for (size_t j = i; j < cols; ++j) results[r] += weights[j] * x[static_cast<size_t>(r) * cols + j];
    }
}

void plain_linear(ThreadPool& pool, const float* x, const float* matrix, const float* bias, float* y,
                  size_t rows, size_t cols, size_t outputs) {
    constexpr size_t kRows = 8;  // 8 accumulators hide the latency of the fused multiply-add
    parallel_for(pool, outputs, rows * cols, [&](size_t begin, size_t end) {
        for (size_t first = 0; first < rows; first += kRows)
            for (size_t o = begin; o < end; ++o) {
                const size_t count = std::min(kRows, rows - first);
                const float *source = x + first * cols, *weights = matrix + o * cols;
                float results[kRows];
                if (count == kRows)
                    dot_rows<kRows>(source, weights, cols, results);
                else
                    for (size_t r = 0; r < count; ++r)
                        dot_rows<1>(source + r * cols, weights, cols, results + r);
                for (size_t r = 0; r < count; ++r)
                    y[(first + r) * outputs + o] = results[r] + (bias ? bias[o] : 0.0f);
            }
    });
}

}  // namespace strata::cpu
