// Prefetching in the order of the work: while one block is computed, every line of a block that is needed
// about kPrefetchDistance bytes later is asked for, evenly spread over the units.
#pragma once

#include "cpu/kernels/kernels.h"
#include "cpu/kernels/simd.h"

namespace strata::cpu::STRATA_ISA {
namespace {

class Prefetcher {
  public:
    STRATA_ALWAYS_INLINE Prefetcher(Ahead ahead, int units)
        : at_(ahead.at),
          end_(ahead.at + ahead.bytes),
          step_((ahead.bytes / units + kLine - 1) / kLine * kLine) {}

    // Asks for the lines that are due with this unit.
    STRATA_ALWAYS_INLINE void advance() {
        const uint8_t* stop = at_ + step_ < end_ ? at_ + step_ : end_;
        for (; at_ < stop; at_ += kLine) _mm_prefetch(reinterpret_cast<const char*>(at_), _MM_HINT_T1);
    }

  private:
    static constexpr size_t kLine = 64;
    const uint8_t* at_;
    const uint8_t* end_;
    size_t step_;
};

}  // namespace
}  // namespace strata::cpu::STRATA_ISA
