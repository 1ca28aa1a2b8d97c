// Prefetching in the order of the work: while weights are computed, as many bytes are asked for some way
// ahead of them, into the second cache. Every line: the hardware's own prefetchers stop at the end of a page.
// Hint and distance are fixed: docs/performance.md has what others gave.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "cpu/formats.h"

namespace strata::cpu {

// Bytes of weights that lie together.
struct Stretch {
    const uint8_t* at;
    const uint8_t* end;
};

// How far one worker has asked for the weights of its work. A kernel that passes over n bytes asks for the
// next n bytes. Compiled into every instruction set, hence no symbols of its own.
struct Ahead {
    const Stretch* stretch;  // the one that `at` lies in
    const Stretch* last;     // one past the last stretch
    const uint8_t* at;
    size_t owed;  // bytes passed over, not asked for yet: lines are whole

    STRATA_ALWAYS_INLINE void pass(size_t bytes) {
        if (stretch == last) return;
        owed += bytes;
        const uint8_t* from = at;
        at = from + owed / kLine * kLine;
        const bool exhausted = at >= stretch->end;
        if (exhausted) at = stretch->end;
        owed -= at - from;
        ask(from, at);
        if (exhausted && ++stretch != last) at = stretch->at;
    }

  private:
    static constexpr size_t kLine = 64;

    STRATA_ALWAYS_INLINE static void ask(const uint8_t* from, const uint8_t* to) {
        for (; from < to; from += kLine) _mm_prefetch(reinterpret_cast<const char*>(from), _MM_HINT_T1);
    }
};

}  // namespace strata::cpu
