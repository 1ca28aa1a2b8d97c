// Attention of single query tokens over the paged KV cache, split over the KV length (flash decoding).
// q is f32 [rows, heads * Dim]. tiles holds four ints (RowTile) per row that takes part: the row, 1, its
// token's position, where its sequence's pages begin in `pages`. The row sees tokens
// max(0, position + 1 - window) .. position (window 0: all). The layer's block lies `layer_at` bytes into a
// page. A block takes up to eight query heads of one KV head and one split of the tokens; its warps take 16
// tokens in turn. With out, f32 [rows, heads * Dim], and sinks, f32 [heads] (natural logits) or null, one
// split finishes the results. With partial instead, f32 [tiles, heads, splits, Dim + 2], splits leave the sum
// weighted by 2^(score - largest), then the largest score (in powers of two) and the sum of weights, and the
// last of a row's and group's blocks joins them (attention_join.cuh); tickets: one per group and tile, or
// null, and attention_combine joins. Grid: (splits, kv_heads * groups of eight query heads, tiles). Must
// move: the visible keys and values with their scales, once per group of eight query heads.
//
// Keys are the A operand of mma (16 tokens x 16 elements), eight queries the B operand; the weights then turn
// into the B operand of values x weights by one transposition in registers. What a word of a page holds is
// what a register of a fragment wants: nothing is reordered in memory. int8 codes become f16 (keys) and bf16
// (values: their weights carry scales of any size) exactly.
#pragma once

#include "attention_common.cuh"
#include "attention_join.cuh"
#include "last_block.cuh"

constexpr int kAttentionWarps = 4, kAttentionThreads = kAttentionWarps * kWarp, kQueries = 8;
// The next two classes say for each kind of page: which token a row of the A operand is, and the operands.
template <int Dim>
struct Int8Attention : Int8Query {
    typedef Int8Kv Codes;
    static constexpr int kSteps = Dim / 16, kTiles = Dim / 16;

    struct Keys {
        uint2 words[kSteps];
    };
    struct Values {
        uint2 words[kTiles];
    };

    DEVICE int token(int row) { return row % 8 * 2 + row / 8; }

    DEVICE Keys load_keys(const KvHead<Codes, Dim>& head, int token, QueryLane lane) {
        Keys loaded;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const u8* const words =
                head.keys + key_word_offset<Codes, Dim>(token + 2 * lane.group, 4 * step + lane.member);
            loaded.words[step] = load_once(reinterpret_cast<const uint2*>(words));
        }
        return loaded;
    }

    DEVICE Values load_values(const KvHead<Codes, Dim>& head, int token, int page_tokens, QueryLane lane) {
        Values loaded;
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            const u8* const words =
                head.values +
                value_word_offset<Codes>(page_tokens, token / 4 + lane.member, 16 * tile + 2 * lane.group);
            loaded.words[tile] = load_once(reinterpret_cast<const uint2*>(words));
        }
        return loaded;
    }

    DEVICE float2 key_scales(const KvHead<Codes, Dim>& head, int token, QueryLane lane) {
        return *reinterpret_cast<const float2*>(head.key_scales + token + 2 * lane.group);
    }

    DEVICE float2 value_scales(const KvHead<Codes, Dim>& head, int token, QueryLane lane) {
        return *reinterpret_cast<const float2*>(head.value_scales + token + 2 * lane.group);
    }

    DEVICE void multiply_keys(float (&scores)[4], const Keys& keys, int step, const u32 (&query)[2]) {
        const uint2 words = keys.words[step];
        const u32 a[4] = {codes_as_f16(words.x, kEvenCodes), codes_as_f16(words.y, kEvenCodes),
                          codes_as_f16(words.x, kOddCodes), codes_as_f16(words.y, kOddCodes)};
        mma_f16(scores, a, query);
    }

    DEVICE void multiply_values(float (&sums)[4], const Values& values, int tile, const u32 (&weights)[2],
                                int) {
        const uint2 words = values.words[tile];
        const u32 a[4] = {codes_as_bf16(words.x, kEvenCodes), codes_as_bf16(words.y, kEvenCodes),
                          codes_as_bf16(words.x, kOddCodes), codes_as_bf16(words.y, kOddCodes)};
        mma_bf16(sums, a, weights);
    }
};

template <int Dim>
struct Bf16Attention : Bf16Query {
    typedef Bf16Kv Codes;
    static constexpr int kSteps = Dim / 16, kTiles = Dim / 16;

    struct Keys {
        u32 words[kSteps][4];
    };
    struct Values {
        uint2 words[kTiles][2];
    };

