// What the files of this folder hand to table.cpp.
#pragma once

#include "cpu/kernels/kernels.h"

namespace strata::cpu::STRATA_ISA {

// Jobs of more tokens than kFew, and of fewer the block that is left where two go together; null for weights
// that never come so.
extern const BlockFn kTilesQ8[kFormatCount];
extern const BlockFn kDotQ8[kFormatCount];
extern const BlockFn kDotF32[kFormatCount];
extern const DecodeRowFn kDecodeRow[kFormatCount];
extern const AttentionFns kAttention[kKvTypes];
void quantize(const Format& format, const float* x, int cols, int units, QuantUnit* out, int stride);
void dot_w8a8(const BlockJob& job);
void quantize_token(const float* x, int cols, int units, QuantUnit* out, int stride);
void gate(const Gating& gating, const float* z, const float* bias, int tokens, float* h, size_t stride);
int64_t int8_peak(int64_t rounds, int32_t* sums);

}  // namespace strata::cpu::STRATA_ISA
