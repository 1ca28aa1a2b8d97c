// State of the emulated multiprocessor: the threads of one block, its warps, its barrier, its memory.
//
// Threads are fibers of the calling thread. A fiber runs until it waits at a barrier or in a collective, so
// what one thread does between two such points is never interleaved with others: races are found by the
// checks in memory_check.h, not by luck.
#pragma once

#include <deque>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "emu/kernel_api.h"

namespace strata::emu {

constexpr unsigned kMaxThreads = 1024, kLanes = 32, kMaxWarps = kMaxThreads / kLanes;
constexpr size_t kMaxShared = 99 << 10;  // what a block may have on sm_86

enum class State : u8 { ready, at_barrier, in_collective, finished };
enum class Order { forward, reverse, random };

struct AsyncCopy {
    u8* shared;
    const u8* global;
    bool valid;
};

struct Thread : Builtins {
    void* stack_pointer = nullptr;
    u8* stack = nullptr;
    unsigned index = 0, warp = 0, lane = 0;
    State state = State::finished;
    Site waits_at{};
    alignas(16) u8 result[16]{};
    std::vector<AsyncCopy> open_copies;
    std::deque<std::vector<AsyncCopy>> copy_groups;
};

struct Warp {
    u32 arrived = 0;
    Collective op{};
    Shuffle mode{};
    Site site{};
    u8 in[kLanes][48]{};
    u16 epoch = 0;  // __syncwarp so far; orders memory inside the warp
};

struct BlockBarrier {
    unsigned arrived = 0;
    Barrier kind{};
    Site site{};
    int predicate = 0;
};

struct Kernel {
    void (*call)(void**);
    int arguments;
};

struct Machine {
    std::map<std::string, Kernel> kernels;
    std::vector<Thread> threads;
    Warp warps[kMaxWarps];
    BlockBarrier barrier;
    unsigned thread_count = 0, unfinished = 0;
    Thread* current = nullptr;
    void* scheduler_stack = nullptr;
    const Kernel* kernel = nullptr;
    void** arguments = nullptr;
    Order order = Order::forward;
    std::mt19937 random;
    std::string error;

    Machine() : threads(kMaxThreads) {}
};

Machine& machine();

// Records the first error and leaves the kernel; only called while a thread runs.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
// Back to the scheduler until the thread is ready again.
void wait_as(State state, Site site);
// Runs every block of the grid; false when machine().error was set.
bool launch(const std::string& name, Index3 grid, Index3 block, size_t shared_bytes, void** arguments,
            int argument_count);

// Collectives of the tensor cores (matrix_ops.cpp): the lanes' inputs to the lanes' results.
void multiply_matrices(const Warp& warp, Thread* lanes);
void load_matrices(const Warp& warp, Thread* lanes);
void transpose_matrix(const Warp& warp, Thread* lanes);

}  // namespace strata::emu
