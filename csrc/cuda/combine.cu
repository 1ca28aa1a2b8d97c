// residual += scale * (sum of weight * expert(x) over a token's experts + rest), or = without `add`.
//
// out is f32 [pairs, columns], what expert_down wrote. pairs_of_token lists a token's pairs in ascending
// order of their experts, first_of_token[t] .. first_of_token[t + 1], and weights the router's weight of each
// entry: the order of the sum does not depend on where an expert was computed. rest is f32 [tokens, columns]
// or null: the shared expert, and what the CPU computed. Columns are a multiple of 4. Grid: (columns / 4 /
// block, tokens). Must move: out once, residual twice, rest once.
#include "device.cuh"

extern "C" __global__ void __launch_bounds__(128)
    combine_experts(const float4* out, const int* pairs_of_token, const float* weights,
                    const int* first_of_token, const float4* rest, float4* residual, int quads, float scale,
                    int add) {
    const int quad = blockIdx.x * blockDim.x + threadIdx.x, token = blockIdx.y;
    if (quad >= quads) return;
    const size_t place = static_cast<size_t>(token) * quads + quad;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int i = first_of_token[token]; i < first_of_token[token + 1]; ++i) {
        const float4 part = out[static_cast<size_t>(pairs_of_token[i]) * quads + quad];
        const float weight = weights[i];
        sum = make_float4(sum.x + weight * part.x, sum.y + weight * part.y, sum.z + weight * part.z,
                          sum.w + weight * part.w);
    }
    if (rest != nullptr) {
        const float4 part = rest[place];
        sum = make_float4(sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w);
    }
    const float4 old = add ? residual[place] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    residual[place] = make_float4(old.x + scale * sum.x, old.y + scale * sum.y, old.z + scale * sum.z,
                                  old.w + scale * sum.w);
}
EXPORT_KERNEL(combine_experts)
