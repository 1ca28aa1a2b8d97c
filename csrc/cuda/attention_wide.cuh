// Attention with wide heads over the paged KV cache: DeepSeek's latent one in its absorbed form, where a
// value is the beginning of its key, and heads of 192 and 256 elements. Single rows and prompts alike.
//
// q is f32 [rows, heads * Key]. tiles holds four ints per tile (RowTile): successive tokens of one sequence,
// at most 16 rows of (token, query head of a group); a group is up to 16 query heads of one KV head.
// Visibility, pages and layer_at are attention_decode's. With out, f32 [rows, heads * Value], and sinks or
// null, results are finished. With partial instead, f32 [tiles, heads, splits, Value + 2], tiles are of one
// token and the visible tokens are split over blocks: attention_decode says what is left to
// attention_combine. Grid: (splits, kv_heads * groups, tiles). Must move: the visible keys (and values where
// they are stored) with their scales, once per tile and group.
//
// The warps of a block share the 16 rows and divide the elements: each multiplies its part of the keys, the
// parts of the scores are added in shared memory, and each mixes its part of the values. So every byte of a
// page is read once by one lane, straight into the registers of a fragment; latent keys turn into values by
// transpositions in registers. The next 16 tokens are on their way while these are multiplied.
#pragma once

#include "attention_tile.cuh"

// Which 16 elements of a key a warp takes: first those of its values, then what only keys have.
template <int Key, int Value, int Warps>
struct WideParts {
    static constexpr int kTiles = Value / 16 / Warps, kMore = (Key - Value + 16 * Warps - 1) / (16 * Warps);
    static constexpr int kSteps = kTiles + kMore;

    DEVICE int step(int i, int warp) { return i < kTiles ? kTiles * warp + i : Value / 16 + warp; }
    DEVICE bool has(int i, int warp) { return i < kTiles || step(i, warp) < Key / 16; }
};

// The next four classes say for each kind of page what a warp loads of 16 tokens and the B operands in it.
// The first warp loads the scales for all. valid: of the 16 tokens, those before the end; others may be NaN.
template <class Parts, int Key>
struct Int8Latent : Int8Tile {
    typedef KvHead<Int8Kv, Key, 0> Head;
    struct Loaded {
        uint2 keys[Parts::kSteps];
        float4 key_scales, value_scales;
    };

    template <class AnyHead>
    DEVICE Loaded load(const AnyHead& head, int token, int, int, int warp, QueryLane lane) {
        Loaded loaded;
#pragma unroll
        for (int i = 0; i < Parts::kSteps; ++i) {
            loaded.keys[i] = make_uint2(0, 0);
            const int offset =
                key_word_offset<Int8Kv, Key>(token + 2 * lane.group, 4 * Parts::step(i, warp) + lane.member);
            if (Parts::has(i, warp))
                loaded.keys[i] = load_once(reinterpret_cast<const uint2*>(head.keys + offset));
        }
        loaded.key_scales = loaded.value_scales = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (warp == 0) loaded.key_scales = loaded.value_scales = scales(head.key_scales + token, lane);
        return loaded;
    }

    DEVICE void keys(const Loaded& loaded, int i, u32 (&even)[2], u32 (&odd)[2]) {
        const uint2 words = loaded.keys[i];
        even[0] = codes_as_f16(words.x, kEvenCodes), even[1] = codes_as_f16(words.x, kOddCodes);
        odd[0] = codes_as_f16(words.y, kEvenCodes), odd[1] = codes_as_f16(words.y, kOddCodes);
    }

    DEVICE void values(const Loaded& loaded, int tile, int, u32 (&even)[2], u32 (&odd)[2]) {
        const uint2 words = loaded.keys[tile];
        even[0] = transpose8x8(codes_as_bf16(words.x, kEvenCodes));
        even[1] = transpose8x8(codes_as_bf16(words.y, kEvenCodes));
        odd[0] = transpose8x8(codes_as_bf16(words.x, kOddCodes));
        odd[1] = transpose8x8(codes_as_bf16(words.y, kOddCodes));
    }

