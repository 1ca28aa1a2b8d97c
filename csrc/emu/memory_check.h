// What the checked build knows about every byte of memory that kernels may touch.
//
// Time is counted in epochs: a new one begins with each launch, each block and each barrier. Two accesses to
// a byte, one of them a write, are a race unless a barrier lies between them, or both are by one thread, or
// both by one warp with a __syncwarp between them, or both are atomic. Accesses of different blocks in one
// launch are ordered in one way only: what a block wrote before a barrier, a thread publishes by
// __threadfence and then an atomic; a thread of a later block that changes the same word by an atomic, then
// calls
// __threadfence, makes it readable for its block behind the next barrier.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "emu/machine.h"

namespace strata::emu {

struct Cell {
    u32 write_epoch = 0, read_epoch = 0;
    u16 writer = 0, reader = 0, writer_warp_epoch = 0, reader_warp_epoch = 0;
    bool atomic_write = false, atomic_read = false;
    bool many_lanes = false;    // several lanes of the reader's warp read since its last __syncwarp
    bool many_warps = false;    // several warps read in this epoch
    bool other_blocks = false;  // an earlier block of this launch read
    bool pending = false;       // cp.async is on its way
};

struct Buffer {
    uintptr_t begin, end;
    bool read_only;
    std::string name;
    std::vector<Cell> cells;  // empty for read-only buffers
};

// Epochs [begin, end) of one block.
struct Span {
    u32 begin, end;
};

// What the running block publishes, and what others have published, by the word of the atomic. Spans go from
// `found` (by an atomic) over `fenced` to `visible` (behind a barrier).
struct Published {
    std::map<uintptr_t, std::vector<Span>> by_word;
    std::vector<Span> found, fenced, visible;
    unsigned fencing_thread = 0, finding_thread = 0;
    u32 fence_epoch = 0;  // 0: the block has called no fence
};

struct Memory {
    bool checked = false;
    std::vector<Buffer> buffers;  // global memory, by address
    u8* shared = nullptr;         // kMaxShared bytes with kGuard bytes before and after
    size_t shared_bytes = 0;
    std::vector<Cell> shared_cells;
    u32 epoch = 1, block_begin = 1, launch_begin = 1;
    Published published;

    Memory();
};

constexpr size_t kGuard = 4096;

Memory& memory();
void begin_launch(size_t shared_bytes);
// Fills shared memory with 0xff: NaN in every float format.
void begin_block();
// All threads of the block have met.
void next_epoch();
void fence();
// An access by the running thread at `pc` in kernel code.
void check_access(const void* address, size_t bytes, Access kind, const void* pc);

}  // namespace strata::emu
