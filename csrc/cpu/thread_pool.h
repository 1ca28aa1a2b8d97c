// A fixed set of threads that runs one function at a time, split statically.
//
// The calling thread is worker 0; workers 1.. have their own threads, each bound to its CPU. A waiting
// thread spins for a short while (ops of one token follow each other within microseconds), then lets others
// run on its CPU, and then parks on a futex, so that an idle pool costs nothing.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace strata::cpu {

// A 32-bit word that threads wait on: spin first, then sleep in the kernel.
class WaitWord {
  public:
    uint32_t load() const { return word_.load(std::memory_order_acquire); }
    // Publishes everything written before it and wakes all sleepers.
    void advance();
    // Returns once the word differs from `seen`.
    void wait(uint32_t seen, int64_t spin_ns);

  private:
    std::atomic<uint32_t> word_{0};
    std::atomic<uint32_t> sleepers_{0};
};

// When a worker was done with its part, in nanoseconds of std::chrono::steady_clock.
struct alignas(64) Stamp {
    int64_t end = 0;
};

class ThreadPool {
  public:
    // One worker per entry of `cpus`, which must not be empty; duplicates are allowed (more workers than
    // CPUs). With `bind` false, or when the kernel refuses a CPU, a worker runs unbound.
    ThreadPool(const std::vector<int>& cpus, bool bind, int64_t spin_ns);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int size() const { return static_cast<int>(cpus_.size()); }
    // How many of the workers 1.. the kernel accepted on their CPU.
    int bound() const { return bound_; }
    bool binds() const { return bind_; }
    int caller_cpu() const { return cpus_[0]; }

    // Runs fn(worker) once per worker and returns when all are done. One run at a time: the owner
    // serialises callers. fn must not throw and must not call run.
    template <class Fn>
    void run(const Fn& fn) {
        run_erased([](const void* ctx, int worker) { (*static_cast<const Fn*>(ctx))(worker); }, &fn);
    }

    // From the next run on every worker notes its end in stamps[worker]; null: no more. Between two runs
    // only.
    void stamp(Stamp* stamps) { stamps_ = stamps; }

    // Inside run: returns when every worker has come here; what was written before is visible after.
    void barrier();

  private:
    using Erased = void (*)(const void*, int);
    void run_erased(Erased fn, const void* ctx);
    void work(int worker);
    void stop();

    const std::vector<int> cpus_;
    const int64_t spin_ns_;
    const uint32_t born_;  // fork generation of the process that owns the threads
    const bool bind_;
    int bound_ = 0;
    // In one cache line: what tells a worker to begin, and with what. In two, a run of two threads took 600
    // ns instead of 400 (two cores of an Intel Xeon of the fifth generation).
    alignas(64) WaitWord start_;
    Erased fn_ = nullptr;
    const void* ctx_ = nullptr;
    Stamp* stamps_ = nullptr;
    bool stop_ = false;
    alignas(64) WaitWord done_;
    std::atomic<int> running_{0};
    alignas(64) WaitWord barrier_;
    std::atomic<int> arrived_{0};
    std::vector<std::thread> threads_;
};

// Keeps the calling thread on worker 0's CPU while it lives, where the pool binds, and gives it back its CPUs
// afterwards: what a program starts later, threads and processes, inherits them. Worker 0 as a thread of its
// own would cost two wake-ups per call instead, of 50 us each in a virtual machine.
class CallerBinding {
  public:
    explicit CallerBinding(const ThreadPool& pool);
    ~CallerBinding();
    CallerBinding(const CallerBinding&) = delete;
    CallerBinding& operator=(const CallerBinding&) = delete;

  private:
    cpu_set_t before_;
    bool bound_ = false;
};

}  // namespace strata::cpu
