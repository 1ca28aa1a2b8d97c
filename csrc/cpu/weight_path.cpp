#include "cpu/weight_path.h"

namespace strata::cpu {

// Bytes between what is asked for and its use.
static constexpr size_t kDistance = 32 * 1024;

void WeightPath::add(const Matrix& matrix, int64_t begin, int64_t end) {
    if (begin < end) *end_++ = {matrix.block(static_cast<int>(begin)), matrix.block(static_cast<int>(end))};
}

Ahead* WeightPath::start() {
    if (first_ == end_) return nullptr;
    ahead_.last = end_;
    ahead_.at = first_->at;
    constexpr size_t kStep = 4096;  // a call of pass ends at the end of a stretch
    static_assert(kDistance % kStep == 0, "whole steps");
    for (size_t asked = 0; asked < kDistance; asked += kStep) ahead_.pass(kStep);
    return &ahead_;
}

}  // namespace strata::cpu
