// The FFN of one decoder layer, from the residual stream (or from what its router read) and back into it.
#pragma once

#include "cpu/experts.h"
#include "cpu/parts.h"

namespace strata::cpu {

// A gated FFN that every token passes.
struct DenseFfn {
    FfnSlice slice;
    Gating gating;
};

// y = ffn(x); x, y f32 [tokens][hidden].
void dense_ffn(Cpu& cpu, const DenseFfn& part, const float* x, int tokens, bool exact, float* y);

// residual += scale * ffn(norm(residual)), f32 [tokens][norm.dim].
void feed_forward(Cpu& cpu, const Norm& norm, const DenseFfn& part, float scale, int tokens, bool exact,
                  float* residual);

// The experts that tokens were routed to, and the one that all pass.
struct RoutedFfn {
    int hidden;
    int slices, copies;      // per routed expert, see gated_ffn
    int64_t bytes;           // of a routed expert
    Gating gating;           // of the routed ones
    const DenseFfn* shared;  // or null
    const float*
        shared_gate;  // [hidden] or null; the shared output is multiplied by sigmoid(x . shared_gate)
    float scale;
};

// residual += scale * (sum of the works + shared expert), x and residual f32 [tokens][hidden].
void apply_experts(Cpu& cpu, const RoutedFfn& part, const ExpertWork* works, int count, const float* x,
                   int tokens, bool exact, float* residual);

}  // namespace strata::cpu
