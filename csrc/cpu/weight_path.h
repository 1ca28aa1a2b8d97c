// The weights that one worker passes over, in that order, and how far it has asked for them.
#pragma once

#include "cpu/cpu.h"

namespace strata::cpu {

class WeightPath {
  public:
    // room: for as many stretches as will be added.
    explicit WeightPath(Stretch* room) : first_(room), ahead_{room, room, nullptr, 0} {}

    // Row blocks [begin, end) come next.
    void add(const Matrix& matrix, int64_t begin, int64_t end);

    // Asks for the first bytes; to be called after the last add. What a kernel wants as `ahead`.
    Ahead* start();

  private:
    Stretch* const first_;
    Ahead ahead_;
    Stretch* end_ = first_;
};

}  // namespace strata::cpu
