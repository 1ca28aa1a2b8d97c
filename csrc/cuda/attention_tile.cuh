// Sixteen query rows of a warp against tokens, scores as m16n8 fragments: what prompts
// (attention_prefill.cuh) and wide heads (attention_wide.cuh) have in common.
//
// A row is a token and a query head of one KV head: row r of a tile is token r / heads, head r % heads. A
// lane holds rows `group` and `group + 8`. Sixteen tokens are two tiles of eight columns, "halves": element i
// of half h of a lane is row i / 2, column 2 member + i % 2. Kind::token says which token a column is.
#pragma once

#include "attention_common.cuh"

// Which tokens and elements the columns of a lane's fragments are. float4 scales are those of tokens
// 4 member .. 4 member + 3; four() puts the values of an even and an odd n-tile in the order of elements
// 4 member .. 4 member + 3.
struct Int8Tile : Int8Query {
    typedef Int8Kv Codes;
    static constexpr bool kMayBeNan = false, kGrouped = false;

    DEVICE int token(int column, int half) { return 2 * column + half; }

    DEVICE float scale(float4 scales, int half, int column) {
        return half ? (column ? scales.w : scales.y) : (column ? scales.z : scales.x);
    }

    DEVICE float4 scales(const void* part, QueryLane lane) {
        return reinterpret_cast<const float4*>(part)[lane.member];
    }

    DEVICE float4 four(const float* even, const float* odd) {
        return make_float4(even[0], odd[0], even[1], odd[1]);
    }
};

struct Bf16Tile : Bf16Query {
    typedef Bf16Kv Codes;
    static constexpr bool kMayBeNan = true, kGrouped = false;

    DEVICE int token(int column, int half) { return column + 8 * half; }
    DEVICE float scale(float4, int, int) { return 1.0f; }
    DEVICE float4 scales(const void*, QueryLane) { return make_float4(1.0f, 1.0f, 1.0f, 1.0f); }

    DEVICE float4 four(const float* even, const float* odd) {
        return make_float4(even[0], odd[0], even[1], odd[1]);
    }
};

// A lane's two rows: their queries (null: no such row), results, and the tokens that they see.
struct TileRows {
    const float* queries[2];
    int begin[2], end[2];

    METHOD TileRows(const float* q, const RowTile& tile, int first, int heads, int all_heads, int first_head,
                    int dim, int window, QueryLane lane) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = first + lane.group + 8 * i, token = row / heads;
            const bool present = token < tile.tokens;
            queries[i] = present ? q + place(tile, row, heads, all_heads, first_head) * dim : nullptr;
            end[i] = present ? tile.position + token + 1 : 0;
            begin[i] = window ? max(0, end[i] - window) : 0;
        }
    }

    // Where a row lies among [rows of the batch, all heads].
    DEVICE size_t place(const RowTile& tile, int row, int heads, int all_heads, int first_head) {
        return static_cast<size_t>(tile.first_row + row / heads) * all_heads + first_head + row % heads;
    }
};

// The running softmax of a lane's two rows over `Tiles` n-tiles of values. weights are this lane's part.
template <int Tiles>
struct TileSoftmax {
    float sums[Tiles][4];
    float largest[2], weights[2];

    METHOD void clear() {
#pragma unroll
        for (int tile = 0; tile < Tiles; ++tile) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[tile][i] = 0.0f;
        }
        largest[0] = largest[1] = kNothing;
        weights[0] = weights[1] = 0.0f;
    }

    // The largest score so far becomes at least `found`, of this lane's columns.
    METHOD void raise(const float (&found)[2]) {
        float factors[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float raised = fmaxf(largest[i], over_members_max(found[i]));
            factors[i] = exp2_approx(largest[i] - raised);
            largest[i] = raised;
            weights[i] *= factors[i];
        }
#pragma unroll
        for (int tile = 0; tile < Tiles; ++tile) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[tile][i] *= factors[i / 2];
        }
    }
};

