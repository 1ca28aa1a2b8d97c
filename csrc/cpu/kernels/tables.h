// What the files of this folder hand to table.cpp.
#pragma once

#include "cpu/kernels/kernels.h"

namespace strata::cpu::STRATA_ISA {

extern const BlockFn kDotQ8[kFormatCount];
extern const BlockFn kDotF32[kFormatCount];
extern const DecodeRowFn kDecodeRow[kFormatCount];
void quantize(const float* x, int cols, int span, QuantUnit* out);
void gate(const Gating& gating, const float* z, const float* bias, int tokens, float* h, size_t stride);

}  // namespace strata::cpu::STRATA_ISA