    DEVICE void multiply(float (&sums)[4], const u32 (&a)[4], const u32 (&b)[2]) { mma_f16(sums, a, b); }
};

// Tokens as in Int8Tile; a register of keys holds elements 4 member and the next, or the two after them.
template <class Parts, int Key>
struct Bf16Latent {
    typedef Bf16Kv Codes;
    typedef KvHead<Bf16Kv, Key, 0> Head;
    static constexpr bool kMayBeNan = true, kGrouped = false;
    struct Loaded {
        uint2 keys[Parts::kSteps][2];
        float4 key_scales, value_scales;
    };

    DEVICE int token(int column, int half) { return 2 * column + half; }
    DEVICE float scale(float4, int, int) { return 1.0f; }

    DEVICE float4 four(const float* even, const float* odd) {
        return make_float4(even[0], even[1], odd[0], odd[1]);
    }

    DEVICE uint2 operand(const float* query, float factor, QueryLane lane) {
        const float4 q = *reinterpret_cast<const float4*>(query + 4 * lane.member);
        return make_uint2(pack_bf16(q.x * factor, q.y * factor), pack_bf16(q.z * factor, q.w * factor));
    }

    DEVICE Loaded load(const Head& head, int token, int, int valid, int warp, QueryLane lane) {
        Loaded loaded;
#pragma unroll
        for (int i = 0; i < 2 * Parts::kSteps; ++i) {
            const int word = 8 * Parts::step(i / 2, warp) + 2 * lane.member + i % 2;
            const u8* const words = head.keys + key_word_offset<Bf16Kv, Key>(token + 2 * lane.group, word);
            uint2 pair = make_uint2(0, 0);
            if (Parts::has(i / 2, warp) && 2 * lane.group < valid)
                pair = load_once(reinterpret_cast<const uint2*>(words));
            if (2 * lane.group + 1 >= valid) pair.y = 0;
            loaded.keys[i / 2][i % 2] = pair;
        }
        return loaded;
    }

    DEVICE void keys(const Loaded& loaded, int i, u32 (&even)[2], u32 (&odd)[2]) {
        const uint2 low = loaded.keys[i][0], high = loaded.keys[i][1];
        even[0] = low.x, even[1] = high.x, odd[0] = low.y, odd[1] = high.y;
    }

    DEVICE void values(const Loaded& loaded, int tile, int, u32 (&even)[2], u32 (&odd)[2]) {
        const uint2 low = loaded.keys[tile][0], high = loaded.keys[tile][1];
        even[0] = transpose8x8(low.x), even[1] = transpose8x8(low.y);
        odd[0] = transpose8x8(high.x), odd[1] = transpose8x8(high.y);
    }

    DEVICE void multiply(float (&sums)[4], const u32 (&a)[4], const u32 (&b)[2]) { mma_bf16(sums, a, b); }
};

template <class Parts, int Key>
struct Int8Wide : Int8Latent<Parts, Key> {
    typedef Int8Latent<Parts, Key> Base;
    typedef KvHead<Int8Kv, Key> Head;
    struct Loaded : Base::Loaded {
        uint2 values[Parts::kTiles];
    };

    DEVICE Loaded load(const Head& head, int token, int page_tokens, int valid, int warp, QueryLane lane) {
        Loaded loaded;
        static_cast<typename Base::Loaded&>(loaded) = Base::load(head, token, page_tokens, valid, warp, lane);
        if (warp == 0) loaded.value_scales = Base::scales(head.value_scales + token, lane);
#pragma unroll
        for (int tile = 0; tile < Parts::kTiles; ++tile) {
            const int offset = value_word_offset<Int8Kv>(page_tokens, token / 4 + lane.member,
                                                         16 * Parts::step(tile, warp) + 2 * lane.group);
            loaded.values[tile] = load_once(reinterpret_cast<const uint2*>(head.values + offset));
        }
        return loaded;
    }

    DEVICE void values(const Loaded& loaded, int tile, int, u32 (&even)[2], u32 (&odd)[2]) {
        const uint2 words = loaded.values[tile];
        even[0] = codes_as_bf16(words.x, kEvenCodes), even[1] = codes_as_bf16(words.x, kOddCodes);
        odd[0] = codes_as_bf16(words.y, kEvenCodes), odd[1] = codes_as_bf16(words.y, kOddCodes);
    }
};

