#include "cpu/weight_path.h"

#include <algorithm>

namespace strata::cpu {

void WeightPath::add(const Matrix& matrix, int64_t begin, int64_t end) {
    if (begin < end) *end_++ = {matrix.block(static_cast<int>(begin)), matrix.block(static_cast<int>(end))};
}

Ahead* WeightPath::start() {
    if (ahead_.hint == Hint::kNone || distance_ == 0 || first_ == end_) return nullptr;
    ahead_.last = end_;
    ahead_.at = first_->at;
    constexpr size_t kStep = 4096;  // a call of pass ends at the end of a stretch
    for (size_t left = distance_; left > 0; left -= std::min(left, kStep)) ahead_.pass(std::min(left, kStep));
    return &ahead_;
}

}  // namespace strata::cpu
