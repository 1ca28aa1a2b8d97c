// Activations f32 -> int8, symmetric, one scale per span: scale = absmax / 127, code = round(x / scale).
#include "cpu/kernels/tables.h"

#include "cpu/kernels/simd.h"

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

template <int kSpan>
STRATA_INLINE void quantize_span(const float* x, int8_t* codes, float* scale, int32_t* sum) {
    constexpr int kVectors = kSpan / kLanes;
    __m256 v[kVectors], most = _mm256_setzero_ps(), poison = _mm256_setzero_ps();
    for (int i = 0; i < kVectors; i++) {
        v[i] = _mm256_loadu_ps(x + i * kLanes);
        most = _mm256_max_ps(most, _mm256_andnot_ps(_mm256_set1_ps(-0.0f), v[i]));
        poison = _mm256_fmadd_ps(v[i], _mm256_setzero_ps(), poison);
    }
    const float absmax = largest(most);
    const float inverse = absmax > kSmallest ? 127.0f / absmax : 0.0f;
    // Infinity and NaN must come out as NaN: 0 * x keeps them visible in the scale.
    *scale = (inverse != 0.0f ? absmax / 127.0f : 0.0f) + total(poison);
    __m256i sums = _mm256_setzero_si256();
    for (int i = 0; i < kVectors; i++) {
        const __m256i q = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], _mm256_set1_ps(inverse)));
        sums = _mm256_add_epi32(sums, q);
        const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1));
        _mm_storel_epi64(reinterpret_cast<__m128i*>(codes + i * kLanes), _mm_packs_epi16(words, words));
    }
    *sum = total(sums);
}

STRATA_INLINE void quantize_unit(const float* x, int span, QuantUnit* out) {
    if (span == kUnitCols) {
        quantize_span<kUnitCols>(x, out->codes, &out->scales[0], &out->sums[0]);
        return;
    }
    for (int half = 0; half < 2; half++)
        quantize_span<kUnitCols / 2>(x + half * (kUnitCols / 2), out->codes + half * (kUnitCols / 2),
                                     &out->scales[half], &out->sums[half]);
}

}  // namespace

void quantize(const float* x, int cols, int span, QuantUnit* out) {
    int unit = 0;
    for (; (unit + 1) * kUnitCols <= cols; unit++) quantize_unit(x + unit * kUnitCols, span, out + unit);
    const int left = cols - unit * kUnitCols;
    if (left == 0) return;
    float tail[kUnitCols] = {};
    for (int i = 0; i < left; i++) tail[i] = x[unit * kUnitCols + i];
    quantize_unit(tail, span, out + unit);
}

}  // namespace strata::cpu::STRATA_ISA
