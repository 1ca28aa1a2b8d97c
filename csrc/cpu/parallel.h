// Loops over the thread pool for ops whose rows are independent.
#pragma once

#include <cstddef>

#include "cpu/thread_pool.h"

namespace strata::cpu {

// Below this much work (floats touched) waking the other threads costs more than it saves: a wake-up is
// 1-2 us while spinning, and one core passes over 16 Ki floats in about that time.
constexpr size_t kSerialWork = 16384;

// fn(begin, end) over [0, n) in even contiguous shares; `cost` is the work of one index.
template <class Fn>
void parallel_for(ThreadPool& pool, size_t n, size_t cost, const Fn& fn) {
    if (n * cost <= kSerialWork || n == 1 || pool.size() == 1) {
        if (n > 0) fn(size_t{0}, n);
        return;
    }
    const size_t workers = static_cast<size_t>(pool.size());
    pool.run([&](int worker) {
        const size_t w = static_cast<size_t>(worker);
        const size_t begin = n * w / workers, end = n * (w + 1) / workers;
        if (begin < end) fn(begin, end);
    });
}

}  // namespace strata::cpu
