#include "cpu/kv_append.h"

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/parallel.h"

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
    float top = 0.0f, poison = 0.0f;
    for (size_t i = 0; i < dim; ++i) {
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

void store_key(const KvLayer& cache, uint8_t* block, size_t head, size_t slot, const float* x) {
    uint8_t* base = cache.keys(block, head) + cache.key_offset(slot);
    const size_t step = cache.key_lanes() * 4, n = cache.per_lane(), stored = cache.stored_key_dim();
    const float fixed = cache.per_tensor ? cache.steps->keys[0] : 1.0f;
    const auto place = [&](size_t first, const uint8_t* bytes) {
        for (size_t i = first; i < std::min(first + kLanes, stored); i += n, bytes += 4) {
            uint8_t* lane = base + i / n * step;
            if (cache.coded())
                for (size_t j = 0; j < n; ++j) lane[kCodePlace[j]] = bytes[j];
            else
                std::memcpy(lane, bytes, 4);
        }
    };
    store_groups(cache, x, cache.key_dim, cache.key_scales(block, head) + slot, fixed, place);
}

void store_value(const KvLayer& cache, uint8_t* block, size_t head, size_t slot, const float* x) {
    const size_t n = cache.per_lane(), width = cache.element_bytes();
    const size_t place_in_lane = cache.coded() ? kCodePlace[slot % n] : slot % n;
    uint8_t* base = cache.values(block, head) + slot / n * kChunkBytes + place_in_lane * width;
    const float fixed = cache.per_tensor ? cache.steps->values[0] : 1.0f;
    const auto place = [&](size_t first, const uint8_t* bytes) {
        uint8_t* chunk = base + first / kLanes * cache.value_chunk_bytes();
        for (size_t i = 0; i < kLanes; ++i) std::memcpy(chunk + 4 * i, bytes + i * width, width);
    };
    store_groups(cache, x, cache.value_dim, cache.value_scales(block, head) + slot, fixed, place);
}

void append_token(const KvLayer& cache, uint8_t* block, size_t slot, const float* k, const float* v) {
    for (size_t head = 0; head < cache.kv_heads; ++head) {
        store_key(cache, block, head, slot, k + head * cache.key_dim);
        if (!cache.value_in_key) store_value(cache, block, head, slot, v + head * cache.value_dim);
    }
}

}  // namespace

void kv_append(ThreadPool& pool, const KvLayer& cache, const SequenceView* sequences, size_t count,
               const float* k, const float* v) {
    const size_t key_width = cache.kv_heads * cache.key_dim;
    const size_t value_width = cache.kv_heads * cache.value_dim;
    const auto append = [&](const SequenceView& seq, size_t i) {
        const size_t position = seq.start + i, row = seq.first_row + i;
        const size_t page = static_cast<size_t>(seq.pages[position / cache.page_tokens]);
        append_token(cache, cache.block(page), position % cache.page_tokens, k + row * key_width,
                     cache.value_in_key ? nullptr : v + row * value_width);
    };
    size_t tokens = 0;
    for (size_t s = 0; s < count; ++s) tokens += sequences[s].count;
    // Split over the tokens of all sequences: one of decoding has a single one.
    parallel_for(pool, tokens, 8 * key_width, [&](size_t begin, size_t end) {
        size_t first = 0;  // of a sequence, counted over all
        for (size_t s = 0; s < count; first += sequences[s++].count) {
            const size_t last = first + sequences[s].count;
            for (size_t i = std::max(begin, first); i < std::min(end, last); ++i)
                append(sequences[s], i - first);
        }
    });
}

}  // namespace strata::cpu