// Several scales per token and head: a warp's elements are of one group, whose scales it loads itself. So its
// part of the scores is scaled before the parts are added, and its weights are its own.
template <class Parts, int Key>
struct Int8Grouped : Int8Wide<Parts, Key> {
    typedef Int8Wide<Parts, Key> Base;
    typedef typename Base::Head Head;
    typedef typename Base::Loaded Loaded;
    static constexpr bool kGrouped = true;

    DEVICE Loaded load(const Head& head, int token, int page_tokens, int valid, int warp, QueryLane lane) {
        Loaded loaded = Base::load(head, token, page_tokens, valid, warp, lane);
        loaded.key_scales = Base::scales(head.key_scales + token, lane);
        loaded.value_scales = Base::scales(head.value_scales + token, lane);
        return loaded;
    }
};

template <class Parts, int Key>
struct Bf16Wide : Bf16Tile {
    typedef KvHead<Bf16Kv, Key> Head;
    struct Loaded {
        u32 keys[Parts::kSteps][4];
        uint2 values[Parts::kTiles][2];
        float4 key_scales, value_scales;
    };

    DEVICE Loaded load(const Head& head, int token, int page_tokens, int, int warp, QueryLane lane) {
        Loaded loaded;
#pragma unroll
        for (int i = 0; i < 4 * Parts::kSteps; ++i) {
            const int word = 8 * Parts::step(i / 4, warp) + lane.member + i % 2 * 4;
            const u8* const words =
                head.keys + key_word_offset<Bf16Kv, Key>(token + lane.group + i / 2 % 2 * 8, word);
            loaded.keys[i / 4][i % 4] = load_once(reinterpret_cast<const u32*>(words));
        }
#pragma unroll
        for (int i = 0; i < 2 * Parts::kTiles; ++i) {
            const int offset = value_word_offset<Bf16Kv>(page_tokens, token / 2 + lane.member + i % 2 * 4,
                                                         16 * Parts::step(i / 2, warp) + 2 * lane.group);
            loaded.values[i / 2][i % 2] = load_once(reinterpret_cast<const uint2*>(head.values + offset));
        }
        return loaded;
    }

    DEVICE void keys(const Loaded& loaded, int i, u32 (&even)[2], u32 (&odd)[2]) {
        even[0] = loaded.keys[i][0], even[1] = loaded.keys[i][1];
        odd[0] = loaded.keys[i][2], odd[1] = loaded.keys[i][3];
    }

    DEVICE void values(const Loaded& loaded, int tile, int valid, u32 (&even)[2], u32 (&odd)[2]) {
        const int first = threadIdx.x % 4 * 2;
        const uint2 near = loaded.values[tile][0], far = loaded.values[tile][1];
        even[0] = only_valid(near.x, first, valid), even[1] = only_valid(far.x, first + 8, valid);
        odd[0] = only_valid(near.y, first, valid), odd[1] = only_valid(far.y, first + 8, valid);
    }

    DEVICE void multiply(float (&sums)[4], const u32 (&a)[4], const u32 (&b)[2]) { mma_bf16(sums, a, b); }
};

// A warp's part of the queries as A operands, as TileQueries of attention_prefill.cuh.
template <class Kind, class Parts, int Key>
struct WideQueries {
    u32 operands[Parts::kSteps][4];
    float factors[2];

    METHOD WideQueries(const TileRows& rows, float scale, int warp, QueryLane lane) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float* const query = rows.queries[i];
            const float largest = largest_element(query, Key, lane);
            const float inverse = largest > 0.0f ? 1.0f / largest : 0.0f;
            factors[i] = largest * scale * kLog2E;
#pragma unroll
            for (int step = 0; step < Parts::kSteps; ++step) {
                uint2 pair = make_uint2(0, 0);
                if (query != nullptr && Parts::has(step, warp))
                    pair = Kind::operand(query + 16 * Parts::step(step, warp), inverse, lane);
                operands[step][i] = pair.x;
                operands[step][i + 2] = pair.y;
            }
        }
    }
};

