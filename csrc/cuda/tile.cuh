// A row block of packed weights times up to 8 * Tiles tokens, summed over the warps that share its columns.
//
// Activations are f32 in global memory and are rounded to bf16 on their way into the tensor cores; sums are
// f32. There is no staging: each lane loads what its fragments need (from L1 and L2 after the first block),
// one unit ahead of the multiplication.
#pragma once

#include "weights.cuh"

constexpr int kTileTokens = 8, kTileWarps = 4, kTileThreads = kTileWarps * kWarp;
constexpr int kTileMinBlocks = 4;  // per SM: at most 128 registers

// Row pointers of a lane's tokens, null where there is none. factors: of the columns (an RMSNorm's weights),
// or null.
template <int Tiles>
struct Tokens {
    const float* rows[Tiles];
    const float* factors = nullptr;
};

// A lane's part of 64 columns of its tokens: chunks `member` and `member + 4` of 8 columns.
template <int Tiles>
struct Activations {
    float4 values[Tiles][4];
};

template <int Tiles>
DEVICE Activations<Tiles> load_activations(const Tokens<Tiles>& tokens, int unit, int columns, Lane lane) {
    Activations<Tiles> loaded;
#pragma unroll
    for (int tile = 0; tile < Tiles; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int column = unit * kUnitColumns + (lane.member + 4 * half) * 8;
            const bool valid = tokens.rows[tile] != nullptr && column < columns;
            const float4* const source = reinterpret_cast<const float4*>(tokens.rows[tile] + column);
            const float4 zeros = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            loaded.values[tile][2 * half] = valid ? source[0] : zeros;
            loaded.values[tile][2 * half + 1] = valid ? source[1] : zeros;
        }
    }
    return loaded;
}

DEVICE float4 times(float4 a, float4 b) { return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w); }

template <int Tiles>
DEVICE void scale_columns(Activations<Tiles>& x, const float* factors, int unit, int columns, Lane lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int column = unit * kUnitColumns + (lane.member + 4 * half) * 8;
        if (column >= columns) continue;
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
            const float4 four = *reinterpret_cast<const float4*>(factors + column + i % 2 * 4);
#pragma unroll
            for (int tile = 0; tile < Tiles; ++tile) x.values[tile][i] = times(x.values[tile][i], four);
        }
    }
}

// The B operands of the four steps, columns paired as the weights' words hold them: (0 2)(1 3), (4 6)(5 7).
DEVICE void pack_step(float4 values, u32 (&b)[2]) {
    b[0] = pack_bf16(values.x, values.z);
    b[1] = pack_bf16(values.y, values.w);
}

template <class Format, int Tiles>
DEVICE void multiply_unit(const typename Format::Unit& unit, const Activations<Tiles>& x,
                          float (&sums)[Tiles][4]) {
    constexpr int kStepsPerGroup = kSteps / Format::kGroups;
    const u32 ones[4] = {kOnes, kOnes, kOnes, kOnes};
#pragma unroll
    for (int group = 0; group < Format::kGroups; ++group) {
        float products[Tiles][4] = {}, totals[Tiles][4] = {};
#pragma unroll
        for (int i = 0; i < kStepsPerGroup; ++i) {
            const int step = group * kStepsPerGroup + i;
            u32 a[4], rest[4];
            Format::operand(unit, step, a);
            if (Format::kRemainder) Format::remainder(unit, step, rest);
#pragma unroll
            for (int tile = 0; tile < Tiles; ++tile) {
                u32 b[2];
                pack_step(x.values[tile][step], b);
                mma_bf16(products[tile], a, b);
                if (Format::kRemainder) mma_bf16(products[tile], rest, b);
                if (Format::kMinimum) mma_bf16(totals[tile], ones, b);  // sums of the activations
            }
        }
        const float2 scale = Format::scale(unit, group);
        const float2 minimum = Format::kMinimum ? Format::minimum(unit, group) : make_float2(0.0f, 0.0f);
#pragma unroll
        for (int tile = 0; tile < Tiles; ++tile) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                sums[tile][i] += (i < 2 ? scale.x : scale.y) * products[tile][i];
                if (Format::kMinimum) sums[tile][i] += (i < 2 ? minimum.x : minimum.y) * totals[tile][i];
            }
        }
    }
}