    DEVICE int token(int row) { return row; }

    DEVICE Keys load_keys(const KvHead<Codes, Dim>& head, int token, QueryLane lane) {
        Keys loaded;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int offset = key_word_offset<Codes, Dim>(token + lane.group + i % 2 * 8,
                                                               8 * step + lane.member + i / 2 * 4);
                loaded.words[step][i] = load_once(reinterpret_cast<const u32*>(head.keys + offset));
            }
        }
        return loaded;
    }

    DEVICE Values load_values(const KvHead<Codes, Dim>& head, int token, int page_tokens, QueryLane lane) {
        Values loaded;
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int offset = value_word_offset<Codes>(page_tokens, token / 2 + lane.member + half * 4,
                                                            16 * tile + 2 * lane.group);
                loaded.words[tile][half] = load_once(reinterpret_cast<const uint2*>(head.values + offset));
            }
        }
        return loaded;
    }

    DEVICE float2 key_scales(const KvHead<Codes, Dim>&, int, QueryLane) { return make_float2(1.0f, 1.0f); }
    DEVICE float2 value_scales(const KvHead<Codes, Dim>&, int, QueryLane) { return make_float2(1.0f, 1.0f); }

    DEVICE void multiply_keys(float (&scores)[4], const Keys& keys, int step, const u32 (&query)[2]) {
        mma_bf16(scores, keys.words[step], query);
    }

    DEVICE void multiply_values(float (&sums)[4], const Values& values, int tile, const u32 (&weights)[2],
                                int valid) {
        const int first = threadIdx.x % 4 * 2;
        const uint2 near = values.words[tile][0], far = values.words[tile][1];
        const u32 a[4] = {only_valid(near.x, first, valid), only_valid(near.y, first, valid),
                          only_valid(far.x, first + 8, valid), only_valid(far.y, first + 8, valid)};
        mma_bf16(sums, a, weights);
    }
};

// Eight queries as B operands, each divided by its largest element: factors give heads 2 member and the next
// back what was taken, with the softmax's scale.
template <class Kind, int Dim>
struct Queries {
    u32 operands[Kind::kSteps][2];
    float2 factors;

    METHOD Queries(const float* rows, int count, float scale, QueryLane lane) {
        const bool present = lane.group < count;
        const float* const query = rows + lane.group * Dim;
        const float largest = largest_element(present ? query : nullptr, Dim, lane);
        const float inverse = largest > 0.0f ? 1.0f / largest : 0.0f;
#pragma unroll
        for (int step = 0; step < Kind::kSteps; ++step) {
            uint2 pair = make_uint2(0, 0);
            if (present) pair = Kind::operand(query + 16 * step, inverse, lane);
            operands[step][0] = pair.x;
            operands[step][1] = pair.y;
        }
        const float factor = largest * scale * kLog2E;
        factors.x = __shfl_sync(FULL, factor, lane.member * 8);
        factors.y = __shfl_sync(FULL, factor, lane.member * 8 + 4);
    }
};

// What a warp knows after some tokens, of heads 2 member and the next: sums[tile][i] is element
// 2 * group + i / 2 of the tile, head i % 2. weights are this lane's part of the sum of weights.
template <int Tiles>
struct Softmax {
    float sums[Tiles][4];
    float2 largest, weights;

    METHOD void clear() {
#pragma unroll
        for (int tile = 0; tile < Tiles; ++tile) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[tile][i] = 0.0f;
        }
        largest = make_float2(kNothing, kNothing);
        weights = make_float2(0.0f, 0.0f);
    }

    METHOD void rescale(float2 factors) {
#pragma unroll
        for (int tile = 0; tile < Tiles; ++tile) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[tile][i] *= i % 2 ? factors.y : factors.x;
        }
        weights = make_float2(weights.x * factors.x, weights.y * factors.y);
    }
};

// Over the eight groups of a warp.
DEVICE float over_groups_max(float value) {
    for (int bits = 4; bits < kWarp; bits <<= 1) value = fmaxf(value, __shfl_xor_sync(FULL, value, bits));
    return value;
}

DEVICE float over_groups_sum(float value) {
    for (int bits = 4; bits < kWarp; bits <<= 1) value += __shfl_xor_sync(FULL, value, bits);
    return value;
}

// Visible tokens of a page's 16, [begin, end), both possibly outside.
struct Visible {
    int begin, end;
    METHOD bool has(int token) const { return token >= begin && token < end; }
};

