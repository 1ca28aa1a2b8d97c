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
    static constexpr size_t kLine = 64;

    const Stretch* stretch;  // the one that `at` lies in
    const Stretch* last;     // one past the last stretch
    const uint8_t* at;
    size_t owed;  // bytes passed over, not asked for yet: lines are whole

    // `bytes` were passed over, which hold `lines` whole lines at least. For one token of 4-bit weights a
    // loop would be a tenth of all instructions.
    template <int lines>
    STRATA_ALWAYS_INLINE void pass(size_t bytes) {
        if (stretch == last) return;
        owed += bytes;
        if (at + lines * kLine <= stretch->end) {
#pragma GCC unroll 64
            for (int i = 0; i < lines; i++) ask(at + i * kLine);
            at += lines * kLine;
            owed -= lines * kLine;
        }
        if (owed >= kLine) ask_owed();
    }

    STRATA_ALWAYS_INLINE void pass(size_t bytes) {
        if (stretch == last) return;
        owed += bytes;
        ask_owed();
    }

  private:
    // At most to the end of the stretch.
    STRATA_ALWAYS_INLINE void ask_owed() {
        const uint8_t* from = at;
        at = from + owed / kLine * kLine;
        const bool exhausted = at >= stretch->end;
        if (exhausted) at = stretch->end;
        owed -= at - from;
        for (; from < at; from += kLine) ask(from);
        if (exhausted && ++stretch != last) at = stretch->at;
    }

    STRATA_ALWAYS_INLINE static void ask(const uint8_t* line) {
        _mm_prefetch(reinterpret_cast<const char*>(line), _MM_HINT_T1);
    }
};

}  // namespace strata::cpu
