// Where keys and values lie in a page of the KV cache: csrc/cpu/kv_cache.h's layout, the same bytes on both
// sides. Pages hold a multiple of 16 tokens; `Codes` is Int8Kv or Bf16Kv.
//
//     keys    [page_tokens / 16][dim / n][16 tokens][n elements]     n = 4 (int8), 2 (bf16)
//     values  [dim / 16][page_tokens / n][16 elements][n tokens]
//
// int8 codes are stored plus 128 and the four of a word in the order 0 2 1 3; a scale per token, head and
// group of elements: [groups][page_tokens] per head, one group where nothing else is said.
#pragma once

#include "device.cuh"

constexpr int kKvAlignment = 64, kKvChunk = 64, kKvTokens = 16;

DEVICE int kv_padded(int bytes) { return (bytes + kKvAlignment - 1) / kKvAlignment * kKvAlignment; }

template <int Bytes>
struct KvElement {
    static constexpr int kBytes = Bytes, kPerWord = 4 / Bytes;
};
typedef KvElement<1> Int8Kv;
typedef KvElement<2> Bf16Kv;

// One layer of a page: the parts of one KV head. ValueDim 0: values are the beginning of keys.
template <class Codes, int Dim, int ValueDim = Dim>
struct KvHead {
    const u8 *keys, *values;
    const float *key_scales, *value_scales;

    METHOD KvHead(const u8* layer, int heads, int head, int page_tokens, int groups = 1) {
        const int key_bytes = page_tokens * Dim * Codes::kBytes, scales = page_tokens * 4 * groups;
        const int value_bytes = page_tokens * ValueDim * Codes::kBytes;
        const u8* const all_values = layer + kv_padded(heads * key_bytes);
        const u8* const all_key_scales = all_values + kv_padded(heads * value_bytes);
        keys = layer + head * key_bytes;
        values = all_values + head * value_bytes;
        key_scales = reinterpret_cast<const float*>(all_key_scales + head * scales);
        value_scales =
            reinterpret_cast<const float*>(all_key_scales + kv_padded(heads * scales) + head * scales);
    }

    // From the scales of the first group to those of another.
    METHOD void to_group(int group, int page_tokens) {
        key_scales += group * page_tokens;
        value_scales += group * page_tokens;
    }
};

// Byte offsets inside a head's keys and values.
template <class Codes, int Dim>
DEVICE int key_word_offset(int token, int word) {
    return token / kKvTokens * kKvTokens * Dim * Codes::kBytes + word * kKvChunk + token % kKvTokens * 4;
}

template <class Codes>
DEVICE int value_word_offset(int page_tokens, int token_word, int element) {
    return (element / 16 * (page_tokens / Codes::kPerWord) + token_word) * kKvChunk + element % 16 * 4;
}

// Byte of int8 element (or token) i of a word.
DEVICE int code_place(int i) { return i == 1 ? 2 : i == 2 ? 1 : i; }
