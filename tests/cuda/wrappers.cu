// Every wrapper of device.cuh that has a PTX side and an emulated side, one kernel each. One warp.
#include "device.cuh"

#define KERNEL extern "C" __global__ void __launch_bounds__(32)

// a: [16][16], b: [8][16] (that is, b transposed), out: [16][8], all row-major.
template <class Multiply>
DEVICE void multiply_16bit(const u32* a, const u32* b, float* out, Multiply multiply) {
    const int row = threadIdx.x / 4, pair = threadIdx.x % 4;
    const u32 left[4] = {a[row * 8 + pair], a[(row + 8) * 8 + pair], a[row * 8 + pair + 4],
                         a[(row + 8) * 8 + pair + 4]};
    const u32 right[2] = {b[row * 8 + pair], b[row * 8 + pair + 4]};
    float sum[4] = {1.0f, 2.0f, 3.0f, 4.0f};
    multiply(sum, left, right);
    for (int i = 0; i < 4; ++i) out[(row + i / 2 * 8) * 8 + pair * 2 + i % 2] = sum[i];
}

KERNEL multiply_bf16(const u32* a, const u32* b, float* out) {
    multiply_16bit(a, b, out, [](float (&s)[4], const u32(&l)[4], const u32(&r)[2]) { mma_bf16(s, l, r); });
}
EXPORT_KERNEL(multiply_bf16)

KERNEL multiply_f16(const u32* a, const u32* b, float* out) {
    multiply_16bit(a, b, out, [](float (&s)[4], const u32(&l)[4], const u32(&r)[2]) { mma_f16(s, l, r); });
}
EXPORT_KERNEL(multiply_f16)

// a: [16][32] bytes through ldmatrix, b: [8][32] bytes.
KERNEL multiply_s8(const uint4* a, const u32* b, int* out) {
    SHARED_MEMORY(shared);
    const int lane = threadIdx.x, row = lane / 4, quad = lane % 4;
    reinterpret_cast<uint4*>(shared)[lane] = a[lane];
    __syncwarp();
    u32 left[4];
    ldmatrix4(left, shared + lane % 16 * 32 + lane / 16 * 16);
    const u32 right[2] = {b[row * 8 + quad], b[row * 8 + quad + 4]};
    int sum[4] = {1, 2, 3, 4};
    mma_s8(sum, left, right);
    for (int i = 0; i < 4; ++i) out[(row + i / 2 * 8) * 8 + quad * 2 + i % 2] = sum[i];
}
EXPORT_KERNEL(multiply_s8)

KERNEL transpose(const u32* in, u32* out) { out[threadIdx.x] = transpose8x8(in[threadIdx.x]); }
EXPORT_KERNEL(transpose)

// in: [32] floats. out: [8][32] words.
KERNEL convert(const float* in, u32* out) {
    const int lane = threadIdx.x;
    const float x = in[lane];
    out[lane] = to_bf16(x).bits;
    out[32 + lane] = to_f16(x).bits;
    out[64 + lane] = pack_bf16(x, x + 1.0f);
    out[96 + lane] = pack_f16(x, x + 1.0f);
    out[128 + lane] = __float_as_uint(to_float(to_bf16(x)));
    out[160 + lane] = __float_as_uint(to_float(to_f16(x)));
    out[192 + lane] = sub_f16x2(pack_f16(x, 3.0f), pack_f16(0.5f, x));
    out[224 + lane] = fma_bf16x2(pack_bf16(x, 3.0f), pack_bf16(1.5f, x), pack_bf16(x, -1.0f));
}
EXPORT_KERNEL(convert)

// in: [32] words. out: [9][32] words.
KERNEL integers(const u32* in, u32* out) {
    const int lane = threadIdx.x;
    const u32 x = in[lane];
    out[lane] = __byte_perm(x, 0x64646464u, 0x4140);
    out[32 + lane] = __byte_perm(x, 0x64656667u, 0x7362);
    out[64 + lane] = static_cast<u32>(__dp4a(static_cast<int>(x), 0x01ff7f80, 5));
    out[96 + lane] = static_cast<u32>(__popc(x));
    out[128 + lane] = __ballot_sync(FULL, x & 1);
    out[160 + lane] = __shfl_sync(FULL, x, lane / 2);
    out[192 + lane] = __shfl_up_sync(FULL, x, 3);
    out[224 + lane] = __shfl_down_sync(FULL, x, 5);
    out[256 + lane] = __shfl_xor_sync(FULL, x, 9);
}
EXPORT_KERNEL(integers)

// in: [32] positive floats. out: [6][32].
KERNEL functions(const float* in, float* out) {
    const int lane = threadIdx.x;
    const float x = in[lane];
    out[lane] = exp2_approx(x);
    out[32 + lane] = reciprocal_approx(x);
    out[64 + lane] = rsqrtf(x);
    out[96 + lane] = warp_sum(x);
    out[128 + lane] = warp_max(x);
    out[160 + lane] = static_cast<float>(__float2int_rn(x));
}
EXPORT_KERNEL(functions)

// in: [32][4] words, out: [32][4]; the last copy is invalid and brings zeros. total: sum and largest lane.
KERNEL copies(const u32* in, uint4* out, u32* total) {
    SHARED_MEMORY(shared);
    const int lane = threadIdx.x;
    copy_async16(shared + lane * 16, in + lane * 4, lane < 31);
    copy_async_commit();
    copy_async_wait<0>();
    __syncwarp();
    const uint4 direct = load_once(reinterpret_cast<const uint4*>(in) + lane);
    const uint2 part = load_once(reinterpret_cast<const uint2*>(in) + lane * 2);
    const uint4 copied = reinterpret_cast<const uint4*>(shared)[lane ^ 1];
    out[lane] = make_uint4(copied.x, direct.y, part.x, load_once(in + lane * 4 + 3));
    atomicAdd(&total[0], in[lane]);
    atomicMax(&total[1], in[lane]);
}
EXPORT_KERNEL(copies)
