#include "cpu/kv_append.h"

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/parallel.h"
#include "cpu/vec8.h"

namespace strata::cpu {
namespace {

uint16_t to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    // Rounding would carry the bits of a NaN into an infinity or a zero.
    if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 0x40);
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// scale = max|x| / 127; NaN if any element is infinite or NaN, so that whatever meets it becomes NaN.
float scale_of(const float* x, size_t dim) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    __m256 tops = _mm256_setzero_ps(), poisons = _mm256_setzero_ps();
    size_t i = 0;
    for (; i + 8 <= dim; i += 8) {
        const __m256 values = _mm256_loadu_ps(x + i);
        tops = _mm256_max_ps(tops, _mm256_andnot_ps(sign, values));
        poisons = _mm256_fmadd_ps(values, _mm256_setzero_ps(), poisons);
    }
    float top = vec8::max(tops), poison = vec8::sum(poisons);
    for (; i < dim; ++i) {
        top = std::max(top, std::fabs(x[i]));
        poison += 0.0f * x[i];
    }
    return poison == 0.0f ? top / 127.0f : std::numeric_limits<float>::quiet_NaN();
}

// round(x / step), at most 127: fixed steps may be too small for what meets them.
__m256i steps_of(__m256 x, __m256 step) {
    return _mm256_cvtps_epi32(_mm256_min_ps(_mm256_div_ps(x, step), _mm256_set1_ps(127.0f)));
}

// 16 elements as they are stored; `out` has room for 16 of the type.
void encode(KvType type, const float* x, float scale, uint8_t* out) {
    if (type == KvType::f32) {
        std::memcpy(out, x, kLanes * sizeof(float));
    } else if (type == KvType::bf16) {
        for (int i = 0; i < kLanes; ++i) {
            const uint16_t bits = to_bf16(x[i]);
            std::memcpy(out + 2 * i, &bits, sizeof bits);
        }
    } else {
        // Divided, not multiplied by a reciprocal: `reference` divides, and codes on an edge must agree.
        const __m256 step = _mm256_set1_ps(scale > 0.0f ? scale : 1.0f);
        const __m256i low = steps_of(_mm256_loadu_ps(x), step), high = steps_of(_mm256_loadu_ps(x + 8), step);
        const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
        const __m128i codes =
            _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
        const __m128i bounded = _mm_max_epi8(codes, _mm_set1_epi8(-127));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_xor_si128(bounded, _mm_set1_epi8(-128)));
    }
}

// Calls place(i, bytes) for every 16 elements i.. of x in stored form; beyond `dim` they are 0.
template <class Place>
void store(KvType type, const float* x, size_t dim, float scale, const Place& place) {
    uint8_t bytes[kLanes * sizeof(float)];
    size_t i = 0;
    for (; i + kLanes <= dim; i += kLanes) {
        encode(type, x + i, scale, bytes);
        place(i, bytes);
    }
    if (i == dim) return;
    float tail[kLanes] = {};
    std::copy_n(x + i, dim - i, tail);
    encode(type, tail, scale, bytes);
    place(i, bytes);
}

// The same for a whole key or value, whose groups have scales of their own: scales[i * page_tokens] is
// written, or, where pages hold none, `step` taken for all. Groups begin at multiples of 16 elements.
template <class Place>
void store_groups(const KvLayer& cache, const float* x, size_t dim, float* scales, float step,
                  const Place& place) {
    const size_t group = cache.group_dim(dim);
    for (size_t first = 0; first < dim; first += group, scales += cache.page_tokens) {
        const size_t count = std::min(group, dim - first);
        float scale = step;
        if (cache.coded() && !cache.per_tensor) *scales = scale = scale_of(x + first, count);
        store(cache.type, x + first, count, scale,
              [&](size_t i, const uint8_t* bytes) { place(first + i, bytes); });
    }
}

// kCodePlace of every four of 16.
const uint8_t* order_codes(const uint8_t* codes, uint8_t* ordered) {
    const __m128i order = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
    const __m128i found = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(ordered), _mm_shuffle_epi8(found, order));
    return ordered;
}

void store_key(const KvLayer& cache, uint8_t* block, size_t head, size_t slot, const float* x) {
    uint8_t* base = cache.keys(block, head) + cache.key_offset(slot);
    const size_t step = cache.key_lanes() * 4, n = cache.per_lane(), stored = cache.stored_key_dim();
    const float fixed = cache.per_tensor ? cache.steps->keys[0] : 1.0f;
    const auto place = [&](size_t first, const uint8_t* bytes) {
        uint8_t ordered[kLanes];
        if (cache.coded()) bytes = order_codes(bytes, ordered);
        for (size_t i = first; i < std::min(first + kLanes, stored); i += n, bytes += 4)
            std::memcpy(base + i / n * step, bytes, 4);
    };
    store_groups(cache, x, cache.key_dim, cache.key_scales(block, head) + slot, fixed, place);
}

