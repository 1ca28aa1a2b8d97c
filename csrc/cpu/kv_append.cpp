#include "cpu/kv_append.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/parallel.h"

namespace strata::cpu {

static uint16_t to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Stores `dim` elements `stride` apart; returns the int8 scale (unused otherwise).
static float store(KvType type, void* base, size_t offset, size_t stride, const float* x, size_t dim) {
    if (type == KvType::f32) {
        float* out = static_cast<float*>(base) + offset;
        for (size_t i = 0; i < dim; ++i) out[i * stride] = x[i];
        return 0;
    }
    if (type == KvType::bf16) {
        uint16_t* out = static_cast<uint16_t*>(base) + offset;
        for (size_t i = 0; i < dim; ++i) out[i * stride] = to_bf16(x[i]);
        return 0;
    }
    float top = 0;
    for (size_t i = 0; i < dim; ++i) top = std::max(top, std::fabs(x[i]));
    const float inverse = top > 0 ? 127.0f / top : 0.0f;
    int8_t* out = static_cast<int8_t*>(base) + offset;
    for (size_t i = 0; i < dim; ++i) out[i * stride] = static_cast<int8_t>(std::lrintf(x[i] * inverse));
    return top / 127.0f;
}

static void append_token(const KvLayer& cache, size_t page, size_t slot, const float* k, const float* v) {
    for (size_t h = 0; h < cache.kv_heads; ++h) {
        const size_t scale_index = (page * cache.kv_heads + h) * cache.page_tokens + slot;
        const size_t key = cache.block(page, h, cache.key_dim) + slot;
        const float key_scale =
            store(cache.type, cache.keys, key, cache.page_tokens, k + h * cache.key_dim, cache.key_dim);
        if (cache.type == KvType::int8) cache.key_scales[scale_index] = key_scale;
        if (cache.value_in_key) continue;
        const size_t value = cache.block(page, h, cache.value_dim) + slot * cache.value_dim;
        const float value_scale =
            store(cache.type, cache.values, value, 1, v + h * cache.value_dim, cache.value_dim);
        if (cache.type == KvType::int8) cache.value_scales[scale_index] = value_scale;
    }
}

void kv_append(ThreadPool& pool, const KvLayer& cache, const SequenceView* sequences, size_t count,
               const float* k, const float* v) {
    const size_t key_width = cache.kv_heads * cache.key_dim;
    const size_t value_width = cache.kv_heads * cache.value_dim;
    for (size_t s = 0; s < count; ++s) {
        const SequenceView& seq = sequences[s];
        parallel_for(pool, seq.count, 8 * key_width, [&](size_t begin, size_t end) {
            for (size_t i = begin; i < end; ++i) {
                const size_t position = seq.start + i, row = seq.first_row + i;
                const size_t page = static_cast<size_t>(seq.pages[position / cache.page_tokens]);
                append_token(cache, page, position % cache.page_tokens, k + row * key_width,
                             cache.value_in_key ? nullptr : v + row * value_width);
            }
        });
    }
}

}  // namespace strata::cpu
