// Activations f32 -> int8, symmetric, one scale per span: scale = absmax / 127, code = round(x / scale).
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

template <int kSpan>
STRATA_INLINE void quantize_span(const float* x, const Wanted& wanted, int span, QuantUnit* out) {
    constexpr int kVectors = kSpan / kLanes;
    int8_t* codes = out->codes + span * kSpan;
    __m256 v[kVectors], most = _mm256_setzero_ps(), poison = _mm256_setzero_ps();
    for (int i = 0; i < kVectors; i++) {
        v[i] = _mm256_loadu_ps(x + span * kSpan + i * kLanes);
        most = _mm256_max_ps(most, _mm256_andnot_ps(_mm256_set1_ps(-0.0f), v[i]));
        poison = _mm256_fmadd_ps(v[i], _mm256_setzero_ps(), poison);
    }
    const float absmax = largest(most);
    const float inverse = absmax > kSmallest ? 127.0f / absmax : 0.0f;
    // Infinity and NaN must come out as NaN: 0 * x keeps them visible in the scale.
    const float scale = (inverse != 0.0f ? absmax / 127.0f : 0.0f) + total(poison);
    __m256i sums = _mm256_setzero_si256();
    for (int i = 0; i < kVectors; i++) {
        const __m256i q = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], _mm256_set1_ps(inverse)));
        sums = _mm256_add_epi32(sums, q);
        const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1));
        _mm_storel_epi64(reinterpret_cast<__m128i*>(codes + i * kLanes), _mm_packs_epi16(words, words));
    }
    const int32_t sum = total(sums);
    out->scales[span] = scale;
    if (wanted.minimum)
        out->totals[span].scaled = scale * static_cast<float>(sum);
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

}  // namespace strata::cpu::STRATA_ISA