// One byte of each of 16 lanes, the others stay: of other tokens.
void place_codes(const uint8_t* codes, int place, uint8_t* chunk) {
    const __m256i hole = _mm256_set1_epi32(static_cast<int>(0xffu << (8 * place)));
    for (int half = 0; half < 2; ++half) {
        const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + 8 * half));
        const __m256i moved = _mm256_sll_epi32(_mm256_cvtepu8_epi32(bytes), _mm_cvtsi32_si128(8 * place));
        __m256i* lanes = reinterpret_cast<__m256i*>(chunk + 32 * half);
        _mm256_storeu_si256(lanes,
                            _mm256_or_si256(_mm256_andnot_si256(hole, _mm256_loadu_si256(lanes)), moved));
    }
}

void store_value(const KvLayer& cache, uint8_t* block, size_t head, size_t slot, const float* x) {
    const size_t n = cache.per_lane(), width = cache.element_bytes();
    uint8_t* base = cache.values(block, head) + slot / n * kChunkBytes;
    const float fixed = cache.per_tensor ? cache.steps->values[0] : 1.0f;
    const auto place = [&](size_t first, const uint8_t* bytes) {
        uint8_t* chunk = base + first / kLanes * cache.value_chunk_bytes();
        if (cache.coded()) return place_codes(bytes, kCodePlace[slot % n], chunk);
        for (size_t i = 0; i < kLanes; ++i)
            std::memcpy(chunk + 4 * i + slot % n * width, bytes + i * width, width);
    };
    store_groups(cache, x, cache.value_dim, cache.value_scales(block, head) + slot, fixed, place);
}

// Up to four tokens of one sequence, of which no lane of values has any beside them.
constexpr size_t kQuad = 4;

size_t quads_of(const SequenceView& sequence) {
    return sequence.count == 0 ? 0
                               : (sequence.start + sequence.count - 1) / kQuad - sequence.start / kQuad + 1;
}

struct Rows {
    const KvLayer& cache;
    const float *k, *v;  // v: null with value_in_key
    size_t key_width = cache.kv_heads * cache.key_dim, value_width = cache.kv_heads * cache.value_dim;
};

void append_quad(const Rows& rows, const SequenceView& sequence, size_t head, size_t quad) {
    const KvLayer& cache = rows.cache;
    const size_t first = std::max(sequence.start, (sequence.start / kQuad + quad) * kQuad);
    const size_t end = std::min(sequence.start + sequence.count, (first / kQuad + 1) * kQuad);
    uint8_t* block = cache.block(static_cast<size_t>(sequence.pages[first / cache.page_tokens]));
    for (size_t position = first; position < end; ++position) {
        const size_t row = sequence.first_row + position - sequence.start,
                     slot = position % cache.page_tokens;
        store_key(cache, block, head, slot, rows.k + row * rows.key_width + head * cache.key_dim);
        if (!cache.value_in_key)
            store_value(cache, block, head, slot, rows.v + row * rows.value_width + head * cache.value_dim);
    }
}

// Quads [begin, end) of one head, counted over all sequences.
void append_quads(const Rows& rows, const SequenceView* sequences, size_t head, size_t begin, size_t end) {
    for (size_t first = 0; first < end; ++sequences) {
        const size_t last = first + quads_of(*sequences);
        for (size_t quad = std::max(begin, first); quad < std::min(end, last); ++quad)
            append_quad(rows, *sequences, head, quad - first);
        first = last;
    }
}

}  // namespace

void kv_append(ThreadPool& pool, const KvLayer& cache, const SequenceView* sequences, size_t count,
               const float* k, const float* v) {
    const Rows rows{cache, k, v};
    size_t quads = 0;
    for (size_t s = 0; s < count; ++s) quads += quads_of(sequences[s]);
    // Head after head: tokens of one head lie in the same cache lines, in which two threads should not write.
    parallel_for(pool, cache.kv_heads * quads, 8 * kQuad * cache.key_dim, [&](size_t begin, size_t end) {
        for (size_t head = begin / quads; head * quads < end; ++head)
            append_quads(rows, sequences, head, std::max(begin, head * quads) - head * quads,
                         std::min(end, (head + 1) * quads) - head * quads);
    });
}

}  // namespace strata::cpu