// Scores (of this token on, Halves tiles of eight columns) become weights times the scales of the values.
// scales: per 16 tokens and lane, of the tokens that its columns are: element 2 c + h for column 2 member +
// c.
template <class Kind, int Halves, int Tiles>
DEVICE void weigh_tile(float (&scores)[Halves][4], int first, const TileRows& rows, const float (&factors)[2],
                       const float4 (&key_scales)[Halves / 2], const float4 (&value_scales)[Halves / 2],
                       QueryLane lane, TileSoftmax<Tiles>& state) {
    u32 seen = 0;
    float found[2] = {kNothing, kNothing};
#pragma unroll
    for (int i = 0; i < 4 * Halves; ++i) {
        const int half = i / 4, row = i / 2 % 2, column = i % 2;
        const int token = first + half / 2 * kKvTokens + Kind::token(2 * lane.member + column, half % 2);
        const bool sees = token >= rows.begin[row] && token < rows.end[row];
        float& score = scores[half][i % 4];
        score *= factors[row] * Kind::scale(key_scales[half / 2], half % 2, column);
        if (!sees) score = kNothing;
        seen |= static_cast<u32>(sees) << i;
        found[row] = fmaxf(found[row], score);
    }
    state.raise(found);
#pragma unroll
    for (int i = 0; i < 4 * Halves; ++i) {
        const int half = i / 4, row = i / 2 % 2, column = i % 2;
        float& score = scores[half][i % 4];
        const float weight = exp2_approx(score - state.largest[row]);
        const float scaled = weight * Kind::scale(value_scales[half / 2], half % 2, column);
        const bool sees = seen >> i & 1;  // else the scale may be anything
        state.weights[row] += sees ? weight : 0.0f;
        score = sees ? scaled : 0.0f;
    }
}

// Two halves of weights as the A operand that meets 16 tokens of values.
DEVICE void weights_operand(const float (&even)[4], const float (&odd)[4], u32 (&a)[4]) {
    a[0] = pack_bf16(even[0], even[1]);
    a[1] = pack_bf16(even[2], even[3]);
    a[2] = pack_bf16(odd[0], odd[1]);
    a[3] = pack_bf16(odd[2], odd[3]);
}

// The rows' results, for the values that begin at each target (null: no such row). The sink of a row joins
// its denominator where there are sinks.
template <class Kind, int Tiles>
DEVICE void write_rows(const TileSoftmax<Tiles>& state, float* const (&targets)[2],
                       const float* const (&sinks)[2], QueryLane lane) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float weights = over_members_sum(state.weights[i]);
        if (targets[i] == nullptr) continue;
        const float factor = finishing_factor(state.largest[i], weights, sinks[i]);
#pragma unroll
        for (int tile = 0; tile < Tiles / 2; ++tile) {
            float4 four = Kind::four(state.sums[2 * tile] + 2 * i, state.sums[2 * tile + 1] + 2 * i);
            four = make_float4(four.x * factor, four.y * factor, four.z * factor, four.w * factor);
            *reinterpret_cast<float4*>(targets[i] + 16 * tile + 4 * lane.member) = four;
        }
    }
}

// What attention_combine reads: the values from element `first` on, and with the first of them the state.
template <class Kind, int Tiles>
DEVICE void write_partial(const TileSoftmax<Tiles>& state, float* const (&targets)[2], int value_dim,
                          int first, QueryLane lane) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float weights = over_members_sum(state.weights[i]);
        if (targets[i] == nullptr) continue;
#pragma unroll
        for (int tile = 0; tile < Tiles / 2; ++tile) {
            const float4 four = Kind::four(state.sums[2 * tile] + 2 * i, state.sums[2 * tile + 1] + 2 * i);
            float2* const place = reinterpret_cast<float2*>(targets[i] + first + 16 * tile + 4 * lane.member);
            place[0] = make_float2(four.x, four.y);
            place[1] = make_float2(four.z, four.w);
        }
        if (first == 0 && lane.member == 0)
            *reinterpret_cast<float2*>(targets[i] + value_dim) = make_float2(state.largest[i], weights);
    }
}
