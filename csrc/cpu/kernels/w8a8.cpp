// W8A8: rows of int8 weights with one scale each times tokens of int8 codes with one scale each. Products are
// summed in 32 bits over all columns, however many, and scaled once:
//     y = (sum * activation_scale) * weight_scale
// Integer sums are exact, so neither their order nor the instruction set, nor the other tokens of a job show.
#include "cpu/kernels/sweep.h"
#include "cpu/kernels/tables.h"
#include "cpu/kernels/values.h"

namespace strata::cpu::STRATA_ISA {
namespace {

using Decode = Bytes<Values::kInt8, false>;
constexpr int kUnit = kUnitBytes[static_cast<int>(Values::kInt8)];

// The sum times both scales; `sum` may lie where the result goes.
STRATA_INLINE void finish(const Matrix& matrix, const uint8_t* block, Ints sum, const QuantUnit& x,
                          float* out) {
    const Floats scaled = mul(to_floats(sum), set_floats(x.scales[0]));
    store_floats(out, mul(scaled, load_scales<4>(block + matrix.scales_at, 0)));
}

// T tokens and one block, everything in registers. One or two tokens have several sums, so that no product
// waits for the one before it.
template <int T>
STRATA_INLINE void few_tokens(const BlockJob& job, const uint8_t* block, float* out) {
    constexpr int kChains = 4 / T, kParts = 2, kPartSteps = kSteps / kParts;
    constexpr int kPartLines = kUnit / kParts / int{Ahead::kLine};
    const Matrix& matrix = *job.matrix;
    const QuantUnit* x = static_cast<const QuantUnit*>(job.x);
    Ints sum[kChains][T];
    for (int t = 0; t < T; t++)
        for (int c = 0; c < kChains; c++) sum[c][t] = set_ints(c == 0 ? x[t].totals[0].start : 0);
    const int parts = matrix.units * kParts;
    const size_t passed = (matrix.block_bytes + parts - 1) / parts;
    for (int unit = 0; unit < matrix.units; unit++, x += job.stride) {
        const uint8_t* values = block + static_cast<size_t>(unit) * kUnit;
#pragma GCC unroll 2
        for (int part = 0; part < kParts; part++) {
            if (job.ahead != nullptr) job.ahead->template pass<kPartLines>(passed);
#pragma GCC unroll 8
            for (int step = part * kPartSteps; step < (part + 1) * kPartSteps; step++) {
                const Ints w = Decode::step<WholeBlock>(values, step);
#pragma GCC unroll 4
                for (int t = 0; t < T; t++) {
                    Ints& chain = sum[step % kChains][t];
                    chain = mac_signed(chain, w, broadcast4(x[t].codes + step * kStepCols));
                }
            }
        }
    }
    x = static_cast<const QuantUnit*>(job.x);
    for (int t = 0; t < T; t++) {
        for (int c = 1; c < kChains; c++) sum[0][t] = add_ints(sum[0][t], sum[c][t]);
        finish(matrix, block, sum[0][t], x[t], out + t * kRowBlock);
    }
}

template <int T>
static void few(const BlockJob& job) {
    for (int b = 0; b < job.blocks; b++)
        few_tokens<T>(job, job.block + b * job.matrix->block_bytes, job.out + b * T * kRowBlock);
}

// One unit of one row block as products want it.
struct Decoded {
    alignas(64) uint8_t bytes[kSteps * kStepBytes];

    STRATA_ALWAYS_INLINE Ints step(int index) const { return load_ints(bytes + index * kStepBytes); }
};

STRATA_INLINE void decode(const uint8_t* values, Decoded* out) {
#pragma GCC unroll 16
    for (int step = 0; step < kSteps; step++)
        store_ints(out->bytes + step * kStepBytes, Decode::step<WholeBlock>(values, step));
}

// B blocks times T tokens of one unit. sums: i32 [B][tokens][16], of which T tokens from the first are added
// to.
template <int B, int T>
__attribute__((noinline)) static void tile(const Decoded* units, const QuantUnit* x, float* sums,
                                           int tokens) {
    Ints sum[B][T];
    for (int b = 0; b < B; b++)
        for (int t = 0; t < T; t++) sum[b][t] = load_ints(sums + (b * tokens + t) * kRowBlock);
#pragma GCC unroll 16
    for (int step = 0; step < kSteps; step++) {
        Ints w[B];
        for (int b = 0; b < B; b++) w[b] = units[b].step(step);
#pragma GCC unroll 16
        for (int t = 0; t < T; t++) {
            const Ints four = broadcast4(x[t].codes + step * kStepCols);
            for (int b = 0; b < B; b++) sum[b][t] = mac_signed(sum[b][t], w[b], four);
        }
    }
    for (int b = 0; b < B; b++)
        for (int t = 0; t < T; t++) store_ints(sums + (b * tokens + t) * kRowBlock, sum[b][t]);
}

template <int B>
struct Tiles {
    using Unit = Decoded;
    template <int T>
    STRATA_INLINE TileFn<Unit> of() {
        return tile<B, T>;
    }
};

template <int B>
static void blocks(const BlockJob& job, int first) {
    const Matrix& matrix = *job.matrix;
    const uint8_t* block = job.block + first * matrix.block_bytes;
    const QuantUnit* x = static_cast<const QuantUnit*>(job.x);
    float* sums = job.out + static_cast<size_t>(first) * job.tokens * kRowBlock;
    for (int b = 0; b < B; b++)
        for (int t = 0; t < job.tokens; t++)
            store_ints(sums + (b * job.tokens + t) * kRowBlock, set_ints(x[t].totals[0].start));
    Decoded units[B];
    const Sweep<Tiles<B>> sweep(job.tokens);
    const size_t passed = (B * matrix.block_bytes + matrix.units - 1) / matrix.units;
    for (int unit = 0; unit < matrix.units; unit++, x += job.stride) {
        if (job.ahead != nullptr) job.ahead->template pass<B * kUnit / int{Ahead::kLine}>(passed);
        for (int b = 0; b < B; b++)
            decode(block + b * matrix.block_bytes + static_cast<size_t>(unit) * kUnit, &units[b]);
        sweep.run(units, x, sums);
    }
    x = static_cast<const QuantUnit*>(job.x);
    for (int b = 0; b < B; b++)
        for (int t = 0; t < job.tokens; t++) {
            float* at = sums + (b * job.tokens + t) * kRowBlock;
            finish(matrix, block + b * matrix.block_bytes, load_ints(at), x[t], at);
        }
}

static void tiles(const BlockJob& job) {
    int first = 0;
    for (; first + kTileBlocks <= job.blocks; first += kTileBlocks) blocks<kTileBlocks>(job, first);
    for (; first < job.blocks; first++) blocks<1>(job, first);
}

}  // namespace

void dot_w8a8(const BlockJob& job) {
    switch (job.tokens) {
        case 1:
            return few<1>(job);
        case 2:
            return few<2>(job);
        case 3:
            return few<3>(job);
        case 4:
            return few<4>(job);
        default:
            return tiles(job);
    }
}

}  // namespace strata::cpu::STRATA_ISA
