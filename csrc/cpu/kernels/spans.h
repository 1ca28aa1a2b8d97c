// Integer sums of a span of 32 or 64 columns and their scaling, for all int8 kernels: what makes the result
// of a token the same bits in every one of them.
#pragma once

#include "cpu/kernels/kernels.h"
#include "cpu/kernels/values.h"

namespace strata::cpu::STRATA_ISA {
namespace {

// What the kernels have to know of a format: columns of an activation scale, whether there is a minimum, how
// products are summed.
template <int kSpanCols, bool kHasMinimum, bool kSignedBytes, int kSteps>
struct SpanKind {
    static constexpr int kSpan = kSpanCols;
    static constexpr int kSpans = kUnitCols / kSpan;
    static constexpr int kSpanSteps = kSpan / kStepCols;
    static constexpr bool kMinimum = kHasMinimum;
    static constexpr bool kSigned = kSignedBytes;
    static constexpr int kPartSteps = kSteps;
};

template <int kCode>
struct Traits {
    static constexpr Format kFormat = kFormats[kCode];
    static constexpr int kUnit = kUnitBytes[static_cast<int>(kFormat.values)];
    using Decode = Bytes<kFormat.values, kFormat.minimum>;
    using Kind = SpanKind<activation_span(kFormat), kFormat.minimum, Decode::kSigned, Decode::kPartSteps>;
    // Whole cache lines of a unit's values and scales, and those that a span takes of them.
    static constexpr int kScales =
        kFormat.group == 0 ? 0 : kRowBlock * kFormat.scale_bytes * kUnitCols / kFormat.group;
    static constexpr int kUnitLines = (kUnit + kScales * (kFormat.minimum ? 2 : 1)) / int{Ahead::kLine};
    static constexpr int kSpanLines = kUnitLines / Kind::kSpans;
};

template <class Kind, class Ints>
STRATA_INLINE Ints begin(Ints sum, Ints w, Ints x) {
    if constexpr (Kind::kSigned) return begin_signed(sum, w, x);
    return begin_unsigned(sum, w, x);
}
template <class Kind, class Ints>
STRATA_INLINE Ints mac(Ints part, Ints w, Ints x) {
    if constexpr (Kind::kSigned) return mac_signed(part, w, x);
    return mac_unsigned(part, w, x);
}
template <class Kind, class Ints>
STRATA_INLINE Ints flush(Ints sum, Ints part) {
    if constexpr (Kind::kSigned) return flush_signed(sum, part);
    return flush_unsigned(sum, part);
}

// What the integer sums of a span begin with.
template <class Kind, class Rows>
STRATA_INLINE typename Rows::Ints span_start(const QuantUnit& x, int span) {
    return Rows::set_ints(Kind::kMinimum ? 0 : x.totals[span].start);
}

// Four codes, to every lane.
template <class Rows>
STRATA_INLINE typename Rows::Ints codes_of(const QuantUnit& x, int step) {
    int32_t four;
    __builtin_memcpy(&four, x.codes + step * kStepCols, kStepCols);
    return Rows::set_ints(four);
}

// Sums of span `span` for B row blocks and T tokens. source[b].step(i) are the bytes of step i of a block.
template <class Kind, class Rows, class Source, int B, int T>
STRATA_INLINE void sum_span(const Source (&source)[B], const QuantUnit* x, int span,
                            typename Rows::Ints (&sum)[B][T]) {
    const int start = span * Kind::kSpanSteps, end = start + Kind::kSpanSteps;
#pragma GCC unroll 4
    for (int first = start; first < end; first += Kind::kPartSteps) {
        typename Rows::Ints part[B][T];
#pragma GCC unroll 8
        for (int step = first; step < first + Kind::kPartSteps; step++) {
            typename Rows::Ints w[B];
            for (int b = 0; b < B; b++) w[b] = source[b].step(step);
#pragma GCC unroll 16
            for (int t = 0; t < T; t++) {
                const auto four = codes_of<Rows>(x[t], step);
                for (int b = 0; b < B; b++)
                    part[b][t] = step == start   ? begin<Kind>(span_start<Kind, Rows>(x[t], span), w[b], four)
                                 : step == first ? begin<Kind>(sum[b][t], w[b], four)
                                                 : mac<Kind>(part[b][t], w[b], four);
            }
        }
        // What a sum begins with is loaded again where it was not needed before: kept, it would be spilled.
        for (int t = 0; t < T; t++)
            for (int b = 0; b < B; b++)
                sum[b][t] =
                    flush<Kind>(first == start ? span_start<Kind, Rows>(x[t], span) : sum[b][t], part[b][t]);
    }
}

// acc + scale * sum (+ minimum * total) of one token and block.
template <class Kind, class Rows>
STRATA_INLINE typename Rows::Floats add_span(typename Rows::Floats acc, typename Rows::Ints sum,
                                             typename Rows::Floats scale, typename Rows::Floats minimum,
                                             const QuantUnit& x, int span) {
    acc = fma(to_floats(sum), mul(scale, Rows::set_floats(x.scales[span])), acc);
    if constexpr (Kind::kMinimum) acc = fma(minimum, Rows::set_floats(x.totals[span].scaled), acc);
    return acc;
}

// The weight scales, from row `row` of the block on, that meet span `span` of unit `unit`, times what decoded
// bytes exceed values by. Formats with one scale per row apply it to the result (finished).
template <int kCode, class Rows>
STRATA_INLINE typename Rows::Floats span_scales(const Matrix& matrix, const uint8_t* block, int unit,
                                                int span, int row = 0) {
    constexpr Format kFormat = kFormats[kCode];
    const auto scale = Rows::set_floats(kFormat.values == Values::kE2m1 ? 0.5f : 1.0f);
    if constexpr (kFormat.group == 0) return scale;
    const int group = group_of<kFormat.group>(unit, span * activation_span(kFormat));
    return mul(scale, load_scales<kFormat.scale_bytes, Rows>(block + matrix.scales_at, group, row));
}

template <int kCode, class Rows>
STRATA_INLINE typename Rows::Floats span_minimums(const Matrix& matrix, const uint8_t* block, int unit,
                                                  int span, int row = 0) {
    constexpr Format kFormat = kFormats[kCode];
    if constexpr (!kFormat.minimum) return Rows::set_floats(0.0f);
    const int group = group_of<kFormat.group>(unit, span * activation_span(kFormat));
    return load_scales<kFormat.scale_bytes, Rows>(block + matrix.mins_at, group, row);
}

// The 16 results of one token and block, from their sums in `acc`, which lies in place.
template <int kCode>
STRATA_INLINE void finish(const Matrix& matrix, const uint8_t* block, float* acc) {
    if constexpr (kFormats[kCode].group == 0)
        store_floats(acc, mul(load_floats(acc), load_scales<4>(block + matrix.scales_at, 0)));
}

}  // namespace
}  // namespace strata::cpu::STRATA_ISA
