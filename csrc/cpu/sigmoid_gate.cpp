#include "cpu/sigmoid_gate.h"

#include <cmath>

#include "cpu/parallel.h"

namespace strata::cpu {

void scale_by_sigmoid(ThreadPool& pool, float* x, const float* gate, size_t rows, size_t cols) {
    parallel_for(pool, rows, cols, [&](size_t begin, size_t end) {
        for (size_t row = begin; row < end; ++row) {
            const float share = 1.0f / (1.0f + std::exp(-gate[row]));
            for (size_t i = 0; i < cols; ++i) x[row * cols + i] *= share;
        }
    });
}

}  // namespace strata::cpu
