// What stands before a decoder's layers and behind them: the tokens' embedding, the logits.
#pragma once

#include "cpu/parts.h"

namespace strata::cpu {

// out = rows `ids` of the matrix, times scale: f32 [tokens, cols]. ids are rows of it.
void embed(Cpu& cpu, const Matrix& matrix, const int32_t* ids, size_t tokens, float scale, float* out);

// Logits of `count` rows of the residual stream, f32 [count, rows of head]. Activations of w8 have a scale
// per 64 columns there whatever others have: the head has few rows, so that reading it is what takes the
// time, and what it loses nothing evens out any more.
void logits(Cpu& cpu, const Norm& norm, const Matrix& head, const float* residual, const int32_t* rows,
            size_t count, bool exact, float* out);

}  // namespace strata::cpu
