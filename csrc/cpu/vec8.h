// Eight f32 lanes on AVX2: the few primitives that several ops share.
//
// Everything is static: each translation unit is compiled for its own ISA, and an inline function with
// external linkage could be picked by the linker from the wrong one.
#pragma once

#include <immintrin.h>

namespace strata::cpu::vec8 {

static inline float sum(__m256 v) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

static inline float max(__m256 v) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}

}  // namespace strata::cpu::vec8
