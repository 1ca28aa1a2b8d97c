// RMSNorm of one row per block, with the residual addition before it and every form of output that the next
// op may want.
//
//     residual += scale * branch        (branch null: the residual is only read)
//     y = residual / sqrt(mean(residual^2) + eps) * weight
//
// y goes to `plain` (f32), `rounded` (bf16, to nearest even), or `codes` and `scales` (int8 with one f32
// scale per row, absmax / 127); any of the three may be null. Columns are a multiple of 4, rows are 16-byte
// aligned. Must move, per row: residual 4 B (twice with a branch), branch 4 B, weight 4 B (from L2), outputs
// 4, 2, 1 B per column. The row is kept in shared memory between the two passes.
#include "device.cuh"

struct NormRow {
    float4* values;  // [columns / 4], in shared memory
    float* partial;  // [warps]
    int quads;
};

DEVICE NormRow norm_row(int columns) {
    SHARED_MEMORY(shared);
    NormRow row;
    row.values = reinterpret_cast<float4*>(shared);
    row.partial = reinterpret_cast<float*>(shared + columns * 4);
    row.quads = columns / 4;
    return row;
}

// Combines one value per thread over the block; `partial` may be used again after the next barrier.
template <class Combine>
DEVICE float over_block(float value, float* partial, Combine combine) {
    for (int bits = 16; bits > 0; bits >>= 1) value = combine(value, __shfl_xor_sync(FULL, value, bits));
    if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = value;
    __syncthreads();
    float total = partial[0];
    for (int warp = 1; warp < static_cast<int>(blockDim.x) / kWarp; ++warp)
        total = combine(total, partial[warp]);
    return total;
}

DEVICE float dot4(float4 a) { return a.x * a.x + a.y * a.y + a.z * a.z + a.w * a.w; }

// Reads the row, adds the branch, keeps the sum; returns this thread's part of the sum of squares.
DEVICE float add_and_keep(const NormRow& row, float4* residual, const float4* branch, float scale) {
    float squares = 0.0f;
    for (int i = threadIdx.x; i < row.quads; i += blockDim.x) {
        float4 v = residual[i];
        if (branch != nullptr) {
            const float4 b = branch[i];
            v = make_float4(v.x + scale * b.x, v.y + scale * b.y, v.z + scale * b.z, v.w + scale * b.w);
            residual[i] = v;
        }
        row.values[i] = v;
        squares += dot4(v);
    }
    return squares;
}

// Scales the kept row, writes the two float outputs; returns this thread's largest magnitude.
DEVICE float write_floats(const NormRow& row, float factor, const float4* weight, float4* plain,
                          uint2* rounded) {
    float largest = 0.0f;
    for (int i = threadIdx.x; i < row.quads; i += blockDim.x) {
        const float4 v = row.values[i], w = weight[i];
        const float4 y =
            make_float4(v.x * factor * w.x, v.y * factor * w.y, v.z * factor * w.z, v.w * factor * w.w);
        if (plain != nullptr) plain[i] = y;
        if (rounded != nullptr) rounded[i] = make_uint2(pack_bf16(y.x, y.y), pack_bf16(y.z, y.w));
        row.values[i] = y;
        largest = fmaxf(fmaxf(fmaxf(largest, fabsf(y.x)), fmaxf(fabsf(y.y), fabsf(y.z))), fabsf(y.w));
    }
    return largest;
}

DEVICE u32 code_byte(float value, float steps) {
    return static_cast<u32>(__float2int_rn(value * steps)) & 255u;
}

DEVICE void write_codes(const NormRow& row, float largest, u32* codes, float* scale) {
    const float steps = largest > 0.0f ? 127.0f / largest : 0.0f;
    for (int i = threadIdx.x; i < row.quads; i += blockDim.x) {
        const float4 y = row.values[i];
        codes[i] = code_byte(y.x, steps) | code_byte(y.y, steps) << 8 | code_byte(y.z, steps) << 16 |
                   code_byte(y.w, steps) << 24;
    }
    if (threadIdx.x == 0) *scale = largest / 127.0f;
}

extern "C" __global__ void __launch_bounds__(256)
    rms_norm(float* residual, const float* branch, const float* weight, float* plain, bf16* rounded,
             i8* codes, float* scales, int columns, float scale, float eps) {
    const NormRow row = norm_row(columns);
    const size_t first = static_cast<size_t>(blockIdx.x) * columns;
    const float squares =
        add_and_keep(row, reinterpret_cast<float4*>(residual + first),
                     branch ? reinterpret_cast<const float4*>(branch + first) : nullptr, scale);
    const float total = over_block(squares, row.partial, [](float a, float b) { return a + b; });
    const float factor = rsqrtf(total / static_cast<float>(columns) + eps);
    float largest = write_floats(row, factor, reinterpret_cast<const float4*>(weight),
                                 plain ? reinterpret_cast<float4*>(plain + first) : nullptr,
                                 rounded ? reinterpret_cast<uint2*>(rounded + first) : nullptr);
    if (codes == nullptr) return;
    __syncthreads();  // everyone has read `partial`
    largest = over_block(largest, row.partial, [](float a, float b) { return fmaxf(a, b); });
    write_codes(row, largest, reinterpret_cast<u32*>(codes + first), scales + blockIdx.x);
}
EXPORT_KERNEL(rms_norm)
