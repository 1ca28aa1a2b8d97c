// y = x W^T + bias with an unpacked f32 matrix (routers), accumulated in f32.
//
// x is f32 [rows, columns], matrix f32 [outputs, columns], bias f32 [outputs] or null, y f32 [rows, outputs];
// columns are a multiple of 4. One warp per output, eight rows at a time. Grid: (outputs / 4, rows / 8).
// Must move: the matrix, once per eight rows.
#include "device.cuh"

constexpr int kRowsAtOnce = 8, kOutputWarps = 4;

DEVICE float dot4(float4 a, float4 b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }

extern "C" __global__ void __launch_bounds__(kOutputWarps* kWarp)
    plain_linear(const float4* x, const float4* matrix, const float* bias, float* y, int rows, int quads,
                 int outputs) {
    const int output = blockIdx.x * kOutputWarps + threadIdx.x / kWarp, first = blockIdx.y * kRowsAtOnce;
    if (output >= outputs) return;  // a whole warp; nothing waits for others
    float sums[kRowsAtOnce] = {};
    for (int i = threadIdx.x % kWarp; i < quads; i += kWarp) {
        const float4 weights = matrix[static_cast<size_t>(output) * quads + i];
#pragma unroll
        for (int row = 0; row < kRowsAtOnce; ++row) {
            if (first + row < rows) {
                const float4 values = x[static_cast<size_t>(first + row) * quads + i];
                sums[row] += dot4(weights, values);
            }
        }
    }
#pragma unroll
    for (int row = 0; row < kRowsAtOnce; ++row) {
        const float sum = warp_sum(sums[row]);
        if (threadIdx.x % kWarp == 0 && first + row < rows)
            y[static_cast<size_t>(first + row) * outputs + output] =
                sum + (bias != nullptr ? bias[output] : 0.0f);
    }
}
EXPORT_KERNEL(plain_linear)
