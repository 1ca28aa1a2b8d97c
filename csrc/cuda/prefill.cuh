// Row blocks of packed weights times many tokens, on tensor cores: what the kernels for prompts share.
//
// A block's warps take one row block each and all its tokens, so that weights are read once per tile of
// tokens, from L2 straight into the registers of the one warp that needs them (a unit ahead), and a number
// becomes bf16 once. Activations (packed_rows.cuh) come through shared memory in kPrefillStages stages of one
// unit, 128 bytes per token; chunk c of token t lies in place c ^ (t % 8), which makes the copies and
// ldmatrix free of conflicts. Scales multiply sums of a group, not weights: a weight is exact, and an
// instruction of the tensor cores leaves time for 16 others on sm_86.
#pragma once

#include "packed_rows.cuh"

constexpr int kPrefillStages = 3, kPrefillWarps = 8, kPrefillThreads = kPrefillWarps * kWarp;
constexpr int kPrefillMinBlocks = 2;                  // per SM: at most 128 registers
constexpr int kTokensAtOnce = 16, kTotalsBytes = 16;  // two tiles; of a token's unit

// Packed activations: values and, for formats with a minimum, totals; rows are row_units units apart.
struct PackedTokens {
    const u8 *values, *totals;
    int row_units;
};

// Tokens of a block: rows first, first + 1, ...
struct RowRange {
    int first, count;
    METHOD int row(int token) const { return first + token; }
};

template <class Format, int Tiles>
struct Stages {
    static constexpr int kTokens = Tiles * 8, kValueBytes = kTokens * kRowUnitBytes;
    static constexpr int kBytes = kValueBytes + (Format::kMinimum ? kTokens * kTotalsBytes : 0);
    u8* shared;

    METHOD u8* of(int unit) const { return shared + unit % kPrefillStages * kBytes; }

    // Tokens up to a multiple of kTokensAtOnce, zeros where there is none.
    template <class Rows>
    METHOD void copy(const PackedTokens& x, const Rows& rows, int unit) const {
        u8* const stage = of(unit);
        const int used = rounded_up(rows.count, kTokensAtOnce);
        for (int i = threadIdx.x; i < used * 8; i += blockDim.x) {
            const int token = i / 8, chunk = i % 8;
            copy_async16(stage + token * kRowUnitBytes + (chunk ^ token % 8) * 16,
                         x.values + place(x, rows, token, unit) * kRowUnitBytes + chunk * 16,
                         token < rows.count);
        }
        if (!Format::kMinimum) return;
        for (int token = threadIdx.x; token < used; token += blockDim.x)
            copy_async16(stage + kValueBytes + token * kTotalsBytes,
                         x.totals + place(x, rows, token, unit) * kTotalsBytes, token < rows.count);
    }

    template <class Rows>
    DEVICE size_t place(const PackedTokens& x, const Rows& rows, int token, int unit) {
        return token < rows.count ? static_cast<size_t>(rows.row(token)) * x.row_units + unit : 0;
    }

    // The B operands of steps 2 * half and 2 * half + 1 of a tile.
    DEVICE void operands(u32 (&b)[4], const u8* stage, int tile, int half) {
        const int lane = threadIdx.x % kWarp, token = tile * 8 + lane % 8, chunk = half * 4 + lane / 8;
        ldmatrix4(b, stage + token * kRowUnitBytes + (chunk ^ token % 8) * 16);
    }

    DEVICE float2 totals(const u8* stage, int tile, int which, Lane lane) {
        const float* const all = reinterpret_cast<const float*>(stage + kValueBytes);
        const int token = tile * 8 + 2 * lane.member;
        return make_float2(all[token * 4 + which], all[token * 4 + 4 + which]);
    }
};

// The A operands of a part of a unit: a group, or half a unit where nothing asks for more.
template <class Format>
struct Operands {
    static constexpr int kParts = Format::kScaled && Format::kGroups == 1 ? 1 : 2, kHalves = 2 / kParts;
    static constexpr int kOwnSteps = kSteps / kParts;
    u32 numbers[kOwnSteps][4], rest[Format::kRemainder ? kOwnSteps : 1][4];

    METHOD void take(const typename Format::Unit& unit, int part) {
#pragma unroll
        for (int step = 0; step < kOwnSteps; ++step) {
            Format::operand(unit, part * kOwnSteps + step, numbers[step]);
            if (Format::kRemainder) Format::remainder(unit, part * kOwnSteps + step, rest[step]);
        }
    }

