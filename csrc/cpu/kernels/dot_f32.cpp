// One row block times f32 activations: a unit is decoded to f32 in L1 and multiplied there. Every format; the
// only way for bf16 and f16 weights. Order of additions, for any number of tokens and instruction set: four
// chains of 16 columns per unit, acc += (c0 + c1) + (c2 + c3).
#include "cpu/kernels/tables.h"
#include "cpu/kernels/values.h"

namespace strata::cpu::STRATA_ISA {
namespace {

constexpr int kChains = 4;
constexpr int kChainCols = kUnitCols / kChains;

// T tokens of one unit. x: f32 [tokens][64]. Once for all formats: inlined it took a minute to compile.
template <int T>
__attribute__((noinline)) static void few_tokens(const float* weights, const float* x, float* out) {
    Floats chain[kChains][T];
#pragma GCC unroll 4
    for (int c = 0; c < kChains; c++) {
        for (int t = 0; t < T; t++) chain[c][t] = set_floats(0.0f);
#pragma GCC unroll 16
        for (int col = c * kChainCols; col < (c + 1) * kChainCols; col++) {
            const Floats w = load_floats(weights + col * kRowBlock);
#pragma GCC unroll 8
            for (int t = 0; t < T; t++) chain[c][t] = fma(w, set_floats(x[t * kUnitCols + col]), chain[c][t]);
        }
    }
    for (int t = 0; t < T; t++) {
        const Floats sum = add(add(chain[0][t], chain[1][t]), add(chain[2][t], chain[3][t]));
        store_floats(out + t * kRowBlock, add(load_floats(out + t * kRowBlock), sum));
    }
}

template <int kCode>
static void block_dot(const BlockJob& job, const uint8_t* block, float* out) {
    alignas(64) float weights[kUnitCols * kRowBlock];
    for (int t = 0; t < job.tokens; t++) store_floats(out + t * kRowBlock, set_floats(0.0f));
    const size_t passed = (job.matrix->block_bytes + job.matrix->units - 1) / job.matrix->units;
    for (int unit = 0; unit < job.matrix->units; unit++) {
        if (job.ahead != nullptr) job.ahead->pass(passed);
        decode_unit<kCode>(*job.matrix, block, unit, weights);
        const float* x =
            static_cast<const float*>(job.x) + static_cast<size_t>(unit) * job.stride * kUnitCols;
        int t = 0;
        for (; t + kF32Tile <= job.tokens; t += kF32Tile)
            few_tokens<kF32Tile>(weights, x + t * kUnitCols, out + t * kRowBlock);
        for (; t < job.tokens; t++) few_tokens<1>(weights, x + t * kUnitCols, out + t * kRowBlock);
    }
}

template <int kCode>
static void dot(const BlockJob& job) {
    for (int b = 0; b < job.blocks; b++)
        block_dot<kCode>(job, job.block + b * job.matrix->block_bytes, job.out + b * job.tokens * kRowBlock);
}

template <int kCode>
static void decode_row(const Matrix& matrix, int row, float* out) {
    alignas(64) float weights[kUnitCols * kRowBlock];
    const uint8_t* block = matrix.block(row / kRowBlock);
    for (int unit = 0; unit * kUnitCols < matrix.cols; unit++) {
        decode_unit<kCode>(matrix, block, unit, weights);
        const int left = matrix.cols - unit * kUnitCols;
        for (int col = 0; col < (left < kUnitCols ? left : kUnitCols); col++)
            out[unit * kUnitCols + col] = weights[col * kRowBlock + row % kRowBlock];
    }
}

}  // namespace

const BlockFn kDotF32[kFormatCount] = {dot<0>, dot<1>, dot<2>, dot<3>, dot<4>, dot<5>,
                                       dot<6>, dot<7>, dot<8>, dot<9>, dot<10>};
const DecodeRowFn kDecodeRow[kFormatCount] = {decode_row<0>, decode_row<1>, decode_row<2>, decode_row<3>,
                                              decode_row<4>, decode_row<5>, decode_row<6>, decode_row<7>,
                                              decode_row<8>, decode_row<9>, decode_row<10>};

}  // namespace strata::cpu::STRATA_ISA
