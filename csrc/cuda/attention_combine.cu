// Joins the splits that attention_decode left, with the sink of each head in the denominator.
//
// partial is f32 [rows, heads, splits, dim + 2]; sinks f32 [heads] (natural logits) or null; out f32
// [rows, heads * dim]. Grid: (heads, rows); one thread per element, in turns. Must move: partial, out.
#include "device.cuh"

extern "C" __global__ void __launch_bounds__(128)
    attention_combine(const float* partial, const float* sinks, float* out, int dim, int splits) {
    constexpr float kLog2E = 1.4426950408889634f;
    const size_t head = static_cast<size_t>(blockIdx.y) * gridDim.x + blockIdx.x;
    const float* const own = partial + head * splits * (dim + 2);
    float largest = sinks != nullptr ? sinks[blockIdx.x] * kLog2E : -1e30f, weights = 0.0f;
    for (int i = 0; i < splits; ++i) largest = fmaxf(largest, own[i * (dim + 2) + dim]);
    if (sinks != nullptr) weights = exp2_approx(sinks[blockIdx.x] * kLog2E - largest);
    for (int i = 0; i < splits; ++i)
        weights += own[i * (dim + 2) + dim + 1] * exp2_approx(own[i * (dim + 2) + dim] - largest);
    for (int element = threadIdx.x; element < dim; element += blockDim.x) {
        float sum = 0.0f;
        for (int i = 0; i < splits; ++i)
            sum += own[i * (dim + 2) + element] * exp2_approx(own[i * (dim + 2) + dim] - largest);
        out[head * dim + element] = sum / weights;
    }
}
EXPORT_KERNEL(attention_combine)