// Units first, first + stride, ... of one row block, without a scale per row. Scaled: columns have factors.
template <class Format, int Tiles, bool Scaled>
DEVICE void multiply_units(const u8* block, int units, int columns, int first, int stride,
                           const Tokens<Tiles>& tokens, Lane lane, float (&sums)[Tiles][4]) {
    if (first >= units) return;
    typename Format::Unit unit = Format::load(block, units, first, lane);
    Activations<Tiles> x = load_activations(tokens, first, columns, lane);
    for (int i = first; i < units; i += stride) {
        const typename Format::Unit current = unit;
        if (Scaled) scale_columns(x, tokens.factors, i, columns, lane);
        const Activations<Tiles> current_x = x;
        if (i + stride < units) {
            unit = Format::load(block, units, i + stride, lane);
            x = load_activations(tokens, i + stride, columns, lane);
        }
        multiply_unit<Format>(current, current_x, sums);
    }
}

template <class Format, int Tiles>
DEVICE void multiply_units(const u8* block, int units, int columns, int first, int stride,
                           const Tokens<Tiles>& tokens, Lane lane, float (&sums)[Tiles][4]) {
    if (tokens.factors != nullptr)
        multiply_units<Format, Tiles, true>(block, units, columns, first, stride, tokens, lane, sums);
    else
        multiply_units<Format, Tiles, false>(block, units, columns, first, stride, tokens, lane, sums);
}

// The same with it; sums[tile][i] is row 2 * group + i / 2 of token 2 * member + i % 2.
template <class Format, int Tiles>
DEVICE void multiply_row_block(const u8* block, int units, int columns, int first, int stride,
                               const Tokens<Tiles>& tokens, Lane lane, float (&sums)[Tiles][4]) {
    if (!Format::kRowScale) {
        multiply_units<Format, Tiles>(block, units, columns, first, stride, tokens, lane, sums);
        return;
    }
    float products[Tiles][4] = {};
    multiply_units<Format, Tiles>(block, units, columns, first, stride, tokens, lane, products);
    const float2 scale = Format::row_scale(block, units, lane);
#pragma unroll
    for (int tile = 0; tile < Tiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[tile][i] += (i < 2 ? scale.x : scale.y) * products[tile][i];
    }
}

// Partial sums of the block's warps in shared memory: [warp][row][token], rows kStride floats apart. The
// stride makes both the 8-byte writes of fragments and the reads of 8 rows x 4 tokens free of conflicts.
template <int Tiles>
struct PartialSums {
    static constexpr int kTokens = Tiles * kTileTokens, kStride = kTokens + 4;
    static constexpr int kWarpFloats = kRowBlock * kStride;
    float* all;

    METHOD void write(int warp, Lane lane, const float (&sums)[Tiles][4]) const {
#pragma unroll
        for (int tile = 0; tile < Tiles; ++tile) {
            float* const place =
                all + warp * kWarpFloats + 2 * lane.group * kStride + tile * kTileTokens + 2 * lane.member;
            *reinterpret_cast<float2*>(place) = make_float2(sums[tile][0], sums[tile][1]);
            *reinterpret_cast<float2*>(place + kStride) = make_float2(sums[tile][2], sums[tile][3]);
        }
    }

    // The sum over the warps first, first + stride, ...
    METHOD float total(int first, int stride, int row, int token) const {
        float sum = 0.0f;
        for (int warp = first; warp < kTileWarps; warp += stride)
            sum += all[warp * kWarpFloats + row * kStride + token];
        return sum;
    }
};
