// Thread pool under a sanitizer: every run and barrier must order memory, parked or spinning.
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "cpu/cpu.h"

using namespace strata::cpu;

namespace {

const Kernels kNoKernels{};

void check(bool good, const char* what) {
    if (good) return;
    std::fprintf(stderr, "failed: %s\n", what);
    std::exit(1);
}

// Each worker writes its cell, passes a barrier and reads its neighbour's: plain memory, no atomics.
void neighbours(ThreadPool& pool, int rounds) {
    std::vector<int> cells(pool.size()), seen(pool.size());
    for (int round = 1; round <= rounds; round++) {
        pool.run([&](int worker) {
            cells[worker] = round;
            pool.barrier();
            seen[worker] = cells[(worker + 1) % pool.size()];
            pool.barrier();
            cells[worker] = 0;
        });
        for (const int value : seen) check(value == round, "a barrier orders writes");
        for (const int value : cells) check(value == 0, "run returns after the last worker");
    }
}

// Several callers share one Cpu: ops take turns, and the arena is theirs alone meanwhile.
void callers(Cpu& cpu, int rounds) {
    int total = 0;
    const auto call = [&] {
        for (int i = 0; i < rounds; i++) {
            const OpGuard guard(cpu);
            int* scratch = cpu.arena.take<int>(1000 + i);
            cpu.pool.run([&](int worker) { scratch[worker] = worker + 1; });
            for (int w = 0; w < cpu.pool.size(); w++) total += scratch[w];
        }
    };
    std::thread other(call);
    call();
    other.join();
    check(total == 2 * rounds * cpu.pool.size() * (cpu.pool.size() + 1) / 2, "every call ran once");
}

}  // namespace

int main() {
    constexpr int64_t kSpins[] = {0, 1000, 200000};
    for (const int64_t spin_ns : kSpins) {
        for (const int threads : {1, 2, 4}) {
            Cpu cpu(std::vector<int>(threads, 0), false, spin_ns, kNoKernels);
            neighbours(cpu.pool, 60);
            callers(cpu, 40);
        }
    }
    ThreadPool foreign({0, 100000}, true, 0);
    check(foreign.bound() == 0, "a CPU that does not exist is refused, not fatal");
    neighbours(foreign, 10);
    std::puts("ok");
}
