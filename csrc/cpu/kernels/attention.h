// What csrc/cpu/attention.cpp hands to the attention kernels: one block of KV and a tile of queries.
//
// Keys and values are stored in chunks of 16 lanes x 32 bits. For keys a lane is a token and holds the next
// 4 (int8), 2 (bf16) or 1 (f32) elements of its key; for values a lane is an element and holds the next 4, 2
// or 1 tokens. Both products, q.k and p.v, are then the same loop: chunk times broadcast, 16 sums at once.
#pragma once

#include <cstddef>
#include <cstdint>

namespace strata::cpu {

constexpr int kLanes = 16;
constexpr int kChunkBytes = 64;
// Pages hold a multiple of 8 tokens.
constexpr int kOctet = 8;
// Tokens between two updates of the running softmax.
constexpr int kBlockTokens = 64;
constexpr int kOctets = kBlockTokens / kOctet;
constexpr int kTileQueries = 32;
// int8 codes are stored plus 128: unsigned bytes widen to 16 bits with one `and` or shift.
constexpr int kCodeOffset = 128;
// Weights of the softmax become integers up to this when they meet int8 values; queries up to this or less.
constexpr int kLargestCode = 32767;

// Up to 64 tokens of one KV head. Every octet has valid addresses, also those past `tokens`.
struct KvBlock {
    int tokens;
    const uint8_t* keys[kOctets];
    const uint8_t* values[kOctets];
    const float* key_scales[kOctets];  // of the first group; int8 only, as the next
    const float* value_scales[kOctets];
};

struct KvShape {
    int key_steps;             // chunks of a key
    int value_chunks;          // vectors of 16 elements of a value
    size_t value_chunk_bytes;  // from the chunks of 16 elements to those of the next 16
    int group_steps;           // chunks of a key that share a scale
    int group_chunks;          // vectors of a value that do
    int key_groups, value_groups;
    size_t scale_stride;  // elements from the scales of a group to those of the next
    bool octets_apart;    // a chunk of keys is 8 lanes, 32 bytes: pages hold an odd number of octets
};

// What elements that share an int8 scale ask of a tile's queries.
struct ScaleGroup {
    // Scores are sums over groups of (sum of code products + x_start) * x_scale * key scale.
    int32_t x_start[kTileQueries];
    // Of the block: weights times value scales are codes * factor; their products with values begin at
    // `start`.
    float factor[kTileQueries];
    int32_t start[kTileQueries];
    alignas(kChunkBytes) int16_t codes[kTileQueries][kBlockTokens];
};

// Query vectors that read the same KV head, their running softmax, and scratch memory.
struct AttentionTile {
    int queries;
    size_t query_stride;  // elements of `x` from one query to the next
    void* x;              // int8: 16-bit codes; else f32, times the scale of the scores
    float* values;        // [queries][value_chunks * 16]: weighted sums so far
    // Tokens [begin, end) of the block that each query sees.
    int begin[kTileQueries], end[kTileQueries];
    float top[kTileQueries];                                // largest score so far; -inf before the first
    float x_scale[kTileQueries];                            // int8
    float shrink[kTileQueries];                             // of the sums before the block
    ScaleGroup* groups;                                     // int8: as many as keys or values have
    alignas(kChunkBytes) float sums[kTileQueries][kLanes];  // of the weights, by lane
    alignas(kChunkBytes) float scores[kTileQueries][kBlockTokens];
};

constexpr int kKvTypes = 4;
// One KV type's functions; tables of these are indexed by KvType.
struct AttentionFns {
    // q [dim] becomes query `index` of the tile; elements up to the stride become 0.
    void (*prepare)(const KvShape& shape, const float* q, int dim, float scale, int index,
                    AttentionTile& tile);
    // Absorbs a block; meanwhile the lines of `ahead` are fetched.
    void (*attend)(const KvShape& shape, const KvBlock& block, const KvBlock& ahead, AttentionTile& tile);
    // The first elements of a block's keys in the layout of values, for caches that store no values:
    // `chunks` vectors of 16, each with kBlockTokens tokens.
    void (*values_of_keys)(const KvShape& shape, const KvBlock& block, uint8_t* out);
};

}  // namespace strata::cpu