// Scores to weights; scores[i] is row `group + i / 2 * 8`, head i % 2.
template <class Kind, int Tiles>
DEVICE void weigh(float (&scores)[4], float2 factors, float2 scales, Visible visible, QueryLane lane,
                  Softmax<Tiles>& state) {
    const bool seen[2] = {visible.has(Kind::token(lane.group)), visible.has(Kind::token(lane.group + 8))};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        scores[i] *= (i % 2 ? factors.y : factors.x) * (i / 2 ? scales.y : scales.x);
        if (!seen[i / 2]) scores[i] = kNothing;
    }
    const float first = over_groups_max(fmaxf(scores[0], scores[2]));
    const float second = over_groups_max(fmaxf(scores[1], scores[3]));
    const float2 largest = make_float2(fmaxf(state.largest.x, first), fmaxf(state.largest.y, second));
    state.rescale(
        make_float2(exp2_approx(state.largest.x - largest.x), exp2_approx(state.largest.y - largest.y)));
    state.largest = largest;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        scores[i] = seen[i / 2] ? exp2_approx(scores[i] - (i % 2 ? largest.y : largest.x)) : 0.0f;
    state.weights =
        make_float2(state.weights.x + scores[0] + scores[2], state.weights.y + scores[1] + scores[3]);
}

template <class Kind, int Dim>
DEVICE void attend_chunk(const KvHead<typename Kind::Codes, Dim>& head, int token, int page_tokens,
                         Visible visible, const Queries<Kind, Dim>& queries, QueryLane lane,
                         Softmax<Kind::kTiles>& state) {
    const typename Kind::Keys keys = Kind::load_keys(head, token, lane);
    const typename Kind::Values values = Kind::load_values(head, token, page_tokens, lane);
    const float2 key_scales = Kind::key_scales(head, token, lane);
    float2 value_scales = Kind::value_scales(head, token, lane);
    if (!visible.has(Kind::token(lane.group))) value_scales.x = 0.0f;  // may be anything
    if (!visible.has(Kind::token(lane.group + 8))) value_scales.y = 0.0f;
    float scores[4] = {};
#pragma unroll
    for (int step = 0; step < Kind::kSteps; ++step)
        Kind::multiply_keys(scores, keys, step, queries.operands[step]);
    weigh<Kind>(scores, queries.factors, key_scales, visible, lane, state);
    const u32 weights[2] = {transpose8x8(pack_bf16(scores[0] * value_scales.x, scores[1] * value_scales.x)),
                            transpose8x8(pack_bf16(scores[2] * value_scales.y, scores[3] * value_scales.y))};
#pragma unroll
    for (int tile = 0; tile < Kind::kTiles; ++tile)
        Kind::multiply_values(state.sums[tile], values, tile, weights, visible.end);
}

// The warps' results in shared memory: sums [warp][head][Dim + 4], then (largest, weights) [warp][head].
template <int Dim>
struct WarpResults {
    static constexpr int kStride = Dim + 4;  // spreads the 8-byte writes of fragments over all banks
    float* sums;
    float2* states;

    template <int Tiles>
    METHOD void write(int warp, QueryLane lane, const Softmax<Tiles>& state) const {
        const float first = over_groups_sum(state.weights.x), second = over_groups_sum(state.weights.y);
        const int head = warp * kQueries + 2 * lane.member;
#pragma unroll
        for (int tile = 0; tile < Tiles; ++tile) {
            float* const place = sums + head * kStride + 16 * tile + 2 * lane.group;
            *reinterpret_cast<float2*>(place) = make_float2(state.sums[tile][0], state.sums[tile][2]);
            *reinterpret_cast<float2*>(place + kStride) =
                make_float2(state.sums[tile][1], state.sums[tile][3]);
        }
        if (lane.group == 0) {
            states[head] = make_float2(state.largest.x, first);
            states[head + 1] = make_float2(state.largest.y, second);
        }
    }

    // Element `element` of a head over all warps, and the head's state.
    METHOD float total(int head, int element, float2& state) const {
        float largest = kNothing, sum = 0.0f, weights = 0.0f;
        for (int warp = 0; warp < kAttentionWarps; ++warp)
            largest = fmaxf(largest, states[warp * kQueries + head].x);
        for (int warp = 0; warp < kAttentionWarps; ++warp) {
            const float2 own = states[warp * kQueries + head];
            const float factor = exp2_approx(own.x - largest);
            weights += own.y * factor;
            sum += sums[(warp * kQueries + head) * kStride + element] * factor;
        }
        state = make_float2(largest, weights);
        return sum;
    }
};

