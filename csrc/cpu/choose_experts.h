// The router of one decoder layer: from the residual stream to the experts of every row.
#pragma once

#include "cpu/parts.h"
#include "cpu/router.h"

namespace strata::cpu {

struct RouterPart {
    Norm norm;
    const float* matrix;  // [experts, norm.dim]
    const float* bias;    // [experts] or null
    RouterArgs args;
};

// hidden = norm(residual), f32 [rows, norm.dim], which the experts will read; ids i32, weights f32 [rows,
// top_k].
void choose_experts(Cpu& cpu, const RouterPart& part, const float* residual, size_t rows, float* hidden,
                    int32_t* ids, float* weights);

}  // namespace strata::cpu
