// Activations as int8 with one f32 scale per row (absmax / 127), as rms_norm's third output is made.
//
// x is f32 [rows, columns], columns a multiple of 4; codes int8 [rows, units * 64], zeros behind the columns;
// scales f32 [rows]. One block per row, which reads it twice: the second time from L1 or L2. Must move: x
// once, codes once.
#include "device.cuh"

constexpr int kQuantizeThreads = 256, kQuantizeWarps = kQuantizeThreads / kWarp;

// The largest magnitude of a row, in every thread. `partial` is shared memory for a value per warp.
DEVICE float largest_of_row(const float4* x, int quads, float* partial) {
    float largest = 0.0f;
    for (int i = threadIdx.x; i < quads; i += kQuantizeThreads) {
        const float4 v = x[i];
        largest = fmaxf(fmaxf(fmaxf(largest, fabsf(v.x)), fmaxf(fabsf(v.y), fabsf(v.z))), fabsf(v.w));
    }
    largest = warp_max(largest);
    if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = largest;
    __syncthreads();
    for (int warp = 0; warp < kQuantizeWarps; ++warp) largest = fmaxf(largest, partial[warp]);
    return largest;
}

DEVICE u32 code_byte(float value, float steps) {
    return static_cast<u32>(__float2int_rn(value * steps)) & 255u;
}

extern "C" __global__ void __launch_bounds__(kQuantizeThreads)
    quantize_rows(const float4* x, u32* codes, float* scales, int quads, int words) {
    SHARED_MEMORY(shared);
    const float4* const row = x + static_cast<size_t>(blockIdx.x) * quads;
    const float largest = largest_of_row(row, quads, reinterpret_cast<float*>(shared));
    const float steps = largest > 0.0f ? 127.0f / largest : 0.0f;
    for (int i = threadIdx.x; i < words; i += kQuantizeThreads) {
        const float4 v = i < quads ? row[i] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        codes[static_cast<size_t>(blockIdx.x) * words + i] =
            code_byte(v.x, steps) | code_byte(v.y, steps) << 8 | code_byte(v.z, steps) << 16 |
            code_byte(v.w, steps) << 24;
    }
    if (threadIdx.x == 0) scales[blockIdx.x] = largest / 127.0f;
}
EXPORT_KERNEL(quantize_rows)
