// w8 weights times int8 activations: sums of products are exact i32, both scales come at the end.
//
// A unit's words (weights.cuh, Int8<0>) are operands of mma.m16n8k32 as they lie: word m of a chunk holds
// four columns of a row. Step t = 0, 1 takes columns 32 t + 8 m.. of lane member m, so that a lane's part of
// a token's row is 8 bytes in their natural order.
#pragma once

#include "weights.cuh"

using W8 = Int8<0>;

DEVICE void multiply_w8(int (&sums)[4], const W8::Unit& unit, int step, uint2 x) {
    const uint2 first = unit.words[2 * step], second = unit.words[2 * step + 1];
    const u32 a[4] = {first.x, first.y, second.x, second.y}, b[2] = {x.x, x.y};
    mma_s8(sums, a, b);
}
