// Activations f32 -> int8, symmetric, one scale per span or per token: scale = absmax / 127, code =
// round(x / scale).
#include "cpu/kernels/tables.h"
#include "cpu/kernels/values.h"

namespace strata::cpu::STRATA_ISA {
namespace {

constexpr int kLanes = 8;
// Below this the reciprocal overflows; such a span is zero for all that follows.
constexpr float kSmallest = 1e-35f;

STRATA_INLINE float largest(__m256 v) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}

STRATA_INLINE float total(__m256 v) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}

STRATA_INLINE int32_t total(__m256i v) {
    __m128i x = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    x = _mm_add_epi32(x, _mm_shuffle_epi32(x, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(x, _mm_shuffle_epi32(x, 0xb1)));
}

// What the totals of a span are to hold for the weights of a format.
struct Wanted {
    int offset;
    bool minimum;
};

// The largest |x| so far, and NaN once there was an infinity or NaN: 0 * x keeps them visible.
struct Extent {
    __m256 most = _mm256_setzero_ps(), poison = _mm256_setzero_ps();

    STRATA_ALWAYS_INLINE void add(__m256 v) {
        most = _mm256_max_ps(most, _mm256_andnot_ps(_mm256_set1_ps(-0.0f), v));
        poison = _mm256_fmadd_ps(v, _mm256_setzero_ps(), poison);
    }
};

// code = round(x * inverse), x = code * scale. Infinity and NaN come out as NaN in the scale.
struct Steps {
    float inverse, scale;

    STRATA_ALWAYS_INLINE explicit Steps(const Extent& extent) {
        const float absmax = largest(extent.most);
        inverse = absmax > kSmallest ? 127.0f / absmax : 0.0f;
        scale = (inverse != 0.0f ? absmax / 127.0f : 0.0f) + total(extent.poison);
    }
};

// Eight codes to `out`, and as 32-bit lanes.
STRATA_INLINE __m256i encode(__m256 v, float inverse, int8_t* out) {
    const __m256i q = _mm256_cvtps_epi32(_mm256_mul_ps(v, _mm256_set1_ps(inverse)));
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm_packs_epi16(words, words));
    return q;
}

template <int kSpan>
STRATA_INLINE void quantize_span(const float* x, const Wanted& wanted, int span, QuantUnit* out) {
    constexpr int kVectors = kSpan / kLanes;
    int8_t* codes = out->codes + span * kSpan;
    __m256 v[kVectors];
    Extent extent;
    for (int i = 0; i < kVectors; i++) {
        v[i] = _mm256_loadu_ps(x + span * kSpan + i * kLanes);
        extent.add(v[i]);
    }
    const Steps steps(extent);
    __m256i sums = _mm256_setzero_si256();
    for (int i = 0; i < kVectors; i++)
        sums = _mm256_add_epi32(sums, encode(v[i], steps.inverse, codes + i * kLanes));
    const int32_t sum = total(sums);
    out->scales[span] = steps.scale;
    if (wanted.minimum)
        out->totals[span].scaled = steps.scale * static_cast<float>(sum);
    else
        out->totals[span].start = -wanted.offset * sum;
}

template <int kSpan>
STRATA_INLINE void quantize_unit(const float* x, int cols, const Wanted& wanted, QuantUnit* out) {
    float tail[kUnitCols] = {};
    if (cols < kUnitCols) {
        for (int i = 0; i < cols; i++) tail[i] = x[i];
        x = tail;
    }
    for (int span = 0; span < kUnitCols / kSpan; span++) quantize_span<kSpan>(x, wanted, span, out);
}

// fn(unit, its 64 columns); the columns beyond the last are 0.
template <class Fn>
STRATA_INLINE void for_each_unit(const float* x, int cols, int units, const Fn& fn) {
    const int whole = cols / kUnitCols;
    for (int unit = 0; unit < whole; unit++) fn(unit, x + unit * kUnitCols);
    if (whole == units) return;
    float tail[kUnitCols] = {};
    for (int i = whole * kUnitCols; i < cols; i++) tail[i - whole * kUnitCols] = x[i];
    fn(whole, tail);
}

}  // namespace

void quantize(const Format& format, const float* x, int cols, int units, QuantUnit* out, int stride) {
    const Wanted wanted{byte_offset(format), format.minimum};
    for (int unit = 0; unit < units; unit++, x += kUnitCols, out += stride) {
        const int left = cols - unit * kUnitCols;
        if (activation_span(format) == kUnitCols)
            quantize_unit<kUnitCols>(x, left, wanted, out);
        else
            quantize_unit<kUnitCols / 2>(x, left, wanted, out);
    }
}

void quantize_token(const float* x, int cols, int units, QuantUnit* out, int stride) {
    Extent extent;
    for_each_unit(x, cols, units, [&](int, const float* at) {
        for (int i = 0; i < kUnitCols; i += kLanes) extent.add(_mm256_loadu_ps(at + i));
    });
    const Steps steps(extent);
    __m256i sums = _mm256_setzero_si256();
    for_each_unit(x, cols, units, [&](int unit, const float* at) {
        int8_t* codes = out[static_cast<size_t>(unit) * stride].codes;
        for (int i = 0; i < kUnitCols; i += kLanes)
            sums = _mm256_add_epi32(sums, encode(_mm256_loadu_ps(at + i), steps.inverse, codes + i));
    });
    out->scales[0] = steps.scale;
    out->totals[0].start = -kInt8Offset * total(sums);
}

}  // namespace strata::cpu::STRATA_ISA
