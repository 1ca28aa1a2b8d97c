// AVX2: 16 lanes are two registers.
#pragma once

namespace strata::cpu::avx2 {
namespace {

struct Ints {  // 16 x i32, or 64 bytes
    __m256i a, b;
};
struct Floats {
    __m256 a, b;
};

// Tokens of a tile and row blocks of a tile: 2 registers each for the running products, all ports busy.
constexpr int kTile = 4;
constexpr int kTileBlocks = 1;
// Tokens of a sweep in which products read packed weights themselves. More tokens go in tiles, but signed
// weights, of which nothing has to be decoded, in several such sweeps.
constexpr int kFew = 8, kFewSigned = 12;
// Tokens from which such a sweep takes kTileBlocks blocks at once.
constexpr int kFewShared = 1;
// Tokens of a tile with f32 activations.
constexpr int kF32Tile = 4;
constexpr int kPeakChains = 3;
// Signed weights meet signed activations through abs and sign, so they need no offset.
constexpr int kInt8Offset = 0;

STRATA_INLINE Ints load_ints(const void* p) {
    const __m256i* v = static_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(v), _mm256_loadu_si256(v + 1)};
}
STRATA_INLINE void store_ints(void* p, Ints x) {
    __m256i* v = static_cast<__m256i*>(p);
    _mm256_storeu_si256(v, x.a);
    _mm256_storeu_si256(v + 1, x.b);
}
STRATA_INLINE Ints set_ints(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
STRATA_INLINE Ints set_bytes(int x) { return set_ints(x * 0x01010101); }
STRATA_INLINE Ints add_ints(Ints x, Ints y) {
    return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)};
}
STRATA_INLINE __m256i and_ints(__m256i x, __m256i y) { return _mm256_and_si256(x, y); }
STRATA_INLINE Ints and_ints(Ints x, Ints y) { return {and_ints(x.a, y.a), and_ints(x.b, y.b)}; }
STRATA_INLINE __m256i max_ints(__m256i x, __m256i y) { return _mm256_max_epi32(x, y); }
STRATA_INLINE Ints max_ints(Ints x, Ints y) { return {max_ints(x.a, y.a), max_ints(x.b, y.b)}; }
STRATA_INLINE __m256i shift_right(__m256i x, int n) { return _mm256_srli_epi32(x, n); }
STRATA_INLINE Ints shift_right(Ints x, int n) { return {shift_right(x.a, n), shift_right(x.b, n)}; }
STRATA_INLINE __m256i shift_left(__m256i x, int n) { return _mm256_slli_epi32(x, n); }
STRATA_INLINE Ints shift_left(Ints x, int n) { return {shift_left(x.a, n), shift_left(x.b, n)}; }
STRATA_INLINE Ints sign_shift_right(Ints x, int n) {
    return {_mm256_srai_epi32(x.a, n), _mm256_srai_epi32(x.b, n)};
}
// table[index] per byte; indexes are 0..15.
STRATA_INLINE __m256i lookup(__m128i table, __m256i index) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), index);
}
STRATA_INLINE Ints lookup(__m128i table, Ints index) {
    return {lookup(table, index.a), lookup(table, index.b)};
}
STRATA_INLINE Ints broadcast4(const int8_t* p) {
    int32_t four;
    __builtin_memcpy(&four, p, 4);
    return set_ints(four);
}