    // Half of a unit: `b` has the B operands of two steps.
    METHOD void multiply(float (&products)[4], const u32 (&b)[4], int half) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u32 pair[2] = {b[2 * i], b[2 * i + 1]};
            mma_bf16(products, numbers[2 * half + i], pair);
            if (Format::kRemainder) mma_bf16(products, rest[2 * half + i], pair);
        }
    }
};

// Adds scale * products + minimum * totals to a tile's sums; x of scale and minimum is row 2g, y row 2g + 1.
template <class Format>
DEVICE void add_group(float (&sums)[4], const float (&products)[4], float2 scale, float2 minimum,
                      float2 totals) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        sums[i] += (i < 2 ? scale.x : scale.y) * products[i];
        if (Format::kMinimum) sums[i] += (i < 2 ? minimum.x : minimum.y) * (i % 2 ? totals.y : totals.x);
    }
}

// One tile, one part: the tensor cores add to `products`.
template <class Format, int Tiles>
DEVICE void multiply_tile(const Operands<Format>& operands, const u8* stage, int tile, int part,
                          float (&products)[4]) {
#pragma unroll
    for (int half = 0; half < Operands<Format>::kHalves; ++half) {
        u32 b[4];
        Stages<Format, Tiles>::operands(b, stage, tile, part + half);
        operands.multiply(products, b, half);
    }
}

// One unit for the first `used` tokens; their number is the same for the whole block.
template <class Format, int Tiles>
DEVICE void multiply_stage(const typename Format::Unit& unit, const u8* stage, int used, Lane lane,
                           float (&sums)[Tiles][4]) {
    constexpr int kParts = Operands<Format>::kParts;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
        Operands<Format> operands;
        operands.take(unit, part);
        const float2 none = make_float2(0.0f, 0.0f);
        const float2 scale = Format::kScaled ? Format::scale(unit, part) : none;
        const float2 minimum = Format::kMinimum ? Format::minimum(unit, part) : none;
#pragma unroll
        for (int tile = 0; tile < Tiles; ++tile) {
            if (tile / 2 * kTokensAtOnce >= used) continue;
            if (!Format::kScaled) {
                multiply_tile<Format, Tiles>(operands, stage, tile, part, sums[tile]);
                continue;
            }
            float products[4] = {};
            multiply_tile<Format, Tiles>(operands, stage, tile, part, products);
            const float2 totals =
                Format::kMinimum ? Stages<Format, Tiles>::totals(stage, tile, kParts == 1 ? 2 : part, lane)
                                 : none;
            add_group<Format>(sums[tile], products, scale, minimum, totals);
        }
    }
}

// Adds a row block (null: this warp has none) times the block's tokens, without a scale per row. All threads
// take part; afterwards the stages are free. sums[tile][i] is row 2 * group + i / 2 of token 8 * tile +
// 2 * member + i % 2.
template <class Format, int Tiles, class Rows>
DEVICE void multiply_tokens(const u8* block, int units, const PackedTokens& x, const Rows& rows,
                            const Stages<Format, Tiles>& stages, Lane lane, float (&sums)[Tiles][4]) {
#pragma unroll
    for (int unit = 0; unit < kPrefillStages - 1; ++unit) {
        if (unit < units) stages.copy(x, rows, unit);
        copy_async_commit();
    }
    typename Format::Unit next;
    if (block != nullptr) next = Format::load(block, units, 0, lane);
    for (int unit = 0; unit < units; ++unit) {
        copy_async_wait<kPrefillStages - 2>();
        __syncthreads();  // the unit's stage is there for all, and the one before it is free
        if (unit + kPrefillStages - 1 < units) stages.copy(x, rows, unit + kPrefillStages - 1);
        copy_async_commit();
        if (block == nullptr) continue;
        const typename Format::Unit current = next;
        if (unit + 1 < units) next = Format::load(block, units, unit + 1, lane);
        multiply_stage<Format, Tiles>(current, stages.of(unit), rows.count, lane, sums);
    }
    copy_async_wait<0>();
    __syncthreads();
}

// Applies the scale per row of formats that have one.
template <class Format, int Tiles>
DEVICE void scale_rows(const u8* block, int units, Lane lane, float (&sums)[Tiles][4]) {
    if (!Format::kRowScale || block == nullptr) return;
    const float2 scale = Format::row_scale(block, units, lane);
#pragma unroll
    for (int tile = 0; tile < Tiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[tile][i] *= i < 2 ? scale.x : scale.y;
    }
}
