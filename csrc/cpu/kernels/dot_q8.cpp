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

// The next unit's values into the first cache: two blocks are too many places for the hardware to follow.
template <int kCode, int B>
STRATA_INLINE void ask_next(const Matrix& matrix, const uint8_t* block, int unit) {
    constexpr int kUnit = Traits<kCode>::kUnit;
    for (int b = 0; b < B; b++) {
        const uint8_t* next = block + b * matrix.block_bytes + static_cast<size_t>(unit + 1) * kUnit;
#pragma GCC unroll 16
        for (int i = 0; i < kUnit; i += int{Ahead::kLine})
            _mm_prefetch(reinterpret_cast<const char*>(next + i), _MM_HINT_T0);
    }
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

// Tokens [first, first + T) of a job and B blocks from the packed values to the result: no decoded bytes rest
// anywhere.
template <int kCode, int B, int T>
STRATA_INLINE void few_tokens(const BlockJob& job, int first, const uint8_t* block, Ahead* ahead,
                              float* out) {
    using Rows = std::conditional_t<(T < kFewHalved), WholeBlock, FewRows>;
    constexpr int kParts = kRowBlock / Rows::kLanes;
    const Matrix matrix = *job.matrix;
    const int passes = matrix.units * Traits<kCode>::Kind::kSpans * kParts;
    const size_t passed = (B * matrix.block_bytes + passes - 1) / passes;
    typename Rows::Floats acc[kParts][B][T];
    for (auto& part : acc)
        for (auto& tokens : part)
            for (auto& rows : tokens) rows = Rows::set_floats(0.0f);
    const QuantUnit* x = static_cast<const QuantUnit*>(job.x) + first;
    for (int unit = 0; unit < matrix.units; unit++, x += job.stride) {
        if constexpr (B > 1) ask_next<kCode, B>(matrix, block, unit);
#pragma GCC unroll 1
        for (int part = 0; part < kParts; part++)
            add_unit<kCode, Rows, B, T>(matrix, block, forget(x), unit, part * Rows::kLanes, ahead, passed,
                                        acc[part]);
    }
    for (int b = 0; b < B; b++)
        for (int t = 0; t < T; t++) {
            float* at = out + (b * job.tokens + first + t) * kRowBlock;
            for (int part = 0; part < kParts; part++)
                Rows::store_floats(at + part * Rows::kLanes, acc[part][b][t]);
            finish<kCode>(matrix, block + b * matrix.block_bytes, at);
        }
}

// Tokens [first, first + T) of a job. Of two blocks that go together one may be left: it goes with all
// tokens.
template <int kCode, int T>
static void few(const BlockJob& job, int first, Ahead* ahead) {
    constexpr int B = T < kFewShared ? 1 : kTileBlocks;
    const size_t bytes = job.matrix->block_bytes;
    int b = 0;
    for (; b + B <= job.blocks; b += B)
        few_tokens<kCode, B, T>(job, first, job.block + b * bytes, ahead,
                                job.out + b * job.tokens * kRowBlock);
    if (b == job.blocks) return;
    BlockJob rest = job;
    rest.block += b * bytes;
    rest.blocks -= b;
    rest.out += b * job.tokens * kRowBlock;
    kTilesQ8[kCode](rest);
}

using FewFn = void (*)(const BlockJob& job, int first, Ahead* ahead);

template <int kCode, int... T>
STRATA_INLINE FewFn few_of(int tokens, std::integer_sequence<int, T...>) {
    static constexpr FewFn kFns[] = {few<kCode, T + 1>...};
    return kFns[tokens - 1];
}

// Each block in sweeps of nearly equal size, of which the first one asks for what comes next.
template <int kCode>
STRATA_INLINE void sweeps(BlockJob job) {
    const int count = (job.tokens + kFewSigned - 1) / kFewSigned;
    for (int left = job.blocks; left > 0; left--) {
        job.blocks = 1;
        for (int i = 0, first = 0; i < count; i++) {
            const int end = job.tokens * (i + 1) / count;
            few_of<kCode>(end - first, std::make_integer_sequence<int, kFewSigned>())(
                job, first, i == 0 ? job.ahead : nullptr);
            first = end;
        }
        job.block += job.matrix->block_bytes;
        job.out += job.tokens * kRowBlock;
    }
}

template <int kCode>
static void dot(const BlockJob& job) {
    constexpr bool kSigned = Traits<kCode>::Kind::kSigned;
    constexpr int kMost = kSigned ? kFewSigned : kFew;
    if (job.tokens <= kMost)
        return few_of<kCode>(job.tokens, std::make_integer_sequence<int, kMost>())(job, 0, job.ahead);
    if constexpr (kSigned)
        sweeps<kCode>(job);
    else
        kTilesQ8[kCode](job);
}

}  // namespace

const BlockFn kDotQ8[kFormatCount] = {nullptr, nullptr, dot<2>, dot<3>, dot<4>, dot<5>,
                                      dot<6>,  dot<7>,  dot<8>, dot<9>, dot<10>};

}  // namespace strata::cpu::STRATA_ISA