// Scores of 16 tokens: every warp's part in shared memory, as its lanes hold it, and the sum; after them the
// first warp's scales. Two buffers in turn: between a read and the next write to the same place is the
// barrier of the other.
template <int Warps>
DEVICE void add_scores(float (&scores)[2][4], float4& key_scales, float4& value_scales, bool scaled,
                       int turn) {
    SHARED_MEMORY(shared);
    float4* const parts =
        reinterpret_cast<float4*>(shared) + turn % 2 * ((2 * Warps + 2) * kWarp) + threadIdx.x % kWarp;
    const int warp = threadIdx.x / kWarp;
#pragma unroll
    for (int half = 0; half < 2; ++half)
        parts[(2 * warp + half) * kWarp] =
            make_float4(scores[half][0], scores[half][1], scores[half][2], scores[half][3]);
    if (scaled && warp == 0) {
        parts[2 * Warps * kWarp] = key_scales;
        parts[(2 * Warps + 1) * kWarp] = value_scales;
    }
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 2  // all loads at once would take most registers
        for (int other = 0; other < Warps; ++other) {
            const float4 part = parts[(2 * other + half) * kWarp];
            sum = make_float4(sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w);
        }
        scores[half][0] = sum.x, scores[half][1] = sum.y, scores[half][2] = sum.z, scores[half][3] = sum.w;
    }
    if (scaled) {
        key_scales = parts[2 * Warps * kWarp];
        value_scales = parts[(2 * Warps + 1) * kWarp];
    }
}

// group: elements that share a scale, where a head has more than one.
struct WideShape {
    int heads, kv_heads, page_tokens, layer_at, window, splits;
    float scale;
    int group;
};

// A warp's part of the scores times its own keys' scales.
template <class Kind>
DEVICE void scale_scores(float (&scores)[2][4], float4 key_scales) {
#pragma unroll
    for (int i = 0; i < 8; ++i) scores[i / 4][i % 4] *= Kind::scale(key_scales, i / 4, i % 2);
}

// 16 tokens from `first` on; `end`: of what the tile sees.
template <class Kind, class Parts, int Key, int Warps>
DEVICE void attend_wide(const typename Kind::Loaded& loaded, int first, int end, int turn,
                        const TileRows& rows, const WideQueries<Kind, Parts, Key>& queries, QueryLane lane,
                        TileSoftmax<2 * Parts::kTiles>& state) {
    const int warp = threadIdx.x / kWarp;
    float scores[2][4] = {};
#pragma unroll
    for (int step = 0; step < Parts::kSteps; ++step) {
        if (!Parts::has(step, warp)) continue;  // a whole warp
        u32 even[2], odd[2];
        Kind::keys(loaded, step, even, odd);
        Kind::multiply(scores[0], queries.operands[step], even);
        Kind::multiply(scores[1], queries.operands[step], odd);
    }
    float4 key_scales[1] = {loaded.key_scales}, value_scales[1] = {loaded.value_scales};
    if (Kind::kGrouped) {
        scale_scores<Kind>(scores, key_scales[0]);
        key_scales[0] = make_float4(1.0f, 1.0f, 1.0f, 1.0f);
    }
    constexpr bool kShared = Kind::Codes::kBytes == 1 && !Kind::kGrouped;
    add_scores<Warps>(scores, key_scales[0], value_scales[0], kShared, turn);
    weigh_tile<Kind>(scores, first, rows, queries.factors, key_scales, value_scales, lane, state);
    u32 weights[4];
    weights_operand(scores[0], scores[1], weights);
#pragma unroll
    for (int tile = 0; tile < Parts::kTiles; ++tile) {
        u32 even[2], odd[2];
        Kind::values(loaded, tile, end - first, even, odd);
        mma_bf16(state.sums[2 * tile], weights, even);
        mma_bf16(state.sums[2 * tile + 1], weights, odd);
    }
}

