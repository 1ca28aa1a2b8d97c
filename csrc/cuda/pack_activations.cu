// Activations for the tensor-core kernels of prompts (prefill.cuh): f32 rounded to bf16, columns in the order
// in which those kernels load them, zeros up to whole units of 64 columns.
//
// x is f32 [rows, columns], columns a multiple of 8; packed bf16 [rows, units * 64]. totals, f32
// [rows, units, 4] or null, are sums of the rounded numbers that formats with a minimum need: of a unit's
// first and second 32 columns, of both, and 0. A thread takes 8 columns. Grid: (rows, units * 8 / 256):
// rows of many heads are more than a grid's y may be.
// Must move: x once, packed once.
#include "packed_rows.cuh"

constexpr int kPackThreads = 256, kEight = 8;

extern "C" __global__ void __launch_bounds__(kPackThreads)
    pack_activations(const float* x, u32* packed, float4* totals, int columns, int units) {
    const int eight = blockIdx.y * kPackThreads + threadIdx.x, column = eight * kEight;
    const bool valid = eight < units * kUnitColumns / kEight;
    const size_t row = blockIdx.x;
    float4 first = make_float4(0.0f, 0.0f, 0.0f, 0.0f), second = first;
    if (column < columns) {
        const float4* const source = reinterpret_cast<const float4*>(x + row * columns + column);
        first = source[0];
        second = source[1];
    }
    const u32 words[4] = {pack_bf16(first.x, first.z), pack_bf16(first.y, first.w),
                          pack_bf16(second.x, second.z), pack_bf16(second.y, second.w)};
    const size_t unit = row * units + eight / 8;
    if (valid) {
#pragma unroll
        for (int i = 0; i < 4; ++i) packed[unit * kUnitWords + packed_word(eight % 8 * kEight, i)] = words[i];
    }
    if (totals == nullptr) return;
    const float4 sums =
        unit_totals(pair_sum(words[0]) + pair_sum(words[1]) + pair_sum(words[2]) + pair_sum(words[3]));
    if (valid && threadIdx.x % 8 == 0) totals[unit] = sums;
}
EXPORT_KERNEL(pack_activations)