// Products of unsigned weight bytes and signed activation bytes. `part` sums pairs in 16 bits, which holds
// 32767 / (2 * 127 * largest weight) steps, the first of which is begin's; flush widens it into the 32-bit
// sums of four columns. keep() makes GCC finish one token before the next: left alone it interleaves them and
// spills a tile (69 -> 93 GMAC/s). The first step needs no keep, which would cost a move.
STRATA_INLINE Ints keep(Ints x) {
    __asm__("" : "+x"(x.a), "+x"(x.b));
    return x;
}
STRATA_INLINE __m256i keep(__m256i x) {
    __asm__("" : "+x"(x));
    return x;
}
constexpr int unsigned_steps(int largest_weight) { return largest_weight > 16 ? 4 : 8; }
STRATA_INLINE __m256i add_products(__m256i part, __m256i w, __m256i x) {
    return _mm256_add_epi16(part, _mm256_maddubs_epi16(w, x));
}
STRATA_INLINE __m256i begin_unsigned(__m256i, __m256i w, __m256i x) { return _mm256_maddubs_epi16(w, x); }
STRATA_INLINE Ints begin_unsigned(Ints, Ints w, Ints x) {
    return {_mm256_maddubs_epi16(w.a, x.a), _mm256_maddubs_epi16(w.b, x.b)};
}
STRATA_INLINE __m256i mac_unsigned(__m256i part, __m256i w, __m256i x) {
    return keep(add_products(part, w, x));
}
STRATA_INLINE Ints mac_unsigned(Ints part, Ints w, Ints x) {
    return keep({add_products(part.a, w.a, x.a), add_products(part.b, w.b, x.b)});
}
STRATA_INLINE __m256i flush_unsigned(__m256i sum, __m256i part) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(part, _mm256_set1_epi16(1)));
}
STRATA_INLINE Ints flush_unsigned(Ints sum, Ints part) {
    return {flush_unsigned(sum.a, part.a), flush_unsigned(sum.b, part.b)};
}
// The same for int8 weights: a pair may reach 2 * 128 * 127, so it is widened at once.
template <class V>
STRATA_INLINE V prepare_signed(V w) {
    return w;
}
STRATA_INLINE __m256i add_signed(__m256i sum, __m256i w, __m256i x) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    return flush_unsigned(sum, pairs);
}
STRATA_INLINE __m256i mac_signed(__m256i part, __m256i w, __m256i x) { return keep(add_signed(part, w, x)); }
STRATA_INLINE Ints mac_signed(Ints part, Ints w, Ints x) {
    return keep({add_signed(part.a, w.a, x.a), add_signed(part.b, w.b, x.b)});
}
template <class V>
STRATA_INLINE V begin_signed(V sum, V w, V x) {
    return mac_signed(sum, w, x);
}
template <class V>
STRATA_INLINE V flush_signed(V, V part) {
    return part;
}

STRATA_INLINE Floats load_floats(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
STRATA_INLINE void store_floats(float* p, Floats x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
STRATA_INLINE Floats set_floats(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
STRATA_INLINE __m256 to_floats(__m256i x) { return _mm256_cvtepi32_ps(x); }
STRATA_INLINE Floats to_floats(Ints x) { return {to_floats(x.a), to_floats(x.b)}; }
STRATA_INLINE __m256 as_floats(__m256i x) { return _mm256_castsi256_ps(x); }
STRATA_INLINE Floats as_floats(Ints x) { return {as_floats(x.a), as_floats(x.b)}; }
STRATA_INLINE Floats add(Floats x, Floats y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
STRATA_INLINE __m256 mul(__m256 x, __m256 y) { return _mm256_mul_ps(x, y); }
STRATA_INLINE Floats mul(Floats x, Floats y) { return {mul(x.a, y.a), mul(x.b, y.b)}; }
STRATA_INLINE __m256 fma(__m256 x, __m256 y, __m256 z) { return _mm256_fmadd_ps(x, y, z); }
STRATA_INLINE Floats fma(Floats x, Floats y, Floats z) { return {fma(x.a, y.a, z.a), fma(x.b, y.b, z.b)}; }
STRATA_INLINE Floats load_f16(const void* p) {
    const __m128i* v = static_cast<const __m128i*>(p);
    return {_mm256_cvtph_ps(_mm_loadu_si128(v)), _mm256_cvtph_ps(_mm_loadu_si128(v + 1))};
}
// 16 bytes as u32 lanes.
STRATA_INLINE Ints load_u8(const void* p) {
    const __m128i bytes = _mm_loadu_si128(static_cast<const __m128i*>(p));
    return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_unpackhi_epi64(bytes, bytes))};
}
// The low 16 bits of every lane, read as fp16.
STRATA_INLINE Floats low_f16(Ints x) {
    const Ints low = and_ints(x, set_ints(0xffff));
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low.a, low.b), 0xd8);
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(packed)),
            _mm256_cvtph_ps(_mm256_extracti128_si256(packed, 1))};
}