struct DecodeShape {
    int heads, kv_heads, page_tokens, layer_at, window, splits;
    float scale;
};

template <class Kind, int Dim>
DEVICE void attention_decode(const float* q, const u64* pages, const int* tiles, const float* sinks,
                             float* partial, float* out, u32* tickets, const DecodeShape& shape) {
    SHARED_MEMORY(shared);
    const WarpResults<Dim> results = {
        reinterpret_cast<float*>(shared),
        reinterpret_cast<float2*>(shared + kAttentionWarps * kQueries * WarpResults<Dim>::kStride * 4)};
    const int warp = threadIdx.x / kWarp, in_warp = threadIdx.x % kWarp;
    const RowTile tile = row_tile(tiles, blockIdx.z);
    const QueryLane lane = {in_warp / 4, in_warp % 4};
    const int per_kv_head = shape.heads / shape.kv_heads, groups = (per_kv_head + kQueries - 1) / kQueries;
    const int kv_head = blockIdx.y / groups, in_head = blockIdx.y % groups * kQueries;
    const int head = kv_head * per_kv_head + in_head, count = min(kQueries, per_kv_head - in_head);
    const size_t query = static_cast<size_t>(tile.first_row) * shape.heads + head;
    const Queries<Kind, Dim> queries(q + query * Dim, count, shape.scale, lane);
    Softmax<Kind::kTiles> state;
    state.clear();
    const int end = tile.position + 1, begin = shape.window ? max(0, end - shape.window) : 0;
    const int first = begin / kKvTokens, chunks = (end + kKvTokens - 1) / kKvTokens - first;
    const int per_split = (chunks + shape.splits - 1) / shape.splits, from = blockIdx.x * per_split;
    const int stop = min(from + per_split, chunks);
    for (int chunk = from + warp; chunk < stop; chunk += kAttentionWarps) {
        const int token = (first + chunk) * kKvTokens;
        const u64 page = pages[tile.first_page + token / shape.page_tokens];
        const KvHead<typename Kind::Codes, Dim> kv(reinterpret_cast<const u8*>(page) + shape.layer_at,
                                                   shape.kv_heads, kv_head, shape.page_tokens);
        attend_chunk<Kind, Dim>(kv, token % shape.page_tokens, shape.page_tokens,
                                {begin - token, end - token}, queries, lane, state);
    }
    results.write(warp, lane, state);
    __syncthreads();
    for (int i = threadIdx.x; i < count * Dim; i += kAttentionThreads) {
        const int own_head = head + i / Dim, element = i % Dim;
        float2 joined;
        const float sum = results.total(i / Dim, element, joined);
        if (partial == nullptr) {
            const float* const sink = sinks != nullptr ? sinks + own_head : nullptr;
            const size_t row = static_cast<size_t>(tile.first_row) * shape.heads + own_head;
            out[row * Dim + element] = sum * finishing_factor(joined.x, joined.y, sink);
            continue;
        }
        const size_t part =
            (static_cast<size_t>(blockIdx.z) * shape.heads + own_head) * shape.splits + blockIdx.x;
        float* const target = partial + part * (Dim + 2);
        target[element] = sum;
        if (element == 0) {
            target[Dim] = joined.x;
            target[Dim + 1] = joined.y;
        }
    }
    if (tickets == nullptr || !last_of(tickets + blockIdx.z * gridDim.y + blockIdx.y, shape.splits)) return;
    const size_t first_part = (static_cast<size_t>(blockIdx.z) * shape.heads + head) * shape.splits;
    const Splits splits = {partial + first_part * (Dim + 2), sinks != nullptr ? sinks + head : nullptr, count,
                           shape.splits, Dim};
    join_splits(splits, reinterpret_cast<float*>(shared), out + query * Dim);
}

#define ATTENTION_DECODE(name, dim, ...)                                                                    \
    extern "C" __global__ void __launch_bounds__(kAttentionThreads, 4) attention_decode_##name##_##dim(     \
        const float* q, const u64* pages, const int* tiles, const float* sinks, float* partial, float* out, \
        u32* tickets, int heads, int kv_heads, int page_tokens, int layer_at, int window, int splits,       \
        float scale) {                                                                                      \
        attention_decode<__VA_ARGS__<dim>, dim>(                                                            \
            q, pages, tiles, sinks, partial, out, tickets,                                                  \
            {heads, kv_heads, page_tokens, layer_at, window, splits, scale});                               \
    }                                                                                                       \
    EXPORT_KERNEL(attention_decode_##name##_##dim)
