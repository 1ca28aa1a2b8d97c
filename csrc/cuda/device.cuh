// All that kernels include. On a GPU (NVRTC, no CUDA headers needed) the wrappers below are PTX; g++ with
// STRATA_EMULATED takes their twins from emu/kernel_side.h instead. Each wrapper is tested on both sides.
//
// Rules for kernels: `extern "C" __global__` and EXPORT_KERNEL; arguments are pointers, ints and floats; one
// dynamic block of shared memory, at most 99 KiB, taken by SHARED_MEMORY; blocks are multiples of 32 threads;
// collectives are warp-uniform with the full mask; no return before a barrier; __syncwarp() orders memory,
// shuffles do not; blocks of one launch talk through atomics and last_of only; vectors are aligned; tails
// are guarded before they are loaded; no tables in memory; structs and vectors are loaded into a variable
// before they are passed on (GCC hides a load that is an argument from the emulator's checks).
#pragma once

#if defined(STRATA_EMULATED)
#include "emu/kernel_side.h"
#else

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char i8;

#define DEVICE static __device__ __forceinline__  // functions, also static ones of classes
#define METHOD __device__ __forceinline__
#define EXPORT_KERNEL(kernel)
#define SHARED_MEMORY(name) u8* name = reinterpret_cast<u8*>(strata_shared)
extern __shared__ uint4 strata_shared[];
static constexpr u32 FULL = 0xffffffffu;

struct f16 {
    u16 bits;
};
struct bf16 {
    u16 bits;
};

DEVICE float to_float(float value) { return value; }
DEVICE float to_float(bf16 value) { return __uint_as_float(static_cast<u32>(value.bits) << 16); }

DEVICE float to_float(f16 value) {
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
    return result;
}

DEVICE bf16 to_bf16(float value) {
    bf16 result;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
    return result;
}

DEVICE f16 to_f16(float value) {
    f16 result;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
    return result;
}

DEVICE u32 pack_bf16(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

DEVICE u32 pack_f16(float low, float high) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

DEVICE u32 sub_f16x2(u32 a, u32 b) {
    u32 result;
    asm("sub.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}

// sm_80 has no sub.bf16x2: a difference is fma with 1.
DEVICE u32 fma_bf16x2(u32 a, u32 b, u32 c) {
    u32 result;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
    return result;
}

DEVICE float exp2_approx(float value) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
}

DEVICE float reciprocal_approx(float value) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
}

// Weights and KV are read once: they need not push other data out of L1.
DEVICE u32 load_once(const u32* address) {
    u32 v;
    asm("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(address));
    return v;
}

DEVICE uint2 load_once(const uint2* address) {
    uint2 v;
    asm("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(address));
    return v;
}

DEVICE uint4 load_once(const uint4* address) {
    uint4 v;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(address));
    return v;
}

DEVICE u32 shared_address(const void* generic) { return static_cast<u32>(__cvta_generic_to_shared(generic)); }

// 16 bytes into shared memory, zeros when `valid` is false (the source is not read then).
DEVICE void copy_async16(void* shared, const void* global, bool valid) {
    const int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
                 "r"(bytes)
                 : "memory");
}

DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int GroupsLeft>
DEVICE void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(GroupsLeft) : "memory");
}

// sum[16][8] += a[16][k] b[k][8]; fragments as in the PTX ISA, m16n8k16 (16 bit) and m16n8k32 (8 bit).
DEVICE void mma_bf16(float (&sum)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

DEVICE void mma_f16(float (&sum)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

DEVICE void mma_s8(int (&sum)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+r"(sum[0]), "+r"(sum[1]), "+r"(sum[2]), "+r"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Four 8x8 matrices of 16-bit elements; lanes 8i..8i+7 give the rows of matrix i, 16 bytes each.
DEVICE void ldmatrix4(u32 (&rows)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
                 : "=r"(rows[0]), "=r"(rows[1]), "=r"(rows[2]), "=r"(rows[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// An 8x8 matrix of 16-bit elements, row l / 4 and columns 2 (l % 4) and the next in lane l, transposed.
DEVICE u32 transpose8x8(u32 rows) {
    u32 columns;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(columns) : "r"(rows));
    return columns;
}

#endif

// What follows is the same on both sides.

constexpr int kWarp = 32;

DEVICE float warp_sum(float value) {
    for (int bits = 16; bits > 0; bits >>= 1) value += __shfl_xor_sync(FULL, value, bits);
    return value;
}

DEVICE float warp_max(float value) {
    for (int bits = 16; bits > 0; bits >>= 1) value = fmaxf(value, __shfl_xor_sync(FULL, value, bits));
    return value;
}
