// Sums and maxima over the 16 lanes, in the same order on every instruction set.
#pragma once

#include "cpu/kernels/simd.h"

namespace strata::cpu::STRATA_ISA {
namespace {

STRATA_INLINE float total(Floats v) {
    const __m256 eight = _mm256_add_ps(low_half(v), high_half(v));
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}

STRATA_INLINE float largest(Floats v) {
    const __m256 eight = _mm256_max_ps(low_half(v), high_half(v));
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}

STRATA_INLINE int32_t total(Ints v) {
    const __m256i eight = _mm256_add_epi32(low_half(v), high_half(v));
    __m128i x = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    x = _mm_add_epi32(x, _mm_shuffle_epi32(x, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(x, _mm_shuffle_epi32(x, 0xb1)));
}

STRATA_INLINE int32_t largest(Ints v) {
    const __m256i eight = _mm256_max_epi32(low_half(v), high_half(v));
    __m128i x = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    x = _mm_max_epi32(x, _mm_shuffle_epi32(x, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(x, _mm_shuffle_epi32(x, 0xb1)));
}

}  // namespace
}  // namespace strata::cpu::STRATA_ISA
