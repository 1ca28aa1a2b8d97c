// Gated FFNs: the routed experts of one layer, or a dense FFN as a single expert.
#pragma once

#include "cpu/cpu.h"

namespace strata::cpu {

// One slice of an expert's intermediate dimension. gate_up rows: blocks of 8 gate and 8 up rows. Biases are
// f32 or null, gate_up's in the interleaved order; down's belongs to the first slice only.
struct FfnSlice {
    Matrix gate_up, down;
    const float* gate_up_bias;
    const float* down_bias;
};

// One expert with the tokens routed to it (ascending, at least one) and their weights.
struct ExpertWork {
    const FfnSlice* slices;
    const int32_t* tokens;
    const float* weights;
    int count;
};

// Where outputs go: kSummed to the rows of their tokens, kApart to rows of their own.
enum class OutputRows { kSummed, kApart };

// y[t] = sum over experts and their slices, in the order given, of weight * ffn(x[t]); zero for a token that
// no expert has. x, y: f32 [tokens][hidden]. All experts have the same formats, sizes and number of slices.
//
// Every element of y is summed by one thread in that order, so the result depends neither on the number of
// threads nor on the other tokens of the batch.
//
// Where the workers are of several nodes and slices can be dealt to them evenly, a node's workers compute the
// slices of their node: the first slices those of the first node, and so on. Their weights should lie in that
// node's memory. Of many tokens only gate_up: down is shared out by columns, for what its parts make would
// have to be kept for every token, and weights that many tokens use limit nothing.
//
// copies > 1: `slices` of an expert are [copies][slice_count], one copy for each node's workers to read; then
// all workers share out all slots. Biases are read from the first copy.
//
// kApart: y is f32 [sum over experts of slices * tokens][hidden] instead and has, expert after expert and
// slice after slice, one row per token.
void gated_ffn(Cpu& cpu, const float* x, int tokens, int hidden, const ExpertWork* experts, int expert_count,
               int slice_count, const Gating& gating, bool exact, float* y,
               OutputRows rows = OutputRows::kSummed, int copies = 1);

}  // namespace strata::cpu
