#include "cpu/thread_pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <climits>
#include <stdexcept>
#include <string>
#include <system_error>

namespace strata::cpu {
namespace {

std::atomic<uint32_t> fork_generation{0};

uint32_t current_generation() {
    static const int registered =
        pthread_atfork(nullptr, nullptr, [] { fork_generation.fetch_add(1, std::memory_order_relaxed); });
    (void)registered;
    return fork_generation.load(std::memory_order_relaxed);
}

int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

bool bind(pthread_t thread, int cpu) {
    if (cpu < 0 || cpu >= CPU_SETSIZE) return false;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    return pthread_setaffinity_np(thread, sizeof set, &set) == 0;
}

void futex(std::atomic<uint32_t>* word, int op, uint32_t value) {
    static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "the kernel looks at the word itself");
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), op, value, nullptr, nullptr, 0);
}

}  // namespace

// Both sides are sequentially consistent: either the waker sees the sleeper's count, or the sleeper's
// futex call sees the new word and returns at once.
void WaitWord::advance() {
    word_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) != 0) futex(&word_, FUTEX_WAKE_PRIVATE, INT_MAX);
}

void WaitWord::wait(uint32_t seen, int64_t spin_ns) {
    constexpr int kSpinsPerClock = 64;
    // Longer than the gaps inside of an op; after it, the thread waited for may well want this very CPU.
    constexpr int64_t kPoliteNs = 20000;
    if (load() != seen) return;
    const int64_t start = now_ns();
    for (int64_t waited = 0; waited < spin_ns; waited = now_ns() - start) {
        for (int i = 0; i < kSpinsPerClock; i++) {
            if (load() != seen) return;
            __builtin_ia32_pause();
        }
        if (waited > kPoliteNs) sched_yield();
    }
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (load() == seen) futex(&word_, FUTEX_WAIT_PRIVATE, seen);
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
}

ThreadPool::ThreadPool(const std::vector<int>& cpus, bool bind_threads, int64_t spin_ns)
    : cpus_(cpus), spin_ns_(spin_ns), born_(current_generation()), bind_(bind_threads) {
    if (cpus_.empty()) throw std::invalid_argument("a thread pool needs at least one CPU");
    try {
        for (int worker = 1; worker < size(); worker++) {
            threads_.emplace_back([this, worker] { work(worker); });
            if (bind_threads && bind(threads_.back().native_handle(), cpus_[worker])) bound_++;
        }
    } catch (const std::system_error&) {
        const size_t started = threads_.size();
        stop();
        throw std::runtime_error("the system allows " + std::to_string(started + 1) + " of the " +
                                 std::to_string(size()) + " threads asked for");
    }
}

ThreadPool::~ThreadPool() {
    if (born_ != current_generation()) {  // a forked child has the objects but not the threads
        for (std::thread& thread : threads_) thread.detach();
        return;
    }
    stop();
}

void ThreadPool::stop() {
    stop_ = true;
    start_.advance();
    for (std::thread& thread : threads_) thread.join();
}

CallerBinding::CallerBinding(const ThreadPool& pool) {
    if (!pool.binds()) return;
    if (pthread_getaffinity_np(pthread_self(), sizeof before_, &before_) != 0) return;
    bound_ = bind(pthread_self(), pool.caller_cpu());
}

CallerBinding::~CallerBinding() {
    if (bound_) pthread_setaffinity_np(pthread_self(), sizeof before_, &before_);
}

void ThreadPool::run_erased(Erased fn, const void* ctx) {
    if (born_ != current_generation()) throw std::runtime_error("a thread pool cannot be used after fork()");
    fn_ = fn;
    ctx_ = ctx;
    const uint32_t seen = done_.load();
    running_.store(size() - 1, std::memory_order_relaxed);
    if (size() > 1) start_.advance();
    fn(ctx, 0);
    if (stamps_ != nullptr) stamps_[0].end = now_ns();
    if (size() > 1) done_.wait(seen, spin_ns_);
}

void ThreadPool::work(int worker) {
    for (uint32_t seen = 0;; seen++) {
        start_.wait(seen, spin_ns_);
        if (stop_) return;
        fn_(ctx_, worker);
        if (stamps_ != nullptr) stamps_[worker].end = now_ns();
        if (running_.fetch_sub(1, std::memory_order_acq_rel) == 1) done_.advance();
    }
}

void ThreadPool::barrier() {
    const uint32_t seen = barrier_.load();
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size() - 1) {
        arrived_.store(0, std::memory_order_relaxed);
        barrier_.advance();
    } else {
        barrier_.wait(seen, spin_ns_);
    }
}

}  // namespace strata::cpu
