// The online softmax of one query over one block of tokens.
#pragma once

#include <cfloat>

#include "cpu/kernels/attention_kv.h"
#include "cpu/kernels/reduce.h"

namespace strata::cpu::STRATA_ISA {
namespace {

// e^x for x <= 0 with relative error below 2e-7; 0 below -87; NaN stays. x = n ln2 + r with ln2 in two parts,
// Taylor to degree 6 on |r| <= ln2 / 2, times 2^n.
STRATA_INLINE Floats exp_floats(Floats x) {
    const Floats limit = set_floats(-87.0f);
    const Floats bounded = max_floats(limit, x);
    const Ints exponent = to_ints(mul(bounded, set_floats(1.44269504f)));
    const Floats n = to_floats(exponent);
    Floats r = fma(n, set_floats(-0.693359375f), bounded);
    r = fma(n, set_floats(2.12194440e-4f), r);
    constexpr float kTerms[] = {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
    Floats p = set_floats(1.0f / 720);
#pragma GCC unroll 6
    for (const float term : kTerms) p = fma(p, r, set_floats(term));
    const Floats power = as_floats(shift_left(add_ints(exponent, set_ints(127)), 23));
    return unless_below(mul(p, power), x, limit);
}

STRATA_INLINE float exp_float(float x) { return _mm256_cvtss_f32(low_half(exp_floats(set_floats(x)))); }

// Scores outside of what the query sees become -inf.
STRATA_INLINE void hide(float* scores, int begin, int end, int vectors) {
    constexpr float kHidden = -__builtin_inff();
    for (int t = 0; t < begin; t++) scores[t] = kHidden;
    for (int t = end; t < vectors * kLanes; t++) scores[t] = kHidden;
}

// Weights w >= 0 become integers, the largest kLargestCode; factor: w = code * factor. `most` holds the
// lanes' largest weight as bits: as integers they order like the floats, and NaN, which must not be lost, is
// largest.
STRATA_INLINE void encode_weights(const float* weights, int query, int vectors, Ints most,
                                  ScaleGroup& group) {
    constexpr float kSmallest = 1e-30f;  // its reciprocal times kLargestCode does not overflow
    const float top = _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(largest(most))));
    const float inverse = top < kSmallest ? 0.0f : kLargestCode / top;
    Ints sum = set_ints(0);
    for (int i = 0; i < vectors; i++) {
        const Floats w = load_floats(weights + i * kLanes);
        const Ints codes = to_ints(mul(w, set_floats(inverse)));
        store_words(group.codes[query] + i * kLanes, codes);
        sum = add_ints(sum, codes);
    }
    group.factor[query] = top / kLargestCode;
    group.start[query] = -kCodeOffset * total(sum);
}

// The same for each group of a value's elements. Weights of tokens that the query does not see are below 0
// here: their scales may be anything.
static void encode_groups(const KvShape& shape, const KvBlock& block, int query, int vectors,
                          AttentionTile& tile) {
    alignas(kChunkBytes) float scaled[kBlockTokens];
    for (int group = 0; group < shape.value_groups; group++) {
        const size_t from = group * shape.scale_stride;
        Ints most = set_ints(0);
        for (int i = 0; i < vectors; i++) {
            const Floats w = load_floats(tile.scores[query] + i * kLanes);
            const Floats scales =
                load_halves(block.value_scales[2 * i] + from, block.value_scales[2 * i + 1] + from);
            const Floats product = unless_below(mul(w, scales), w, set_floats(0.0f));
            most = max_ints(most, as_ints(product));
            store_floats(scaled + i * kLanes, product);
        }
        encode_weights(scaled, query, vectors, most, tile.groups[group]);
    }
}

// A query that sees nothing of the block.
template <class Kv>
STRATA_INLINE void weigh_nothing(const KvShape& shape, AttentionTile& tile, int query, int vectors) {
    tile.shrink[query] = 1.0f;
    for (int i = 0; !Kv::kScaled && i < vectors; i++)
        store_floats(tile.scores[query] + i * kLanes, set_floats(0.0f));
    for (int g = 0; Kv::kScaled && g < shape.value_groups; g++) {
        ScaleGroup& group = tile.groups[g];
        group.factor[query] = 0.0f;
        group.start[query] = 0;
        for (int i = 0; i < vectors; i++) store_words(group.codes[query] + i * kLanes, set_ints(0));
    }
}

// What a query sees of the block in its scores, and the largest of them, in `top`.
STRATA_INLINE float largest_seen(int query, int vectors, AttentionTile& tile) {
    float* scores = tile.scores[query];
    hide(scores, tile.begin[query], tile.end[query], vectors);
    Floats highest = load_floats(scores);
    for (int i = 1; i < vectors; i++) highest = max_floats(highest, load_floats(scores + i * kLanes));
    return largest(highest);
}

// Moves tops and shrinks of all queries on, 16 at a time. block_tops: see largest_seen.
STRATA_INLINE void raise_tops(const float* block_tops, AttentionTile& tile) {
    for (int query = 0; query < tile.queries; query += kLanes) {
        const Floats before = load_floats(tile.top + query);
        const Floats top = max_floats(load_floats(block_tops + query), before);  // NaN does not count
        store_floats(tile.shrink + query, exp_floats(sub(before, top)));
        store_floats(tile.top + query, top);
    }
}

// Turns a query's scores into weights and moves its sums on. Returns the largest weight of each lane, as
// encode_weights takes it.
template <class Kv>
STRATA_INLINE Ints weigh(const KvBlock& block, int query, int vectors, AttentionTile& tile) {
    float* scores = tile.scores[query];
    const Floats top = set_floats(tile.top[query]);
    Floats sums = mul(load_floats(tile.sums[query]), set_floats(tile.shrink[query]));
    Ints most = set_ints(0);
    for (int i = 0; i < vectors; i++) {
        Floats w = exp_floats(sub(load_floats(scores + i * kLanes), top));
        sums = add(sums, w);
        if constexpr (Kv::kGrouped) {
            // Minus 1 where hidden.
            const Floats seen =
                unless_below(set_floats(1.0f), load_floats(scores + i * kLanes), set_floats(-FLT_MAX));
            w = add(w, sub(seen, set_floats(1.0f)));
        } else if constexpr (Kv::kScaled) {
            w = mul(w, load_halves(block.value_scales[2 * i], block.value_scales[2 * i + 1]));
            w = unless_below(w, load_floats(scores + i * kLanes), set_floats(-FLT_MAX));
            most = max_ints(most, as_ints(w));
        }
        store_floats(scores + i * kLanes, w);
    }
    store_floats(tile.sums[query], sums);
    return most;
}

// The block's scores of all queries become weights. Step by step for all of them: what one query waits for in
// a step, another one fills.
template <class Kv>
static void weigh_all(const KvShape& shape, const KvBlock& block, AttentionTile& tile) {
    const int vectors = (block.tokens + kLanes - 1) / kLanes;
    alignas(kChunkBytes) float block_tops[kTileQueries];
    for (int query = 0; query < tile.queries; query++)
        block_tops[query] =
            tile.begin[query] < tile.end[query] ? largest_seen(query, vectors, tile) : -__builtin_inff();
    raise_tops(block_tops, tile);
    for (int query = 0; query < tile.queries; query++) {
        if (tile.begin[query] >= tile.end[query]) {
            weigh_nothing<Kv>(shape, tile, query, vectors);
            continue;
        }
        const Ints most = weigh<Kv>(block, query, vectors, tile);
        if constexpr (Kv::kGrouped)
            encode_groups(shape, block, query, vectors, tile);
        else if constexpr (Kv::kScaled)
            encode_weights(tile.scores[query], query, vectors, most, tile.groups[0]);
    }
}

}  // namespace
}  // namespace strata::cpu::STRATA_ISA
