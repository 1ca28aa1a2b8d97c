// Row blocks times int8 activations: integer sums per span of 32 or 64 columns, then
//     acc = fma(sum, weight_scale * activation_scale, acc)
// in the order of the columns. One token, few and many follow the same order, on every instruction set, so a
// token's result does not depend on its neighbours.
#include "cpu/kernels/spans.h"
#include "cpu/kernels/tables.h"

namespace strata::cpu::STRATA_ISA {
namespace {

// The values of one packed unit, decoded step by step.
template <class Decode>
struct Packed {
    const uint8_t* at;
    STRATA_ALWAYS_INLINE Ints step(int index) const { return Decode::step(at, index); }
};

// T tokens and one block from the packed values to the result, everything in registers.
template <int kCode, int T>
STRATA_INLINE void few_tokens(const BlockJob& job, const uint8_t* block, float* out) {
    using F = Traits<kCode>;
    using Kind = typename F::Kind;
    const Matrix& matrix = *job.matrix;
    Floats acc[T];
    for (int t = 0; t < T; t++) acc[t] = set_floats(0.0f);
    const int spans = matrix.units * Kind::kSpans;
    const size_t passed = (matrix.block_bytes + spans - 1) / spans;
    for (int unit = 0; unit < matrix.units; unit++) {
        const Packed<typename F::Decode> source[1] = {{block + static_cast<size_t>(unit) * F::kUnit}};
        const QuantUnit* x = static_cast<const QuantUnit*>(job.x) + static_cast<size_t>(unit) * job.stride;
#pragma GCC unroll 2
        for (int span = 0; span < Kind::kSpans; span++) {
            // Not a unit's at once: they would keep the loads below waiting.
            if (job.ahead != nullptr) job.ahead->template pass<F::kSpanLines>(passed);
            Ints sum[1][T];
            sum_span<Kind>(source, x, span, sum);
            const Floats scale = span_scales<kCode>(matrix, block, unit, span);
            const Floats minimum = span_minimums<kCode>(matrix, block, unit, span);
            for (int t = 0; t < T; t++)
                acc[t] = add_span<Kind>(acc[t], sum[0][t], scale, minimum, x[t], span);
        }
    }
    for (int t = 0; t < T; t++) store_floats(out + t * kRowBlock, finished<kCode>(matrix, block, acc[t]));
}

template <int kCode, int T>
static void few(const BlockJob& job) {
    for (int b = 0; b < job.blocks; b++)
        few_tokens<kCode, T>(job, job.block + b * job.matrix->block_bytes, job.out + b * T * kRowBlock);
}

template <int kCode>
static void dot(const BlockJob& job) {
    switch (job.tokens) {
        case 1:
            return few<kCode, 1>(job);
        case 2:
            return few<kCode, 2>(job);
        case 3:
            return few<kCode, 3>(job);
        case 4:
            return few<kCode, 4>(job);
        default:
            return kTilesQ8[kCode](job);
    }
}

}  // namespace

const BlockFn kDotQ8[kFormatCount] = {nullptr, nullptr, dot<2>, dot<3>, dot<4>, dot<5>,
                                      dot<6>,  dot<7>,  dot<8>, dot<9>, dot<10>};

}  // namespace strata::cpu::STRATA_ISA
