// Joins what the splits of a row left, with the sink of each head in the denominator.
#pragma once

#include "device.cuh"

struct Splits {
    const float* partial;  // f32 [heads of the call, splits, dim + 2], from the first of them on
    const float* sinks;    // of these heads, or null
    int heads, splits, dim;
};

// What each split counts for, divided by all of them: f32 [heads, splits] in shared memory. One warp per
// head.
DEVICE void weigh_splits(const Splits& from, float* factors) {
    constexpr float kLog2OfE = 1.4426950408889634f;
    const int lane = threadIdx.x % kWarp;
    for (int head = threadIdx.x / kWarp; head < from.heads; head += blockDim.x / kWarp) {
        const float* const states = from.partial + static_cast<size_t>(head) * from.splits * (from.dim + 2);
        float* const own = factors + head * from.splits;
        const float sink = from.sinks != nullptr ? from.sinks[head] * kLog2OfE : -1e30f;
        float largest = sink, weights = 0.0f;
        for (int i = lane; i < from.splits; i += kWarp)
            largest = fmaxf(largest, states[i * (from.dim + 2) + from.dim]);
        largest = warp_max(largest);
        for (int i = lane; i < from.splits; i += kWarp) {
            own[i] = exp2_approx(states[i * (from.dim + 2) + from.dim] - largest);
            weights += states[i * (from.dim + 2) + from.dim + 1] * own[i];
        }
        weights = warp_sum(weights) + (from.sinks != nullptr ? exp2_approx(sink - largest) : 0.0f);
        for (int i = lane; i < from.splits; i += kWarp) own[i] /= weights;
    }
}

// All threads of the block, behind a barrier; out is f32 [heads, dim], factors as weigh_splits makes them.
DEVICE void join_splits(const Splits& from, float* factors, float* out) {
    weigh_splits(from, factors);
    __syncthreads();
    for (int i = threadIdx.x; i < from.heads * from.dim; i += blockDim.x) {
        const int head = i / from.dim, element = i % from.dim;
        const float* const parts =
            from.partial + static_cast<size_t>(head) * from.splits * (from.dim + 2) + element;
        float sum = 0.0f;
#pragma unroll 4
        for (int split = 0; split < from.splits; ++split)
            sum += parts[split * (from.dim + 2)] * factors[head * from.splits + split];
        out[i] = sum;
    }
}
