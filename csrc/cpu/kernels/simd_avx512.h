// AVX-512 with VNNI: 16 lanes are one register.
#pragma once

namespace strata::cpu::avx512 {
namespace {

struct Ints {  // 16 x i32, or 64 bytes
    __m512i v;
};
struct Floats {
    __m512 v;
};

// Tokens of a tile and row blocks of a tile. Two blocks share each broadcast of activations: with one, the
// loads would take longer than the products. 24 sums, 2 chunks of weights and a broadcast are in registers.
constexpr int kTile = 12;
constexpr int kTileBlocks = 2;
// Tokens of a sweep in which products read packed weights themselves. More tokens go in tiles.
constexpr int kFew = 12, kFewSigned = kFew;
// Tokens from which such a sweep takes kTileBlocks blocks at once.
constexpr int kFewShared = 5;
// Tokens of a tile with f32 activations.
constexpr int kF32Tile = 8;
constexpr int kPeakChains = 12;
// dpbusd wants unsigned weights: int8 is stored with its sign bit flipped, that is plus 128.
constexpr int kInt8Offset = 128;

STRATA_INLINE Ints load_ints(const void* p) { return {_mm512_loadu_si512(p)}; }
STRATA_INLINE void store_ints(void* p, Ints x) { _mm512_storeu_si512(p, x.v); }
STRATA_INLINE Ints set_ints(int32_t x) { return {_mm512_set1_epi32(x)}; }
STRATA_INLINE Ints set_bytes(int x) { return set_ints(x * 0x01010101); }
STRATA_INLINE Ints add_ints(Ints x, Ints y) { return {_mm512_add_epi32(x.v, y.v)}; }
STRATA_INLINE Ints and_ints(Ints x, Ints y) { return {_mm512_and_si512(x.v, y.v)}; }
STRATA_INLINE Ints max_ints(Ints x, Ints y) { return {_mm512_max_epi32(x.v, y.v)}; }
STRATA_INLINE Ints shift_right(Ints x, int n) { return {_mm512_srli_epi32(x.v, n)}; }
STRATA_INLINE Ints shift_left(Ints x, int n) { return {_mm512_slli_epi32(x.v, n)}; }
STRATA_INLINE Ints sign_shift_right(Ints x, int n) { return {_mm512_srai_epi32(x.v, n)}; }
// table[index] per byte; indexes are 0..15.
STRATA_INLINE Ints lookup(__m128i table, Ints index) {
    return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), index.v)};
}
STRATA_INLINE Ints broadcast4(const int8_t* p) {
    int32_t four;
    __builtin_memcpy(&four, p, 4);
    return set_ints(four);
}

// Hides from the compiler what x is.
STRATA_INLINE Ints keep(Ints x) {
    __asm__("" : "+v"(x.v));
    return x;
}

// Products of unsigned weight bytes and signed activation bytes, summed in 32 bits: no limit on the steps.
constexpr int unsigned_steps(int) { return 8; }
STRATA_INLINE Ints mac_unsigned(Ints part, Ints w, Ints x) { return {_mm512_dpbusd_epi32(part.v, w.v, x.v)}; }
STRATA_INLINE Ints begin_unsigned(Ints sum, Ints w, Ints x) { return mac_unsigned(sum, w, x); }
STRATA_INLINE Ints flush_unsigned(Ints, Ints part) { return part; }
STRATA_INLINE Ints prepare_signed(Ints w) { return {_mm512_xor_si512(w.v, _mm512_set1_epi8(-128))}; }
STRATA_INLINE Ints mac_signed(Ints part, Ints w, Ints x) { return mac_unsigned(part, w, x); }
STRATA_INLINE Ints begin_signed(Ints sum, Ints w, Ints x) { return mac_unsigned(sum, w, x); }
STRATA_INLINE Ints flush_signed(Ints sum, Ints part) { return flush_unsigned(sum, part); }

