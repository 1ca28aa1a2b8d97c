#include "cpu/plain_linear.h"

#include <algorithm>

#include "cpu/parallel.h"
#include "cpu/vec8.h"

namespace strata::cpu {
namespace {

constexpr size_t kTile = 4;  // rows x outputs of one sweep: 16 accumulators are all that AVX2 has

// y[r][o] for Rows rows of x and Outputs rows of the matrix. Every product is summed in the same order,
// whatever the tile: eight lanes over the columns, then the lanes, then the columns that are left over.
template <int Rows, int Outputs>
void tile(const float* x, const float* weights, size_t cols, float (*y)[kTile]) {
    __m256 acc[Rows][Outputs];
    for (int r = 0; r < Rows; ++r)
        for (int o = 0; o < Outputs; ++o) acc[r][o] = _mm256_setzero_ps();
    size_t i = 0;
    for (; i + 8 <= cols; i += 8) {
        __m256 w[Outputs];
        for (int o = 0; o < Outputs; ++o) w[o] = _mm256_loadu_ps(weights + static_cast<size_t>(o) * cols + i);
        for (int r = 0; r < Rows; ++r) {
            const __m256 value = _mm256_loadu_ps(x + static_cast<size_t>(r) * cols + i);
            for (int o = 0; o < Outputs; ++o) acc[r][o] = _mm256_fmadd_ps(w[o], value, acc[r][o]);
        }
    }
    for (int r = 0; r < Rows; ++r)
        for (int o = 0; o < Outputs; ++o) {
            const float *row = x + static_cast<size_t>(r) * cols,
                        *w = weights + static_cast<size_t>(o) * cols;
            float sum = vec8::sum(acc[r][o]);
            for (size_t j = i; j < cols; ++j) sum += w[j] * row[j];
            y[r][o] = sum;
        }
}

using TileFn = void (*)(const float*, const float*, size_t, float (*)[kTile]);
constexpr TileFn kTiles[kTile][kTile] = {
    {tile<1, 1>, tile<1, 2>, tile<1, 3>, tile<1, 4>},
    {tile<2, 1>, tile<2, 2>, tile<2, 3>, tile<2, 4>},
    {tile<3, 1>, tile<3, 2>, tile<3, 3>, tile<3, 4>},
    {tile<4, 1>, tile<4, 2>, tile<4, 3>, tile<4, 4>},
};

}  // namespace

void plain_linear(ThreadPool& pool, const float* x, const float* matrix, const float* bias, float* y,
                  size_t rows, size_t cols, size_t outputs) {
    parallel_for(pool, outputs, rows * cols, [&](size_t begin, size_t end) {
        for (size_t row = 0; row < rows; row += kTile)
            for (size_t output = begin; output < end; output += kTile) {
                const size_t height = std::min(kTile, rows - row), width = std::min(kTile, end - output);
                float sums[kTile][kTile];
                kTiles[height - 1][width - 1](x + row * cols, matrix + output * cols, cols, sums);
                for (size_t r = 0; r < height; ++r)
                    for (size_t o = 0; o < width; ++o)
                        y[(row + r) * outputs + output + o] = sums[r][o] + (bias ? bias[output + o] : 0.0f);
            }
    });
}

}  // namespace strata::cpu
