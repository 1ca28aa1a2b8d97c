// The gated activation between gate_up and down (strata/backends/parts.py, Gating).
#pragma once

#include "device.cuh"

// Values of `kind`; strata/backends/cuda/launch_shapes.py names them.
constexpr int kSilu = 0, kGeluTanh = 1, kSwigluClamped = 2;
constexpr float kLog2E = 1.4426950408889634f;

DEVICE float sigmoid(float x) { return reciprocal_approx(1.0f + exp2_approx(-x * kLog2E)); }

struct Gating {
    int kind;
    float alpha, limit;
};

DEVICE float gated(float gate, float up, const Gating& gating) {
    if (gating.kind == kSilu) return gate * sigmoid(gate) * up;
    if (gating.kind == kGeluTanh) {
        // 0.5 (1 + tanh(z)) = sigmoid(2 z)
        const float z = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
        return gate * sigmoid(2.0f * z) * up;
    }
    const float low = fminf(gate, gating.limit), held = fminf(fmaxf(up, -gating.limit), gating.limit);
    return low * sigmoid(gating.alpha * low) * (held + 1.0f);
}
