// What kernel code asks of the emulator's runtime. The kernel side (kernel_side.h) is compiled with
// instrumentation, the runtime without; this header is all that they share.
#pragma once

#include <cstddef>

#include "emu/types.h"

namespace strata::emu {

struct Index3 {
    unsigned x, y, z;
};

// The built-in variables of one thread.
struct Builtins {
    Index3 thread_index, block_index, block_size, grid_size;
};

// A place in kernel code.
struct Site {
    const char* file;
    int line;
};

enum class Barrier { plain, any, all };
enum class Collective { sync, shuffle, ballot, mma_bf16, mma_f16, mma_s8, ldmatrix, movmatrix };
enum class Shuffle { index, bits, up, down };
enum class Access { read, write, atomic, async_issue, async_arrive };

// The running thread's variables.
extern const Builtins* builtins;

u8* shared_memory();
// All threads of the block; returns the combined predicate of `any` and `all`.
int block_barrier(Barrier kind, int predicate, Site site);
// All 32 lanes of a warp: each gives `in_bytes` (at most 48) and gets `out_bytes` (at most 16).
void warp_collective(Collective op, u32 mask, const void* in, size_t in_bytes, void* out, size_t out_bytes,
                     Shuffle mode, Site site);
// cp.async of 16 bytes, zeros when `valid` is false; nothing arrives before the wait.
void async_copy16(void* shared, const void* global, bool valid, Site site);
void async_commit();
void async_wait(size_t groups_left);
// Accesses that no compiler hook sees.
void explicit_access(const void* address, size_t bytes, Access kind);
// __threadfence: see memory_check.h for what it orders.
void thread_fence();
[[noreturn]] void trap(const char* what, Site site);
void register_kernel(const char* name, void (*call)(void**), int arguments);

}  // namespace strata::emu
