// What every op works with: threads, the kernels of one instruction set, scratch memory.
#pragma once

#include <mutex>
#include <vector>

#include "cpu/arena.h"
#include "cpu/kernels/kernels.h"
#include "cpu/op_clock.h"
#include "cpu/teams.h"
#include "cpu/thread_pool.h"

namespace strata::cpu {

struct Cpu {
    // nodes: see Teams.
    Cpu(const std::vector<int>& cpus, bool bind, int64_t spin_ns, const Kernels& kernels,
        const std::vector<int>& nodes = {})
        : kernels(kernels), teams(nodes, static_cast<int>(cpus.size())), pool(cpus, bind, spin_ns) {}

    const Kernels& kernels;
    // Whether w8 matrices meet activations with one scale per token (W8A8), not one per 64 columns.
    bool token_scales = false;
    const Teams teams;
    ThreadPool pool;
    Arena arena;
    OpClock clock;
    std::mutex busy;
};

// One call from outside at a time owns pool, arena and clock, has its thread on worker 0's CPU, and begins
// with `const OpGuard guard(cpu);`. Ops do not guard themselves, for they are made of each other: what an op
// takes of the arena stays taken until the call ends.
class OpGuard {
  public:
    explicit OpGuard(Cpu& cpu)
        : lock_(cpu.busy), clock_(cpu.clock), begin_(OpClock::Clock::now()), binding_(cpu.pool) {
        cpu.arena.reset();
    }
    ~OpGuard() { clock_.native += OpClock::since(begin_); }

  private:
    std::lock_guard<std::mutex> lock_;
    OpClock& clock_;
    const OpClock::Clock::time_point begin_;
    const CallerBinding binding_;
};

// The part [begin, end) of n items that worker takes when they are split evenly.
struct Range {
    int64_t begin, end;
};
inline Range share(int64_t n, int worker, int workers) {
    return {n * worker / workers, n * (worker + 1) / workers};
}

}  // namespace strata::cpu
