// The emulator's twin of the CUDA language and of the PTX wrappers in cuda/device.cuh: included by it when
// STRATA_EMULATED is defined, so that g++ compiles the kernels as they are.
#pragma once

#include <type_traits>
#include <utility>

#include "emu/kernel_api.h"

#define __global__ __attribute__((noinline))
#define __device__
#define __restrict__ __restrict
#define __launch_bounds__(...)
#define DEVICE static inline
#define METHOD inline
#define UNCHECKED __attribute__((no_sanitize_thread))
#define SITE strata::emu::Site site = {__builtin_FILE(), __builtin_LINE()}
#define SHARED_MEMORY(name) u8* name = strata::emu::shared_memory()
#define EXPORT_KERNEL(kernel)                                                                        \
    UNCHECKED static void call_##kernel(void** arguments) { strata::emu::call(&kernel, arguments); } \
    static const strata::emu::Registration registered_##kernel(#kernel, &call_##kernel,              \
                                                               strata::emu::arity(&kernel));

#define threadIdx (strata::emu::builtins->thread_index)
#define blockIdx (strata::emu::builtins->block_index)
#define blockDim (strata::emu::builtins->block_size)
#define gridDim (strata::emu::builtins->grid_size)

static constexpr u32 FULL = 0xffffffffu;

// By value: the standard ones take references, and a constant's address is no memory of the device.
template <class T>
static inline T min(T a, T b) {
    return b < a ? b : a;
}
template <class T>
static inline T max(T a, T b) {
    return a < b ? b : a;
}

namespace strata::emu {

template <class... Types, size_t... I>
UNCHECKED inline void call(void (*kernel)(Types...), void** arguments, std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_reference_t<Types>*>(arguments[I])...);
}

template <class... Types>
UNCHECKED inline void call(void (*kernel)(Types...), void** arguments) {
    call(kernel, arguments, std::index_sequence_for<Types...>());
}

template <class... Types>
constexpr int arity(void (*)(Types...)) {
    return sizeof...(Types);
}

struct Registration {
    Registration(const char* name, void (*call)(void**), int arguments) {
        register_kernel(name, call, arguments);
    }
};

template <class T>
UNCHECKED inline T shuffle(Shuffle mode, u32 mask, T value, int argument, Site site) {
    static_assert(sizeof(T) <= 8);
    u64 in[2] = {0, static_cast<u32>(argument)}, out = 0;
    memcpy(&in[0], &value, sizeof(T));
    warp_collective(Collective::shuffle, mask, in, 16, &out, 8, mode, site);
    memcpy(&value, &out, sizeof(T));
    return value;
}

// One unsplit read-modify-write: the emulator never switches threads inside.
template <class T, class Change>
UNCHECKED inline T atomic_change(T* target, Change change) {
    explicit_access(target, sizeof(T), Access::atomic);
    const T old = *target;
    *target = change(old);
    return old;
}

template <class Accumulator>
UNCHECKED inline void multiply(Collective op, Accumulator (&sum)[4], const u32 (&a)[4], const u32 (&b)[2],
                               Site site) {
    u32 in[10];
    memcpy(in, a, 16);
    memcpy(in + 4, b, 8);
    memcpy(in + 6, sum, 16);
    warp_collective(op, FULL, in, 40, sum, 16, Shuffle::index, site);
}

UNCHECKED static inline void require_aligned16(const void* address, const char* what, Site site) {
    if (reinterpret_cast<uintptr_t>(address) & 15) trap(what, site);
}

}  // namespace strata::emu

// Barriers, shuffles, votes.
static inline void __syncthreads(SITE) { strata::emu::block_barrier(strata::emu::Barrier::plain, 0, site); }
static inline int __syncthreads_or(int predicate, SITE) {
    return strata::emu::block_barrier(strata::emu::Barrier::any, predicate, site);
}
static inline int __syncthreads_and(int predicate, SITE) {
    return strata::emu::block_barrier(strata::emu::Barrier::all, predicate, site);
}
static inline void __syncwarp(u32 mask = FULL, SITE) {
    using namespace strata::emu;
    warp_collective(Collective::sync, mask, nullptr, 0, nullptr, 0, Shuffle::index, site);
}
template <class T>
static inline T __shfl_sync(u32 mask, T value, int lane, SITE) {
    return strata::emu::shuffle(strata::emu::Shuffle::index, mask, value, lane, site);
}
template <class T>
static inline T __shfl_xor_sync(u32 mask, T value, int bits, SITE) {
    return strata::emu::shuffle(strata::emu::Shuffle::bits, mask, value, bits, site);
}
template <class T>
static inline T __shfl_up_sync(u32 mask, T value, int distance, SITE) {
    return strata::emu::shuffle(strata::emu::Shuffle::up, mask, value, distance, site);
}
template <class T>
static inline T __shfl_down_sync(u32 mask, T value, int distance, SITE) {
    return strata::emu::shuffle(strata::emu::Shuffle::down, mask, value, distance, site);
}
UNCHECKED static inline u32 __ballot_sync(u32 mask, int predicate, SITE) {
    using namespace strata::emu;
    u32 votes;
    warp_collective(Collective::ballot, mask, &predicate, 4, &votes, 4, Shuffle::index, site);
    return votes;
}

