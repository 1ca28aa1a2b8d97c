// Joins the splits that attention_decode left, with the sink of each head in the denominator.
//
// partial is f32 [tiles, heads, splits, dim + 2]; sinks f32 [heads] (natural logits) or null; out f32
// [rows, heads * dim], of which the rows that `tiles` names (RowTile) are written. Grid: (heads, tiles); one
// thread per element, in turns. Must move: partial, out.
#include "device.cuh"

extern "C" __global__ void __launch_bounds__(128)
    attention_combine(const float* partial, const int* tiles, const float* sinks, float* out, int dim,
                      int splits) {
    constexpr float kLog2E = 1.4426950408889634f;
    const int heads = gridDim.x;
    const float* const own =
        partial + (static_cast<size_t>(blockIdx.y) * heads + blockIdx.x) * splits * (dim + 2);
    float* const row = out + static_cast<size_t>(tiles[4 * blockIdx.y]) * heads * dim;
    float largest = sinks != nullptr ? sinks[blockIdx.x] * kLog2E : -1e30f, weights = 0.0f;
    for (int i = 0; i < splits; ++i) largest = fmaxf(largest, own[i * (dim + 2) + dim]);
    if (sinks != nullptr) weights = exp2_approx(sinks[blockIdx.x] * kLog2E - largest);
    for (int i = 0; i < splits; ++i)
        weights += own[i * (dim + 2) + dim + 1] * exp2_approx(own[i * (dim + 2) + dim] - largest);
    for (int element = threadIdx.x; element < dim; element += blockDim.x) {
        float sum = 0.0f;
        for (int i = 0; i < splits; ++i)
            sum += own[i * (dim + 2) + element] * exp2_approx(own[i * (dim + 2) + dim] - largest);
        row[blockIdx.x * dim + element] = sum / weights;
    }
}
EXPORT_KERNEL(attention_combine)