STRATA_INLINE Floats load_floats(const float* p) { return {_mm512_loadu_ps(p)}; }
STRATA_INLINE void store_floats(float* p, Floats x) { _mm512_storeu_ps(p, x.v); }
STRATA_INLINE Floats set_floats(float x) { return {_mm512_set1_ps(x)}; }
STRATA_INLINE Floats to_floats(Ints x) { return {_mm512_cvtepi32_ps(x.v)}; }
STRATA_INLINE Floats as_floats(Ints x) { return {_mm512_castsi512_ps(x.v)}; }
STRATA_INLINE Floats add(Floats x, Floats y) { return {_mm512_add_ps(x.v, y.v)}; }
STRATA_INLINE Floats mul(Floats x, Floats y) { return {_mm512_mul_ps(x.v, y.v)}; }
STRATA_INLINE Floats fma(Floats x, Floats y, Floats z) { return {_mm512_fmadd_ps(x.v, y.v, z.v)}; }
STRATA_INLINE Floats load_f16(const void* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p)))};
}
// 16 bytes as u32 lanes.
STRATA_INLINE Ints load_u8(const void* p) {
    return {_mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)))};
}
// The low 16 bits of every lane, read as fp16.
STRATA_INLINE Floats low_f16(Ints x) { return {_mm512_cvtph_ps(_mm512_cvtepi32_epi16(x.v))}; }

// What kernels of few tokens take at once (see whole_block.h), however many.
struct WholeBlock;
using FewRows = WholeBlock;
constexpr int kFewHalved = 1;

// What attention needs beside the above. 8 lanes from each of two places:
STRATA_INLINE Ints load_halves(const void* low, const void* high) {
    const __m256i first = _mm256_loadu_si256(static_cast<const __m256i*>(low));
    return {_mm512_inserti64x4(_mm512_castsi256_si512(first),
                               _mm256_loadu_si256(static_cast<const __m256i*>(high)), 1)};
}
STRATA_INLINE Floats load_halves(const float* low, const float* high) {
    return {_mm512_insertf32x8(_mm512_castps256_ps512(_mm256_loadu_ps(low)), _mm256_loadu_ps(high), 1)};
}
STRATA_INLINE __m256i low_half(Ints x) { return _mm512_castsi512_si256(x.v); }
STRATA_INLINE __m256i high_half(Ints x) { return _mm512_extracti64x4_epi64(x.v, 1); }
STRATA_INLINE __m256 low_half(Floats x) { return _mm512_castps512_ps256(x.v); }
STRATA_INLINE __m256 high_half(Floats x) { return _mm512_extractf32x8_ps(x.v, 1); }
// Every 16-bit half of a lane on its own.
STRATA_INLINE Ints shift_right_words(Ints x, int n) { return {_mm512_srli_epi16(x.v, n)}; }
// sum + low half times low half + high half times high half, all signed 16-bit.
STRATA_INLINE Ints mac_words(Ints sum, Ints x, Ints y) { return {_mm512_dpwssd_epi32(sum.v, x.v, y.v)}; }
// The lanes, all within 16 bits, as 16-bit integers.
STRATA_INLINE void store_words(int16_t* p, Ints x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(x.v));
}
// Rounds to nearest, ties to even.
STRATA_INLINE Ints to_ints(Floats x) { return {_mm512_cvtps_epi32(x.v)}; }
STRATA_INLINE Ints as_ints(Floats x) { return {_mm512_castps_si512(x.v)}; }
STRATA_INLINE Floats sub(Floats x, Floats y) { return {_mm512_sub_ps(x.v, y.v)}; }
// y where either is NaN.
STRATA_INLINE Floats max_floats(Floats x, Floats y) { return {_mm512_max_ps(x.v, y.v)}; }
// value, but 0 in lanes where x < limit.
STRATA_INLINE Floats unless_below(Floats value, Floats x, Floats limit) {
    return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, limit.v, _CMP_NLT_UQ), value.v)};
}

}  // namespace
}  // namespace strata::cpu::avx512
