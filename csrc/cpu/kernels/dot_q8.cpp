// One row block times int8 activations: integer sums per span of 32 or 64 columns, then
//     acc = fma(sum, weight_scale * activation_scale, acc)
// in the order of the columns. One token, few and many follow the same order, on every instruction set, so a
// token's result does not depend on its neighbours.
#include "cpu/kernels/prefetch.h"
#include "cpu/kernels/tables.h"
#include "cpu/kernels/values.h"

namespace strata::cpu::STRATA_ISA {
namespace {

template <int kCode>
struct Traits {
    static constexpr Format kFormat = kFormats[kCode];
    static constexpr int kSpan = activation_span(kFormat);
    static constexpr int kSpanSteps = kSpan / kStepCols;
    static constexpr int kUnit = kUnitBytes[static_cast<int>(kFormat.values)];
    using Decode = Bytes<kFormat.values, kFormat.minimum>;
};

// Reads steps that decode_steps has put into L1.
template <class Decode>
struct Decoded : Decode {
    STRATA_INLINE Ints step(const uint8_t* bytes, int step) { return load_ints(bytes + step * kStepBytes); }
};

// Integer sums of one span for T tokens, on top of `sum`. Parts are as long as the instruction set's partial
// sums allow.
template <class Source, int kFirst, int kCount, int T>
STRATA_INLINE void span_sums(const uint8_t* bytes, const QuantUnit* const (&x)[T], Ints (&sum)[T]) {
#pragma GCC unroll 4
    for (int first = kFirst; first < kFirst + kCount; first += Source::kPartSteps) {
        Ints part[T];
        for (int t = 0; t < T; t++) part[t] = set_ints(0);
#pragma GCC unroll 8
        for (int step = first; step < first + Source::kPartSteps; step++) {
            const Ints w = Source::step(bytes, step);
#pragma GCC unroll 8
            for (int t = 0; t < T; t++) {
                const Ints four = broadcast4(x[t]->codes + step * kStepCols);
                part[t] = Source::kSigned ? mac_signed(part[t], w, four) : mac_unsigned(part[t], w, four);
            }
        }
        for (int t = 0; t < T; t++)
            sum[t] = Source::kSigned ? flush_signed(sum[t], part[t]) : flush_unsigned(sum[t], part[t]);
    }
}

template <int kCode, class Source, int kSpanIndex, int T>
STRATA_INLINE void add_span(const BlockJob& job, const uint8_t* bytes, int unit,
                            const QuantUnit* const (&x)[T], Floats (&acc)[T]) {
    using F = Traits<kCode>;
    Ints sum[T];
    for (int t = 0; t < T; t++) sum[t] = set_ints(0);
    span_sums<Source, kSpanIndex * F::kSpanSteps, F::kSpanSteps, T>(bytes, x, sum);
    for (int t = 0; t < T; t++)
        sum[t] = add_ints(sum[t], set_ints(-F::Decode::kOffset * x[t]->sums[kSpanIndex]));
    Floats scale = set_floats(F::kFormat.values == Values::kE2m1 ? 0.5f : 1.0f);
    const int group = group_of<F::kFormat.group>(unit, kSpanIndex * F::kSpan);
    if constexpr (F::kFormat.group != 0)
        scale = mul(scale, load_scales<F::kFormat.scale_bytes>(job.block + job.matrix->scales_at, group));
    for (int t = 0; t < T; t++)
        acc[t] = fma(to_floats(sum[t]), mul(scale, set_floats(x[t]->scales[kSpanIndex])), acc[t]);
    if constexpr (F::kFormat.minimum) {
        const Floats minimum = load_scales<F::kFormat.scale_bytes>(job.block + job.matrix->mins_at, group);
        for (int t = 0; t < T; t++) {
            const float total = x[t]->scales[kSpanIndex] * static_cast<float>(x[t]->sums[kSpanIndex]);
            acc[t] = fma(minimum, set_floats(total), acc[t]);
        }
    }
}

template <int kCode, class Source, int T>
STRATA_INLINE void add_unit(const BlockJob& job, const uint8_t* bytes, int unit, int token,
                            Floats (&acc)[T]) {
    const QuantUnit* x[T];
    for (int t = 0; t < T; t++) x[t] = static_cast<const QuantUnit*>(job.rows[token + t]) + unit;
    add_span<kCode, Source, 0, T>(job, bytes, unit, x, acc);
    if constexpr (Traits<kCode>::kSpan < kUnitCols) add_span<kCode, Source, 1, T>(job, bytes, unit, x, acc);
}

// A format with one scale per row applies it at the end.
template <int kCode>
STRATA_INLINE Floats finished(const BlockJob& job, Floats acc) {
    if constexpr (kFormats[kCode].group != 0) return acc;
    return mul(acc, load_scales<4>(job.block + job.matrix->scales_at, 0));
}

// T tokens from the packed values to the result, everything in registers.
template <int kCode, int T>
static void few(const BlockJob& job, int token, Ahead ahead) {
    using F = Traits<kCode>;
    Floats acc[T];
    for (int t = 0; t < T; t++) acc[t] = set_floats(0.0f);
    Prefetcher prefetch(ahead, job.matrix->units);
    for (int unit = 0; unit < job.matrix->units; unit++) {
        prefetch.advance();
        add_unit<kCode, typename F::Decode, T>(job, job.block + static_cast<size_t>(unit) * F::kUnit, unit,
                                               token, acc);
    }
    for (int t = 0; t < T; t++) store_floats(job.out + (token + t) * kRowBlock, finished<kCode>(job, acc[t]));
}

template <int kCode, int T>
STRATA_INLINE int sweep(const BlockJob& job, const uint8_t* bytes, int unit, int token) {
    for (; token + T <= job.tokens; token += T) {
        Floats acc[T];
        float* out = job.out + token * kRowBlock;
        for (int t = 0; t < T; t++) acc[t] = unit == 0 ? set_floats(0.0f) : load_floats(out + t * kRowBlock);
        add_unit<kCode, Decoded<typename Traits<kCode>::Decode>, T>(job, bytes, unit, token, acc);
        for (int t = 0; t < T; t++) store_floats(out + t * kRowBlock, acc[t]);
    }
    return token;
}

// Many tokens: a unit is decoded once and swept over all of them; partial results rest in job.out.
template <int kCode>
static void many(const BlockJob& job) {
    using F = Traits<kCode>;
    alignas(64) uint8_t bytes[kSteps * kStepBytes];
    Prefetcher prefetch(job.ahead, job.matrix->units);
    for (int unit = 0; unit < job.matrix->units; unit++) {
        prefetch.advance();
        const uint8_t* packed = job.block + static_cast<size_t>(unit) * F::kUnit;
#pragma GCC unroll 16
        for (int step = 0; step < kSteps; step++)
            store_ints(bytes + step * kStepBytes, F::Decode::step(packed, step));
        int token = sweep<kCode, kTile>(job, bytes, unit, 0);
        token = sweep<kCode, 2>(job, bytes, unit, token);
        sweep<kCode, 1>(job, bytes, unit, token);
    }
    for (int t = 0; t < job.tokens; t++) {
        float* out = job.out + t * kRowBlock;
        store_floats(out, finished<kCode>(job, load_floats(out)));
    }
}

template <int kCode>
static void dot(const BlockJob& job) {
    switch (job.tokens) {
        case 1:
            return few<kCode, 1>(job, 0, job.ahead);
        case 2:
            return few<kCode, 2>(job, 0, job.ahead);
        case 3:
            few<kCode, 2>(job, 0, job.ahead);
            return few<kCode, 1>(job, 2, Ahead{});
        case 4:
            return few<kCode, 4>(job, 0, job.ahead);
        default:
            return many<kCode>(job);
    }
}

}  // namespace

const BlockFn kDotQ8[kFormatCount] = {nullptr, nullptr, dot<2>, dot<3>, dot<4>, dot<5>,
                                      dot<6>,  dot<7>,  dot<8>, dot<9>, dot<10>};

}  // namespace strata::cpu::STRATA_ISA
