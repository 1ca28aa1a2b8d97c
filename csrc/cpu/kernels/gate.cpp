// The gated activation between gate_up and down, 8 gate and 8 up values at a time.
#include "cpu/kernels/simd.h"
#include "cpu/kernels/tables.h"

namespace strata::cpu::STRATA_ISA {
namespace {

// e^x to 2 units in the last place for |x| <= 87 (beyond that the argument is clamped): 2^n times a Taylor
// polynomial of degree 7 on [-ln2 / 2, ln2 / 2].
STRATA_INLINE __m256 exp8(__m256 x) {
    x = _mm256_min_ps(_mm256_max_ps(x, _mm256_set1_ps(-87.0f)), _mm256_set1_ps(87.0f));
    const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)), 8);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
    constexpr float kTerms[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
    __m256 p = _mm256_set1_ps(1.0f / 5040);
    for (const float term : kTerms) p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(term));
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}

STRATA_INLINE __m256 sigmoid8(__m256 x) {
    const __m256 one = _mm256_set1_ps(1.0f);
    return _mm256_div_ps(one, _mm256_add_ps(one, exp8(_mm256_sub_ps(_mm256_setzero_ps(), x))));
}

STRATA_INLINE __m256 silu8(__m256 g, __m256 u, const Gating&) {
    return _mm256_mul_ps(_mm256_mul_ps(g, sigmoid8(g)), u);
}

// 0.5 g (1 + tanh(t)) = g * sigmoid(2 t) with t = sqrt(2 / pi) * (g + 0.044715 g^3)
STRATA_INLINE __m256 gelu8(__m256 g, __m256 u, const Gating&) {
    const __m256 cube = _mm256_mul_ps(_mm256_mul_ps(g, g), g);
    const __m256 inner = _mm256_fmadd_ps(cube, _mm256_set1_ps(0.044715f), g);
    return _mm256_mul_ps(_mm256_mul_ps(g, sigmoid8(_mm256_mul_ps(inner, _mm256_set1_ps(1.59576912f)))), u);
}

STRATA_INLINE __m256 clamped8(__m256 g, __m256 u, const Gating& gating) {
    const __m256 limit = _mm256_set1_ps(gating.limit), low = _mm256_set1_ps(-gating.limit);
    g = _mm256_min_ps(limit, g);
    u = _mm256_max_ps(low, _mm256_min_ps(limit, u));
    const __m256 gated = _mm256_mul_ps(g, sigmoid8(_mm256_mul_ps(_mm256_set1_ps(gating.alpha), g)));
    return _mm256_mul_ps(gated, _mm256_add_ps(u, _mm256_set1_ps(1.0f)));
}

template <__m256 (*kOp)(__m256, __m256, const Gating&)>
STRATA_INLINE void apply(const Gating& gating, const float* z, const float* bias, int tokens, float* h,
                         size_t stride) {
    const __m256 zero = _mm256_setzero_ps();
    const __m256 gate_bias = bias != nullptr ? _mm256_loadu_ps(bias) : zero;
    const __m256 up_bias = bias != nullptr ? _mm256_loadu_ps(bias + 8) : zero;
    for (int t = 0; t < tokens; t++) {
        const __m256 g = _mm256_add_ps(_mm256_loadu_ps(z + t * kRowBlock), gate_bias);
        const __m256 u = _mm256_add_ps(_mm256_loadu_ps(z + t * kRowBlock + 8), up_bias);
        _mm256_storeu_ps(h + t * stride, kOp(g, u, gating));
    }
}

}  // namespace

void gate(const Gating& gating, const float* z, const float* bias, int tokens, float* h, size_t stride) {
    switch (gating.kind) {
        case Gate::kSilu:
            return apply<silu8>(gating, z, bias, tokens, h, stride);
        case Gate::kGeluTanh:
            return apply<gelu8>(gating, z, bias, tokens, h, stride);
        case Gate::kSwigluClamped:
            return apply<clamped8>(gating, z, bias, tokens, h, stride);
    }
}

}  // namespace strata::cpu::STRATA_ISA
