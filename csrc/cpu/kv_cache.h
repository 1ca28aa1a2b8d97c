// Geometry and addresses of the paged KV cache of one layer.
//
// A page is one block of bytes, so that one copy moves it between tiers: layer after layer, and in a layer
// the keys of all KV heads, their values, the scales of the keys and those of the values, each part from a
// multiple of 64 bytes on. It holds `page_tokens` tokens, a multiple of 8. Per KV head, keys and values are
// stored as the attention kernels read them, in chunks of 16 lanes x 32 bits (kernels/attention.h):
//
//     keys    [page_tokens / 16][key_dim / n][16 tokens][n elements]     n = 4 (int8), 2 (bf16), 1 (f32)
//     values  [value_dim / 16][page_tokens / n][16 elements][n tokens]
//
// key_dim is padded to a multiple of n and value_dim to one of 16. Pages with an odd number of octets have
// keys by 8 tokens instead of 16. int8 codes are stored plus 128, the four of a lane in the order 0 2 1 3 (so
// that 16-bit halves hold 0, 1 and 2, 3), with one f32 scale per token, head and group of elements, apart for
// keys and values:
//
//     scales  [groups][page_tokens]    per head; a group is `group` elements, or all of a head's (group 0)
//
// With one scale for the whole tensor (KvSteps) pages hold none. With value_in_key (MLA) there are no values:
// a value is the first value_dim elements of its key. What a page holds behind its last token is never used,
// so a page may begin with any bytes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/kernels/attention.h"

namespace strata::cpu {

// int8_groups: int8 with more than one scale per token and head. Indexes AttentionFns.
enum class KvType { int8, bf16, f32, int8_groups };

// Where element (or token) j of a 32-bit lane of int8 codes lies.
constexpr size_t kCodePlace[] = {0, 2, 1, 3};
// Parts of a page begin at multiples of this; so does every page.
constexpr size_t kKvAlignment = 64;

struct KvGeometry {
    KvType type;
    size_t kv_heads, key_dim, value_dim, page_tokens;
    bool value_in_key;
    size_t group = 0;         // int8_groups: elements that share a scale, a multiple of 16
    bool per_tensor = false;  // int8: see KvSteps
};

// One scale for all keys of a layer and one for all its values, fixed beforehand: larger elements are
// clipped, and NaN is not kept. As often as an octet of tokens reads them.
struct KvSteps {
    float keys[kOctet], values[kOctet];
};

struct KvLayer : KvGeometry {
    // Pages belong to the caller. pages[i] is where page i begins, layer_at the bytes from there to this
    // layer.
    uint8_t* const* pages = nullptr;
    size_t layer_at = 0;
    const KvSteps* steps = nullptr;  // with per_tensor
    // Bytes of one head's keys and values, of one head's scales; from the layer's start to each part; all.
    size_t head_key_bytes, head_value_bytes, key_scale_bytes, value_scale_bytes;
    size_t values_at, key_scales_at, value_scales_at, layer_bytes;

    explicit KvLayer(const KvGeometry& shape) : KvGeometry(shape) {
        const bool stored = !value_in_key;
        const size_t scale_bytes = coded() && !per_tensor ? page_tokens * sizeof(float) : 0;
        head_key_bytes = page_tokens * stored_key_dim() * element_bytes();
        head_value_bytes = stored ? page_tokens * stored_value_dim() * element_bytes() : 0;
        key_scale_bytes = groups(key_dim) * scale_bytes;
        value_scale_bytes = stored ? groups(value_dim) * scale_bytes : 0;
        values_at = padded(kv_heads * head_key_bytes, kKvAlignment);
        key_scales_at = values_at + padded(kv_heads * head_value_bytes, kKvAlignment);
        value_scales_at = key_scales_at + padded(kv_heads * key_scale_bytes, kKvAlignment);
        layer_bytes = value_scales_at + padded(kv_heads * value_scale_bytes, kKvAlignment);
    }

    // Whether elements are int8 codes.
    bool coded() const { return type == KvType::int8 || type == KvType::int8_groups; }
    size_t element_bytes() const { return coded() ? 1 : type == KvType::bf16 ? 2 : 4; }
    // Elements of a key or value of `dim` that share a scale, and how many scales it has.
    size_t group_dim(size_t dim) const { return type == KvType::int8_groups ? group : dim; }
    size_t groups(size_t dim) const { return (dim + group_dim(dim) - 1) / group_dim(dim); }
    size_t per_lane() const { return 4 / element_bytes(); }
    // Elements per token that keys and values take with their padding.
    size_t stored_key_dim() const { return padded(key_dim, per_lane()); }
    size_t stored_value_dim() const { return padded(value_dim, kLanes); }
    size_t key_lanes() const { return page_tokens % kLanes == 0 ? kLanes : kOctet; }

    // Where this layer of a page begins; from there to each part of a head.
    uint8_t* block(size_t page) const { return pages[page] + layer_at; }
    uint8_t* keys(uint8_t* block, size_t head) const { return block + head * head_key_bytes; }
    uint8_t* values(uint8_t* block, size_t head) const { return block + values_at + head * head_value_bytes; }
    float* key_scales(uint8_t* block, size_t head) const {
        return reinterpret_cast<float*>(block + key_scales_at + head * key_scale_bytes);
    }
    float* value_scales(uint8_t* block, size_t head) const {
        return reinterpret_cast<float*>(block + value_scales_at + head * value_scale_bytes);
    }
    // Bytes from the chunks of 16 elements of a page's values to those of the next 16.
    size_t value_chunk_bytes() const { return page_tokens / per_lane() * kChunkBytes; }
    // Bytes from a page's keys to those of `token`: its lane in the first chunk.
    size_t key_offset(size_t token) const {
        const size_t lanes = key_lanes();
        return token / lanes * lanes * stored_key_dim() * element_bytes() + token % lanes * 4;
    }

  private:
    static size_t padded(size_t n, size_t multiple) { return (n + multiple - 1) / multiple * multiple; }
};

}  // namespace strata::cpu
