// y = W x (+ bias) and its relatives on packed matrices.
#pragma once

#include "cpu/cpu.h"

namespace strata::cpu {

// x f32 [tokens][cols] -> y f32 [tokens][rows]; bias f32 [rows] or null. exact: activations stay f32.
void linear(Cpu& cpu, const Matrix& matrix, const float* x, int tokens, const float* bias, bool exact,
            float* y);

// One small matrix per head: rows [h * n, (h + 1) * n) of the matrix meet x[:, h], n = rows / heads.
// x f32 [tokens][heads * cols] -> y f32 [tokens][rows].
void head_linear(Cpu& cpu, const Matrix& matrix, const float* x, int tokens, int heads, bool exact, float* y);

// Rows of the matrix: y[i] = scale * W[ids[i]], f32 [tokens][cols]. ids must be in range.
void embedding(Cpu& cpu, const Matrix& matrix, const int32_t* ids, int tokens, float scale, float* y);

}  // namespace strata::cpu
