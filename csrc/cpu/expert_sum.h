// The outputs of routed experts, computed apart and added up afterwards.
#pragma once

#include "cpu/cpu.h"
#include "cpu/grouping.h"

namespace strata::cpu {

// One expert's outputs: f32 [slices][count][hidden], weighted, for its tokens (ascending).
struct ExpertOutputs {
    const float* values;
    const int32_t* tokens;
    int count;
};

// y[token] += the outputs, expert after expert and slice after slice as they are given: the order in which
// gated_ffn adds, so that experts computed apart give the same bits as together. y: f32 [tokens][hidden].
void add_outputs(Cpu& cpu, const ExpertOutputs* experts, int expert_count, int slices, int hidden, float* y);

}  // namespace strata::cpu
