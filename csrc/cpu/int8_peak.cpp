#include "cpu/int8_peak.h"

#include <algorithm>
#include <chrono>

namespace strata::cpu {
namespace {

double seconds_now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

double int8_peak(Cpu& cpu, double seconds) {
    // About 5 ms: long beside waking the threads, short enough for a round without interruption.
    constexpr int64_t kRounds = 200000;
    const OpGuard guard(cpu);
    const int workers = cpu.pool.size();
    int32_t* sums = cpu.arena.take<int32_t>(static_cast<size_t>(workers) * kRowBlock);
    double best = 0;
    const double stop = seconds_now() + seconds;
    do {
        const double start = seconds_now();
        int64_t products = 0;  // of one thread; all do the same
        cpu.pool.run([&](int worker) {
            const int64_t done = cpu.kernels.int8_peak(kRounds, sums + worker * kRowBlock);
            if (worker == 0) products = done;
        });
        best = std::max(best, static_cast<double>(products) * workers / (seconds_now() - start));
    } while (seconds_now() < stop);
    return best;
}

}  // namespace strata::cpu
