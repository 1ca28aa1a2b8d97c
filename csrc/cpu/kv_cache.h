// Geometry and addresses of the paged KV cache of one layer.
//
// A page holds `page_tokens` tokens, a multiple of 8. Per page and KV head, keys are stored transposed,
// [key_dim][page_tokens], so that one query element meets all tokens of a page in one vector; values are
// [page_tokens][value_dim]. int8 keeps one f32 scale per token and head for keys and one for values. With
// value_dim_in_key (MLA) there are no values: a value is the first value_dim elements of its key.
#pragma once

#include <cstddef>
#include <cstdint>

namespace strata::cpu {

enum class KvType { int8, bf16, f32 };

struct KvLayer {
    KvType type;
    size_t kv_heads, key_dim, value_dim, page_tokens;
    bool value_in_key;
    void *keys, *values;  // [pages][kv_heads][key_dim][page_tokens], [..][page_tokens][value_dim]
    float *key_scales, *value_scales;  // [pages][kv_heads][page_tokens]; int8 only

    size_t element_bytes() const { return type == KvType::int8 ? 1 : type == KvType::bf16 ? 2 : 4; }
    // Offset in elements of a (page, head) block that holds `dim` elements per token.
    size_t block(size_t page, size_t head, size_t dim) const {
        return (page * kv_heads + head) * page_tokens * dim;
    }
};

}  // namespace strata::cpu