// Half of a block (see whole_block.h), one register: the sums of twice as many tokens fit.
struct HalfBlock {
    using Ints = __m256i;
    using Floats = __m256;
    static constexpr int kLanes = 8;
    STRATA_INLINE Ints load_ints(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
    STRATA_INLINE Ints set_ints(int32_t x) { return _mm256_set1_epi32(x); }
    STRATA_INLINE Ints load_u8(const void* p) {
        return _mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p)));
    }
    STRATA_INLINE Floats load_floats(const float* p) { return _mm256_loadu_ps(p); }
    STRATA_INLINE Floats load_f16(const void* p) {
        return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(p)));
    }
    STRATA_INLINE Floats set_floats(float x) { return _mm256_set1_ps(x); }
    STRATA_INLINE void store_floats(float* p, Floats x) { _mm256_storeu_ps(p, x); }
};
// What kernels of few tokens take at once, from so many tokens on: fewer leave registers free anyway.
using FewRows = HalfBlock;
constexpr int kFewHalved = 5;

// What attention needs beside the above. 8 lanes from each of two places:
STRATA_INLINE Ints load_halves(const void* low, const void* high) {
    return {_mm256_loadu_si256(static_cast<const __m256i*>(low)),
            _mm256_loadu_si256(static_cast<const __m256i*>(high))};
}
STRATA_INLINE Floats load_halves(const float* low, const float* high) {
    return {_mm256_loadu_ps(low), _mm256_loadu_ps(high)};
}
STRATA_INLINE __m256i low_half(Ints x) { return x.a; }
STRATA_INLINE __m256i high_half(Ints x) { return x.b; }
STRATA_INLINE __m256 low_half(Floats x) { return x.a; }
STRATA_INLINE __m256 high_half(Floats x) { return x.b; }
// Every 16-bit half of a lane on its own.
STRATA_INLINE Ints shift_right_words(Ints x, int n) {
    return {_mm256_srli_epi16(x.a, n), _mm256_srli_epi16(x.b, n)};
}
// sum + low half times low half + high half times high half, all signed 16-bit.
STRATA_INLINE Ints mac_words(Ints sum, Ints x, Ints y) {
    return keep({_mm256_add_epi32(sum.a, _mm256_madd_epi16(x.a, y.a)),
                 _mm256_add_epi32(sum.b, _mm256_madd_epi16(x.b, y.b))});
}
// The lanes, all within 16 bits, as 16-bit integers.
STRATA_INLINE void store_words(int16_t* p, Ints x) {
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), words);
}
// Rounds to nearest, ties to even.
STRATA_INLINE Ints to_ints(Floats x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
STRATA_INLINE Ints as_ints(Floats x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
STRATA_INLINE Floats sub(Floats x, Floats y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
// y where either is NaN.
STRATA_INLINE Floats max_floats(Floats x, Floats y) {
    return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)};
}
// value, but 0 in lanes where x < limit.
STRATA_INLINE Floats unless_below(Floats value, Floats x, Floats limit) {
    return {_mm256_and_ps(value.a, _mm256_cmp_ps(x.a, limit.a, _CMP_NLT_UQ)),
            _mm256_and_ps(value.b, _mm256_cmp_ps(x.b, limit.b, _CMP_NLT_UQ))};
}

}  // namespace
}  // namespace strata::cpu::avx2
