// The part of one request that a forward pass computes: strata.core.Sequence as C++ sees it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace strata::cpu {

struct SequenceView {
    size_t first_row, count, start;  // rows of the batch; position of the first of them
    const int32_t* pages;            // page ids, covering at least start + count tokens
};

}  // namespace strata::cpu
