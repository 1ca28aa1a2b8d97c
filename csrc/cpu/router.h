// Which experts a token visits and with what weight.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/cpu.h"

namespace strata::cpu {

enum class RouterScore { softmax, sigmoid, softmax_topk };
enum class GroupScore { max, top2 };

// The same meanings as RouterSpec in strata/plan/spec.py.
struct RouterArgs {
    size_t experts, top_k;
    RouterScore score;
    bool normalize;
    float normalize_eps, scale;
    size_t groups, top_groups;
    GroupScore group_score;
    const float* select_bias;  // [experts] or null; for choosing only, never in the weights
};

// logits f32 [rows, experts] -> ids i32 [rows, top_k] by falling score, weights f32 [rows, top_k].
// Equal scores: the lower expert index first.
void route(Cpu& cpu, const RouterArgs& args, const float* logits, size_t rows, int32_t* ids, float* weights);

}  // namespace strata::cpu
