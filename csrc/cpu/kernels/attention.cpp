// Attention of a tile of queries over one block of KV: scores, online softmax, weighted values. Every query
// goes through the same operations in the same order, however many share the tile and on every instruction
// set, so its result depends on neither.
#include "cpu/kernels/attention_kv.h"
#include "cpu/kernels/attention_prepare.h"
#include "cpu/kernels/attention_softmax.h"
#include "cpu/kernels/tables.h"

namespace strata::cpu::STRATA_ISA {
namespace {

STRATA_INLINE void fetch(const uint8_t* line) {
    _mm_prefetch(reinterpret_cast<const char*>(line), _MM_HINT_T1);
}

// sum[t] += chunks [from, to) of keys times x[t]; meanwhile the lines of the block ahead are fetched.
template <class Kv, bool kApart, int T>
STRATA_INLINE void add_keys(const KvBlock& block, const KvBlock& ahead, int pair, int from, int to,
                            const typename Kv::X* const (&x)[T], typename Kv::Sum (&sum)[T]) {
    constexpr int kStep = kApart ? kChunkBytes / 2 : kChunkBytes;
    const uint8_t* low = block.keys[2 * pair];
    const uint8_t* high = block.keys[2 * pair + 1];
    const uint8_t* next_low = ahead.keys[2 * pair];
    const uint8_t* next_high = ahead.keys[2 * pair + 1];
    for (int step = from; step < to; step++) {
        fetch(next_low + step * kStep);
        if constexpr (kApart) fetch(next_high + step * kStep);
        const Ints chunk =
            kApart ? load_halves(low + step * kStep, high + step * kStep) : load_ints(low + step * kStep);
        add_chunk<Kv, T>(chunk, x, step, sum);
    }
}

// Scores of T queries and the 16 tokens of octets 2 * pair and 2 * pair + 1, where all of a key's elements
// have one scale or none.
template <class Kv, bool kApart, int T>
static void score(const KvShape& shape, const KvBlock& block, const KvBlock& ahead, int pair, int query,
                  AttentionTile& tile) {
    const typename Kv::X* x[T];
    typename Kv::Sum sum[T];
    for (int t = 0; t < T; t++) {
        x[t] = static_cast<const typename Kv::X*>(tile.x) + (query + t) * tile.query_stride;
        sum[t] = Kv::begin_sum(Kv::kScaled ? tile.groups[0].x_start[query + t] : 0);
    }
    add_keys<Kv, kApart, T>(block, ahead, pair, 0, shape.key_steps, x, sum);
    for (int t = 0; t < T; t++) {
        Floats scores = Kv::end_sum(sum[t]);
        if constexpr (Kv::kScaled)
            scores = mul(mul(scores, set_floats(tile.x_scale[query + t])),
                         load_halves(block.key_scales[2 * pair], block.key_scales[2 * pair + 1]));
        store_floats(tile.scores[query + t] + pair * kLanes, scores);
    }
}

// The same group by group.
template <class Kv, bool kApart, int T>
static void score_groups(const KvShape& shape, const KvBlock& block, const KvBlock& ahead, int pair,
                         int query, AttentionTile& tile) {
    const typename Kv::X* x[T];
    for (int t = 0; t < T; t++)
        x[t] = static_cast<const typename Kv::X*>(tile.x) + (query + t) * tile.query_stride;
    for (int group = 0; group < shape.key_groups; group++) {
        typename Kv::Sum sum[T];
        for (int t = 0; t < T; t++) sum[t] = Kv::begin_sum(tile.groups[group].x_start[query + t]);
        const int from = group * shape.group_steps, end = from + shape.group_steps;
        const int to = end < shape.key_steps ? end : shape.key_steps;
        add_keys<Kv, kApart, T>(block, ahead, pair, from, to, x, sum);
        const size_t at = group * shape.scale_stride;
        const Floats scales =
            load_halves(block.key_scales[2 * pair] + at, block.key_scales[2 * pair + 1] + at);
        for (int t = 0; t < T; t++) {
            float* scores = tile.scores[query + t] + pair * kLanes;
            const Floats before = group == 0 ? set_floats(0.0f) : load_floats(scores);
            store_floats(scores,
                         fma(mul(Kv::end_sum(sum[t]), set_floats(tile.x_scale[query + t])), scales, before));
        }
    }
}

template <class Kv>
STRATA_INLINE const typename Kv::X* weights_of(const AttentionTile& tile, int group, int query) {
    if constexpr (Kv::kScaled)
        return tile.groups[group].codes[query];
    else
        return tile.scores[query];
}

// The tokens of an octet that is not full, one by one: behind the last token may lie NaN, which a weight of 0
// would not silence. (Integer codes have no NaN; they take the whole octet.)
template <class Kv, int T>
STRATA_INLINE void add_tail(const uint8_t* chunks, int tokens, const float* const (&weights)[T], int first,
                            typename Kv::Sum (&sum)[T]) {
    for (int token = 0; token < tokens; token++) {
        typename Kv::Part part[Kv::kParts];
        Kv::unpack(load_ints(chunks + token / Kv::kPerLane * kChunkBytes), part);
        for (int t = 0; t < T; t++)
            sum[t] = Kv::mac(sum[t], part[token % Kv::kPerLane], weights[t] + first + token);
    }
}

// 16 elements of T queries' values, from `chunk` * 16 on: the old sums shrunk plus the block's.
template <class Kv, int T>
static void add_values(const KvShape& shape, const KvBlock& block, const KvBlock& ahead, int chunk, int query,
                       AttentionTile& tile) {
    constexpr int kSteps = kOctet / Kv::kPerLane;
    const size_t offset = chunk * shape.value_chunk_bytes, dim = shape.value_chunks * kLanes;
    const int group = Kv::kGrouped ? chunk / shape.group_chunks : 0;
    float* values = tile.values + query * dim + chunk * kLanes;
    const typename Kv::X* weights[T];
    typename Kv::Sum sum[T];
    for (int t = 0; t < T; t++) {
        weights[t] = weights_of<Kv>(tile, group, query + t);
        if constexpr (Kv::kScaled)
            sum[t] = Kv::begin_sum(tile.groups[group].start[query + t]);
        else
            sum[t] = mul(load_floats(values + t * dim), set_floats(tile.shrink[query + t]));
    }
    const int octets = (block.tokens + (Kv::kScaled ? kOctet - 1 : 0)) / kOctet;
    for (int octet = 0; octet < octets; octet++) {
        const uint8_t* at = block.values[octet] + offset;
        const uint8_t* next = ahead.values[octet] + offset;
#pragma GCC unroll 8
        for (int step = 0; step < kSteps; step++) {
            fetch(next + step * kChunkBytes);
            add_chunk<Kv, T>(load_ints(at + step * kChunkBytes), weights, octet * kSteps + step, sum);
        }
    }
    if constexpr (!Kv::kScaled)
        if (const int rest = block.tokens % kOctet)
            add_tail<Kv, T>(block.values[octets] + offset, rest, weights, octets * kOctet, sum);
    for (int t = 0; t < T; t++) {
        Floats result = Kv::end_sum(sum[t]);
        if constexpr (Kv::kScaled)
            result = fma(result, set_floats(tile.groups[group].factor[query + t]),
                         mul(load_floats(values + t * dim), set_floats(tile.shrink[query + t])));
        store_floats(values + t * dim, result);
    }
}

// What is left to do for a range of queries, whose number T is known when it is compiled.
template <class Kv, bool kApart>
struct Scores {
    const KvShape& shape;
    const KvBlock &block, &ahead;
    int pair;
    AttentionTile& tile;
    template <int T>
    STRATA_INLINE void run(const Scores& s, int query) {
        if constexpr (Kv::kGrouped)
            score_groups<Kv, kApart, T>(s.shape, s.block, s.ahead, s.pair, query, s.tile);
        else
            score<Kv, kApart, T>(s.shape, s.block, s.ahead, s.pair, query, s.tile);
    }
};

template <class Kv>
struct Values {
    const KvShape& shape;
    const KvBlock &block, &ahead;
    int chunk;
    AttentionTile& tile;
    template <int T>
    STRATA_INLINE void run(const Values& v, int query) {
        add_values<Kv, T>(v.shape, v.block, v.ahead, v.chunk, query, v.tile);
    }
};

// All queries, kTile at a time while there are so many.
template <class Work>
STRATA_INLINE void sweep(int queries, const Work& work) {
    int query = 0;
    for (; query + kTile <= queries; query += kTile) Work::template run<kTile>(work, query);
    if constexpr (kTile > 4)
        for (; query + 4 <= queries; query += 4) Work::template run<4>(work, query);
    if (queries - query == 3) return Work::template run<3>(work, query);
    if (queries - query == 2) return Work::template run<2>(work, query);
    if (queries - query == 1) Work::template run<1>(work, query);
}

template <class Kv>
static void attend(const KvShape& shape, const KvBlock& block, const KvBlock& ahead, AttentionTile& tile) {
    for (int pair = 0; pair * kLanes < block.tokens; pair++) {
        if (shape.octets_apart)
            sweep(tile.queries, Scores<Kv, true>{shape, block, ahead, pair, tile});
        else
            sweep(tile.queries, Scores<Kv, false>{shape, block, ahead, pair, tile});
    }
    weigh_all<Kv>(shape, block, tile);
    for (int chunk = 0; chunk < shape.value_chunks; chunk++)
        sweep(tile.queries, Values<Kv>{shape, block, ahead, chunk, tile});
}

}  // namespace

const AttentionFns kAttention[kKvTypes] = {
    {prepare_int8, attend<Int8Kv>, values_of_keys<Int8Kv>},
    {prepare_f32, attend<Bf16Kv>, values_of_keys<Bf16Kv>},
    {prepare_f32, attend<F32Kv>, values_of_keys<F32Kv>},
    {prepare_int8, attend<Int8GroupKv>, values_of_keys<Int8Kv>},
};

}  // namespace strata::cpu::STRATA_ISA
