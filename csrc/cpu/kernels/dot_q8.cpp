// Row blocks times int8 activations: integer sums per span of 32 or 64 columns, then
//     acc = fma(sum, weight_scale * activation_scale, acc)
// in the order of the columns. One token, few and many follow the same order, on every instruction set, so a
// token's result does not depend on its neighbours.
#include <type_traits>
#include <utility>

#include "cpu/kernels/spans.h"
#include "cpu/kernels/tables.h"

namespace strata::cpu::STRATA_ISA {
namespace {

// The values of one packed unit, or of some rows of it, decoded step by step.
template <class Decode, class Rows>
struct Packed {
    const uint8_t* at;
    STRATA_ALWAYS_INLINE typename Rows::Ints step(int index) const {
        return Decode::template step<Rows>(at, index);
    }
};

// The same pointer. What is read through it is not known to have been read before: GCC would keep a unit's
// codes for the other half of the rows, in memory and not yet in all lanes.
STRATA_INLINE const QuantUnit* forget(const QuantUnit* x) {
    __asm__("" : "+r"(x));
    return x;
}

// As many rows as `Rows` has of B blocks, from row `row` on, times T tokens and one unit: added to acc. x:
// the tokens' activations of this unit. passed: bytes to ask for per span.
template <int kCode, class Rows, int B, int T>
STRATA_INLINE void add_unit(const Matrix& matrix, const uint8_t* block, const QuantUnit* x, int unit, int row,
                            Ahead* ahead, size_t passed, typename Rows::Floats (&acc)[B][T]) {
    using F = Traits<kCode>;
    using Kind = typename F::Kind;
    Packed<typename F::Decode, Rows> source[B];
    for (int b = 0; b < B; b++)
        source[b].at =
            block + b * matrix.block_bytes + static_cast<size_t>(unit) * F::kUnit + row * kStepCols;
#pragma GCC unroll 2
    for (int span = 0; span < Kind::kSpans; span++) {
        // Not a unit's at once: they would keep the loads below waiting.
        if (ahead != nullptr) ahead->template pass<B * F::kSpanLines * Rows::kLanes / kRowBlock>(passed);
        typename Rows::Ints sum[B][T];
        sum_span<Kind, Rows>(source, x, span, sum);
        for (int b = 0; b < B; b++) {
            const uint8_t* owner = block + b * matrix.block_bytes;
            const auto scale = span_scales<kCode, Rows>(matrix, owner, unit, span, row);
            const auto minimum = span_minimums<kCode, Rows>(matrix, owner, unit, span, row);
#pragma GCC unroll 16
            for (int t = 0; t < T; t++)
                acc[b][t] = add_span<Kind, Rows>(acc[b][t], sum[b][t], scale, minimum, x[t], span);
        }
    }
}

// T tokens and B blocks from the packed values to the result: no decoded bytes rest anywhere.
template <int kCode, int B, int T>
STRATA_INLINE void few_tokens(const BlockJob& job, const uint8_t* block, float* out) {
    using Rows = std::conditional_t<(T < kFewHalved), WholeBlock, FewRows>;
    constexpr int kParts = kRowBlock / Rows::kLanes;
    const Matrix matrix = *job.matrix;
    const int passes = matrix.units * Traits<kCode>::Kind::kSpans * kParts;
    const size_t passed = (B * matrix.block_bytes + passes - 1) / passes;
    typename Rows::Floats acc[kParts][B][T];
    for (auto& part : acc)
        for (auto& tokens : part)
            for (auto& rows : tokens) rows = Rows::set_floats(0.0f);
    const QuantUnit* x = static_cast<const QuantUnit*>(job.x);
    for (int unit = 0; unit < matrix.units; unit++, x += job.stride)
#pragma GCC unroll 1
        for (int part = 0; part < kParts; part++)
            add_unit<kCode, Rows, B, T>(matrix, block, forget(x), unit, part * Rows::kLanes, job.ahead,
                                        passed, acc[part]);
    for (int i = 0; i < B * T; i++) {
        for (int part = 0; part < kParts; part++)
            Rows::store_floats(out + i * kRowBlock + part * Rows::kLanes, acc[part][i / T][i % T]);
        finish<kCode>(matrix, block + i / T * matrix.block_bytes, out + i * kRowBlock);
    }
}

template <int kCode, int T>
static void few(const BlockJob& job) {
    constexpr int B = T < kFewShared ? 1 : kTileBlocks;
    const size_t bytes = job.matrix->block_bytes;
    int b = 0;
    for (; b + B <= job.blocks; b += B)
        few_tokens<kCode, B, T>(job, job.block + b * bytes, job.out + b * T * kRowBlock);
    if (b == job.blocks) return;
    BlockJob rest = job;
    rest.block += b * bytes;
    rest.blocks -= b;
    rest.out += b * T * kRowBlock;
    kTilesQ8[kCode](rest);
}

template <int kCode, int... T>
STRATA_INLINE BlockFn few_of(int tokens, std::integer_sequence<int, T...>) {
    static constexpr BlockFn kFns[] = {few<kCode, T + 1>...};
    return kFns[tokens - 1];
}

template <int kCode>
static void dot(const BlockJob& job) {
    constexpr int kMost = Traits<kCode>::Kind::kSigned ? kFewSigned : kFew;
    if (job.tokens > kMost) return kTilesQ8[kCode](job);
    few_of<kCode>(job.tokens, std::make_integer_sequence<int, kMost>())(job);
}

}  // namespace

const BlockFn kDotQ8[kFormatCount] = {nullptr, nullptr, dot<2>, dot<3>, dot<4>, dot<5>,
                                      dot<6>,  dot<7>,  dot<8>, dot<9>, dot<10>};

}  // namespace strata::cpu::STRATA_ISA