template <template <class, int> class Kind_, int Key, int Value, int Warps>
DEVICE void attention_wide(const float* q, const u64* pages, const int* tiles, const float* sinks,
                           float* partial, float* out, const WideShape& shape) {
    typedef WideParts<Key, Value, Warps> Parts;
    typedef Kind_<Parts, Key> Kind;
    const int warp = threadIdx.x / kWarp, index = gridDim.z - 1 - blockIdx.z;
    const QueryLane lane = {static_cast<int>(threadIdx.x) % kWarp / 4, static_cast<int>(threadIdx.x) % 4};
    const RowTile tile = row_tile(tiles, index);
    const int per_kv_head = shape.heads / shape.kv_heads, groups = (per_kv_head + 15) / 16;
    const int kv_head = blockIdx.y / groups, in_head = blockIdx.y % groups * 16;
    const int heads = min(16, per_kv_head - in_head), first_head = kv_head * per_kv_head + in_head;
    const TileRows rows(q, tile, 0, heads, shape.heads, first_head, Key, shape.window, lane);
    const WideQueries<Kind, Parts, Key> queries(rows, shape.scale, warp, lane);
    const int begin = shape.window ? max(0, tile.position + 1 - shape.window) : 0;
    const int end = tile.position + tile.tokens, first = begin / kKvTokens;
    const int chunks = (end + kKvTokens - 1) / kKvTokens - first;
    const int per_split = (chunks + shape.splits - 1) / shape.splits, from = blockIdx.x * per_split;
    const int stop = min(from + per_split, chunks);
    const auto load = [&](int chunk) {
        const int token = (first + chunk) * kKvTokens;
        const u64 page = pages[tile.first_page + token / shape.page_tokens];
        typename Kind::Head head(reinterpret_cast<const u8*>(page) + shape.layer_at, shape.kv_heads, kv_head,
                                 shape.page_tokens,
                                 Kind::kGrouped ? (Key + shape.group - 1) / shape.group : 1);
        if (Kind::kGrouped) head.to_group(16 * Parts::step(0, warp) / shape.group, shape.page_tokens);
        return Kind::load(head, token % shape.page_tokens, shape.page_tokens, end - token, warp, lane);
    };
    TileSoftmax<2 * Parts::kTiles> state;
    state.clear();
    typename Kind::Loaded next;
    if (from < stop) next = load(from);
    for (int chunk = from; chunk < stop; ++chunk) {
        const typename Kind::Loaded loaded = next;
        if (chunk + 1 < stop) next = load(chunk + 1);
        attend_wide<Kind, Parts, Key, Warps>(loaded, (first + chunk) * kKvTokens, end, chunk, rows, queries,
                                             lane, state);
    }
    float* targets[2];
    const float* own_sinks[2];
    const int first_value = 16 * Parts::step(0, warp);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = lane.group + 8 * i, head = first_head + row % heads;
        const size_t part = (static_cast<size_t>(index) * shape.heads + head) * shape.splits + blockIdx.x;
        const size_t place = TileRows::place(tile, row, heads, shape.heads, first_head);
        float* const target =
            partial != nullptr ? partial + part * (Value + 2) : out + place * Value + first_value;
        targets[i] = rows.end[i] > 0 ? target : nullptr;
        own_sinks[i] = sinks != nullptr ? sinks + head : nullptr;
    }
    if (partial != nullptr)
        write_partial<Kind>(state, targets, Value, first_value, lane);
    else
        write_rows<Kind>(state, targets, own_sinks, lane);
}

#define ATTENTION_WIDE(kernel, Kind, key, value, warps)                                                     \
    extern "C" __global__ void __launch_bounds__(warps* kWarp, 512 / (warps * kWarp)) kernel(               \
        const float* q, const u64* pages, const int* tiles, const float* sinks, float* partial, float* out, \
        int heads, int kv_heads, int page_tokens, int layer_at, int window, int splits, float scale) {      \
        attention_wide<Kind, key, value, warps>(                                                            \
            q, pages, tiles, sinks, partial, out,                                                           \
            {heads, kv_heads, page_tokens, layer_at, window, splits, scale, 1});                            \
    }                                                                                                       \
    EXPORT_KERNEL(kernel)
