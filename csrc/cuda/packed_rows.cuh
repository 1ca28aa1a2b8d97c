// The order of a token's bf16 numbers in memory that ldmatrix turns into operands of mma.m16n8k16.
//
// A unit (64 columns) of a row is 128 bytes: 8 chunks of 16 bytes, two for each of the four steps that
// weights.cuh takes through a unit. Word m of a chunk is what lane member m needs, columns 8m.. of the step
// (plus 32 in steps 2 and 3): pairs (0 2) and (1 3) in even steps, (4 6) and (5 7) in odd ones, each pair in
// a chunk of its own.
#pragma once

#include "weights.cuh"

constexpr int kUnitWords = 32, kRowUnitBytes = 128;

// Where in its unit the word lies that holds pair 0..3 (in the order above) of the 8 columns from `column`
// on.
DEVICE int packed_word(int column, int pair) { return (column / 32 * 4 + pair) * 4 + column % 32 / 8; }

DEVICE float pair_sum(u32 pair) { return __uint_as_float(pair << 16) + __uint_as_float(pair & 0xffff0000u); }

// A unit's totals in the first of the eight lanes that hold its columns, in order; `own`: the sum of a
// lane's.
DEVICE float4 unit_totals(float own) {
    own += __shfl_xor_sync(FULL, own, 1);
    own += __shfl_xor_sync(FULL, own, 2);
    const float other = __shfl_xor_sync(FULL, own, 4);
    return make_float4(own, other, own + other, 0.0f);
}
