// Geometry and addresses of the paged KV cache of one layer.
//
// A page holds `page_tokens` tokens, a multiple of 8. Per page and KV head, keys and values are stored as the
// attention kernels read them, in chunks of 16 lanes x 32 bits (kernels/attention.h):
//
//     keys    [page_tokens / 16][key_dim / n][16 tokens][n elements]     n = 4 (int8), 2 (bf16), 1 (f32)
//     values  [value_dim / 16][page_tokens / n][16 elements][n tokens]
//
// key_dim is padded to a multiple of n and value_dim to one of 16; the padding stays as zero bytes. Pages
// with an odd number of octets have keys by 8 tokens instead of 16. int8 codes are stored plus 128, the four
// of a lane in the order 0 2 1 3 (so that 16-bit halves hold 0, 1 and 2, 3), with one f32 scale per token and
// head for keys and one for values. With value_in_key (MLA) there are no values: a value is the first
// value_dim elements of its key.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/kernels/attention.h"

namespace strata::cpu {

enum class KvType { int8, bf16, f32 };

// Where element (or token) j of a 32-bit lane of int8 codes lies.
constexpr size_t kCodePlace[] = {0, 2, 1, 3};

struct KvLayer {
    KvType type;
    size_t kv_heads, key_dim, value_dim, page_tokens;
    bool value_in_key;
    void *keys, *values;
    float *key_scales, *value_scales;  // [pages][kv_heads][page_tokens]; int8 only

    size_t element_bytes() const { return type == KvType::int8 ? 1 : type == KvType::bf16 ? 2 : 4; }
    size_t per_lane() const { return 4 / element_bytes(); }
    // Elements per token that keys and values take with their padding.
    size_t stored_key_dim() const { return padded(key_dim, per_lane()); }
    size_t stored_value_dim() const { return padded(value_dim, kLanes); }
    size_t key_lanes() const { return page_tokens % kLanes == 0 ? kLanes : kOctet; }

    // Bytes of a page and head begin here.
    uint8_t* page_keys(size_t page, size_t head) const {
        return static_cast<uint8_t*>(keys) + block(page, head) * stored_key_dim() * element_bytes();
    }
    uint8_t* page_values(size_t page, size_t head) const {
        return static_cast<uint8_t*>(values) + block(page, head) * stored_value_dim() * element_bytes();
    }
    // Bytes from the chunks of 16 elements of a page's values to those of the next 16.
    size_t value_chunk_bytes() const { return page_tokens / per_lane() * kChunkBytes; }
    // Index of a page's and head's first token among the scales.
    size_t block(size_t page, size_t head) const { return (page * kv_heads + head) * page_tokens; }
    // Bytes from a page's keys to those of `token`: its lane in the first chunk.
    size_t key_offset(size_t token) const {
        const size_t lanes = key_lanes();
        return token / lanes * lanes * stored_key_dim() * element_bytes() + token % lanes * 4;
    }

  private:
    static size_t padded(size_t n, size_t multiple) { return (n + multiple - 1) / multiple * multiple; }
};

}  // namespace strata::cpu
