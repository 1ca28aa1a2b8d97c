// Around the blocks: queries before the first one, and values for caches that keep only keys.
#pragma once

#include "cpu/kernels/attention_kv.h"
#include "cpu/kernels/reduce.h"

namespace strata::cpu::STRATA_ISA {
namespace {

// 16 elements from `i` on, 0 beyond `dim`.
STRATA_INLINE Floats load_part(const float* q, int dim, int i) {
    if (i + kLanes <= dim) return load_floats(q + i);
    float part[kLanes] = {};
    for (int j = 0; i + j < dim; j++) part[j] = q[i + j];
    return load_floats(part);
}

// Queries meet bf16 and f32 keys as they are, times the scale of the scores.
static void prepare_f32(const KvShape&, const float* q, int dim, float scale, int query,
                        AttentionTile& tile) {
    float* x = static_cast<float*>(tile.x) + query * tile.query_stride;
    for (int i = 0; i < dim; i += kLanes) store_floats(x + i, mul(load_part(q, dim, i), set_floats(scale)));
}

// The largest code of a query: the sum of `dim` products with key codes must fit 32 bits. (Partial sums may
// wrap around; they come back.)
STRATA_INLINE int largest_query_code(int dim) {
    const int fits = INT32_MAX / (127 * dim);
    return fits < kLargestCode ? fits : kLargestCode;
}

// For int8 keys: one scale for the whole query, which 16 bits allow. Infinity and NaN become NaN in the
// scale.
static void prepare_int8(const KvShape& shape, const float* q, int dim, float scale, int query,
                         AttentionTile& tile) {
    constexpr float kSmallest = 1e-30f;  // its reciprocal times the largest code does not overflow
    int16_t* x = static_cast<int16_t*>(tile.x) + query * tile.query_stride;
    Floats most = set_floats(0.0f), poison = set_floats(0.0f);
    for (int i = 0; i < dim; i += kLanes) {
        const Floats v = load_part(q, dim, i);
        most = max_floats(most, max_floats(v, sub(set_floats(0.0f), v)));
        poison = fma(v, set_floats(0.0f), poison);
    }
    const float absmax = largest(most), code = static_cast<float>(largest_query_code(dim));
    const Floats inverse = set_floats(absmax < kSmallest ? 0.0f : code / absmax);
    const int group_dim = shape.group_steps * Int8Kv::kPerLane;
    for (int group = 0; group < shape.key_groups; group++) {
        const int begin = group * group_dim, end = begin + group_dim < dim ? begin + group_dim : dim;
        Ints sum = set_ints(0);
        for (int i = begin; i < end; i += kLanes) {
            const Ints codes = to_ints(mul(load_part(q, dim, i), inverse));
            store_words(x + i, codes);
            sum = add_ints(sum, codes);
        }
        tile.groups[group].x_start[query] = -kCodeOffset * total(sum);
    }
    tile.x_scale[query] = absmax / code * scale + total(poison);
}

// What four tokens keep in one step: 16 bytes of a chunk of keys.
STRATA_INLINE __m128i four_tokens(const KvShape& shape, const KvBlock& block, int token, int step) {
    if (step >= shape.key_steps) return _mm_setzero_si128();
    const size_t step_bytes = shape.octets_apart ? kChunkBytes / 2 : kChunkBytes;
    const uint8_t* at = block.keys[token / kOctet] + step * step_bytes + token % kOctet * 4;
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
}

STRATA_INLINE void store_four(uint8_t* chunk, int lane, __m128i lanes) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(chunk + 4 * lane), lanes);
}

// 32-bit lane j of rows[i] <-> lane i of rows[j].
STRATA_INLINE void transpose(__m128i (&rows)[4]) {
    const __m128i a = _mm_unpacklo_epi32(rows[0], rows[1]), b = _mm_unpacklo_epi32(rows[2], rows[3]);
    const __m128i c = _mm_unpackhi_epi32(rows[0], rows[1]), d = _mm_unpackhi_epi32(rows[2], rows[3]);
    rows[0] = _mm_unpacklo_epi64(a, b);
    rows[1] = _mm_unpackhi_epi64(a, b);
    rows[2] = _mm_unpacklo_epi64(c, d);
    rows[3] = _mm_unpackhi_epi64(c, d);
}

// Four steps of four tokens as values: `chunk` is the first of these tokens', `part` which four steps of it.
// Both layouts keep elements and tokens in the order 0 2 1 3 (kv_cache.h).
STRATA_INLINE void turn(Int8Kv, const __m128i (&steps)[4], uint8_t* chunk, int) {
    const __m128i order = _mm_setr_epi8(0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15);
    for (int i = 0; i < 4; i++) store_four(chunk, 4 * i, _mm_shuffle_epi8(steps[i], order));
}

STRATA_INLINE void turn(Bf16Kv, __m128i (&steps)[4], uint8_t* chunk, int part) {
    transpose(steps);
    for (int i = 0; i < 2; i++, chunk += kChunkBytes) {
        store_four(chunk, 8 * part, _mm_unpacklo_epi16(steps[2 * i], steps[2 * i + 1]));
        store_four(chunk, 8 * part + 4, _mm_unpackhi_epi16(steps[2 * i], steps[2 * i + 1]));
    }
}

STRATA_INLINE void turn(F32Kv, __m128i (&steps)[4], uint8_t* chunk, int part) {
    transpose(steps);
    for (int i = 0; i < 4; i++) store_four(chunk + i * kChunkBytes, 4 * part, steps[i]);
}

template <class Kv>
static void values_of_keys(const KvShape& shape, const KvBlock& block, uint8_t* out) {
    constexpr int kTokens = 4, kSteps = 4, kParts = kLanes / (kSteps * Kv::kPerLane);
    for (int chunk = 0; chunk < shape.value_chunks; chunk++)
        for (int token = 0; token < block.tokens; token += kTokens)
            for (int part = 0; part < kParts; part++) {
                __m128i steps[kSteps];
                for (int i = 0; i < kSteps; i++)
                    steps[i] = four_tokens(shape, block, token, (chunk * kParts + part) * kSteps + i);
                turn(Kv{}, steps, out + (chunk * kBlockTokens + token) / Kv::kPerLane * kChunkBytes, part);
            }
}

}  // namespace
}  // namespace strata::cpu::STRATA_ISA