// Atomics.
template <class T>
static inline T atomicAdd(T* target, T value) {
    return strata::emu::atomic_change(target,
                                      [value](T old) UNCHECKED { return static_cast<T>(old + value); });
}
template <class T>
static inline T atomicMax(T* target, T value) {
    return strata::emu::atomic_change(target, [value](T old) UNCHECKED { return old > value ? old : value; });
}

// The old value; counts up to `last` and then begins anew.
static inline u32 atomicInc(u32* target, u32 last) {
    return strata::emu::atomic_change(target,
                                      [last](u32 old) UNCHECKED { return old >= last ? 0u : old + 1; });
}
static inline void __threadfence() { strata::emu::thread_fence(); }

// Arithmetic.
static inline int __popc(u32 value) { return __builtin_popcount(value); }
static inline int __ffs(int value) { return __builtin_ffs(value); }
static inline float rsqrtf(float value) { return 1.0f / sqrtf(value); }
static inline float exp2_approx(float value) { return exp2f(value); }
static inline float reciprocal_approx(float value) { return 1.0f / value; }
static inline int __float2int_rn(float value) { return static_cast<int>(std::nearbyint(value)); }
static inline u32 __byte_perm(u32 low, u32 high, u32 selector) {
    const u64 bytes = static_cast<u64>(high) << 32 | low;
    u32 result = 0;
    for (int i = 0; i < 4; ++i)
        result |= static_cast<u32>(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return result;
}
static inline int __dp4a(int a, int b, int sum) {
    for (int i = 0; i < 4; ++i) sum += static_cast<i8>(a >> 8 * i) * static_cast<i8>(b >> 8 * i);
    return sum;
}
static inline u32 pack_bf16(float low, float high) {
    return to_bf16(low).bits | static_cast<u32>(to_bf16(high).bits) << 16;
}
static inline u32 pack_f16(float low, float high) {
    return to_f16(low).bits | static_cast<u32>(to_f16(high).bits) << 16;
}
static inline f16 half_of_f16x2(u32 pair, int half) { return {static_cast<u16>(pair >> 16 * half)}; }
static inline bf16 half_of_bf16x2(u32 pair, int half) { return {static_cast<u16>(pair >> 16 * half)}; }
static inline u32 sub_f16x2(u32 a, u32 b) {
    return pack_f16(to_float(half_of_f16x2(a, 0)) - to_float(half_of_f16x2(b, 0)),
                    to_float(half_of_f16x2(a, 1)) - to_float(half_of_f16x2(b, 1)));
}
static inline u32 fma_bf16x2(u32 a, u32 b, u32 c) {
    float sums[2];
    for (int i = 0; i < 2; ++i)
        sums[i] = fmaf(to_float(half_of_bf16x2(a, i)), to_float(half_of_bf16x2(b, i)),
                       to_float(half_of_bf16x2(c, i)));
    return pack_bf16(sums[0], sums[1]);
}

// Loads that bypass L1 (data used once).
template <class T>
static inline T load_once(const T* address) {
    return *address;
}

// Asynchronous copies.
static inline void copy_async16(void* shared, const void* global, bool valid, SITE) {
    strata::emu::async_copy16(shared, global, valid, site);
}
static inline void copy_async_commit() { strata::emu::async_commit(); }
template <int GroupsLeft>
static inline void copy_async_wait() {
    strata::emu::async_wait(GroupsLeft);
}

// Matrix instructions (PTX ISA, "Matrix Fragments for mma.m16n8k16" and k32).
static inline void mma_bf16(float (&sum)[4], const u32 (&a)[4], const u32 (&b)[2], SITE) {
    strata::emu::multiply(strata::emu::Collective::mma_bf16, sum, a, b, site);
}
static inline void mma_f16(float (&sum)[4], const u32 (&a)[4], const u32 (&b)[2], SITE) {
    strata::emu::multiply(strata::emu::Collective::mma_f16, sum, a, b, site);
}
static inline void mma_s8(int (&sum)[4], const u32 (&a)[4], const u32 (&b)[2], SITE) {
    strata::emu::multiply(strata::emu::Collective::mma_s8, sum, a, b, site);
}
UNCHECKED static inline void ldmatrix4(u32 (&rows)[4], const void* row, SITE) {
    using namespace strata::emu;
    require_aligned16(row, "misaligned row of ldmatrix", site);
    explicit_access(row, 16, Access::read);
    warp_collective(Collective::ldmatrix, FULL, &row, 8, rows, 16, Shuffle::index, site);
}
UNCHECKED static inline u32 transpose8x8(u32 rows, SITE) {
    using namespace strata::emu;
    u32 columns;
    warp_collective(Collective::movmatrix, FULL, &rows, 4, &columns, 4, Shuffle::index, site);
    return columns;
}
