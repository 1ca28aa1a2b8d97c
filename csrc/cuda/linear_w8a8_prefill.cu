// y = x W^T + bias, or y += scale * (x W^T + bias), for w8 and many tokens in int8, on tensor cores.
//
// x, token_scales, bias and y are linear_w8a8's. A warp takes two row blocks, because int8 products are four
// times as quick as bf16's and shared memory is not; a block takes as many pairs as it has warps (at most 8)
// and 64 tokens. Activations come through shared memory in kW8Stages stages of one unit, 64 bytes per token;
// chunk c of token t lies in place c ^ 2 (t / 2 % 2), which keeps copies and loads free of conflicts. Grid:
// (tiles of tokens, row blocks / (2 warps)). Must move: the packed matrix, x and y once; must compute: tokens
// * rows * columns products.
#include "prefill_result.cuh"
#include "w8a8.cuh"

constexpr int kW8Tiles = 8, kW8Tokens = kW8Tiles * 8, kW8Stages = 4, kW8Blocks = 2;
constexpr int kW8StageBytes = kW8Tokens * kUnitColumns;

DEVICE u8* w8_place(u8* stage, int token, int chunk) {
    return stage + token * kUnitColumns + (chunk ^ token / 2 % 2 * 2) * 16;
}

// Tokens up to a multiple of kTokensAtOnce, zeros where there is none.
DEVICE void copy_w8(u8* stage, const u8* x, int tokens, int units, int unit) {
    const int used = rounded_up(tokens, kTokensAtOnce);
    for (int i = threadIdx.x; i < used * 4; i += blockDim.x) {
        const int token = i / 4, chunk = i % 4;
        const bool valid = token < tokens;
        const size_t place = valid ? static_cast<size_t>(token) * units + unit : 0;
        copy_async16(w8_place(stage, token, chunk), x + place * kUnitColumns + chunk * 16, valid);
    }
}

// The row blocks of a warp, null where there is none.
struct W8Blocks {
    const u8* blocks[kW8Blocks];

    METHOD void load(W8::Unit (&units_of)[kW8Blocks], int units, int unit, Lane lane) const {
#pragma unroll
        for (int i = 0; i < kW8Blocks; ++i) {
            if (blocks[i] != nullptr) units_of[i] = W8::load(blocks[i], units, unit, lane);
        }
    }
};

DEVICE void multiply_w8_stage(const W8::Unit (&weights)[kW8Blocks], const u8* stage, int used, Lane lane,
                              int (&sums)[kW8Blocks][kW8Tiles][4]) {
#pragma unroll
    for (int tile = 0; tile < kW8Tiles; ++tile) {
        if (tile / 2 * kTokensAtOnce >= used) continue;
#pragma unroll
        for (int step = 0; step < 2; ++step) {
            const int token = tile * 8 + lane.group;
            const u8* const chunk = w8_place(const_cast<u8*>(stage), token, 2 * step + lane.member / 2);
            const uint2 x = *reinterpret_cast<const uint2*>(chunk + lane.member % 2 * 8);
#pragma unroll
            for (int i = 0; i < kW8Blocks; ++i) multiply_w8(sums[i][tile], weights[i], step, x);
        }
    }
}

DEVICE void multiply_w8_tokens(const W8Blocks& own, const u8* x, int tokens, int units, u8* shared, Lane lane,
                               int (&sums)[kW8Blocks][kW8Tiles][4]) {
#pragma unroll
    for (int unit = 0; unit < kW8Stages - 1; ++unit) {
        if (unit < units) copy_w8(shared + unit * kW8StageBytes, x, tokens, units, unit);
        copy_async_commit();
    }
    W8::Unit next[kW8Blocks] = {};
    own.load(next, units, 0, lane);
    for (int unit = 0; unit < units; ++unit) {
        copy_async_wait<kW8Stages - 2>();
        __syncthreads();  // the unit's stage is there for all, and the one before it is free
        const int ahead = unit + kW8Stages - 1;
        if (ahead < units) copy_w8(shared + ahead % kW8Stages * kW8StageBytes, x, tokens, units, ahead);
        copy_async_commit();
        const W8::Unit current[kW8Blocks] = {next[0], next[1]};
        if (unit + 1 < units) own.load(next, units, unit + 1, lane);
        multiply_w8_stage(current, shared + unit % kW8Stages * kW8StageBytes, tokens, lane, sums);
    }
    copy_async_wait<0>();
}

// One row block's sums with both scales.
DEVICE void write_w8_tokens(const int (&sums)[kW8Tiles][4], const PrefillResult& result, float2 row_scale,
                            const float* token_scales, int first, int row, Lane lane) {
    float scaled[kW8Tiles][4];
#pragma unroll
    for (int tile = 0; tile < kW8Tiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int token = first + tile * 8 + 2 * lane.member + i % 2;
            const float of_token = token < result.tokens ? token_scales[token] : 0.0f;
            scaled[tile][i] =
                static_cast<float>(sums[tile][i]) * (i < 2 ? row_scale.x : row_scale.y) * of_token;
        }
    }
    write_tokens(scaled, result, first, row, lane);
}

extern "C" __global__ void __launch_bounds__(kPrefillThreads, kPrefillMinBlocks)
    linear_w8a8_prefill(const u8* weight, const u8* x, const float* token_scales, const float* bias, float* y,
                        int rows, int units, int tokens, float scale, int add) {
    SHARED_MEMORY(shared);
    const Lane lane = this_lane();
    const int first = blockIdx.x * kW8Tokens, warps = blockDim.x / kWarp;
    const int row_block = (blockIdx.y * warps + threadIdx.x / kWarp) * kW8Blocks;
    W8Blocks own;
#pragma unroll
    for (int i = 0; i < kW8Blocks; ++i) {
        const u8* const block = weight + static_cast<size_t>(row_block + i) * W8::block_bytes(units);
        own.blocks[i] = (row_block + i) * kRowBlock < rows ? block : nullptr;
    }
    int sums[kW8Blocks][kW8Tiles][4] = {};
    multiply_w8_tokens(own, x + static_cast<size_t>(first) * units * kUnitColumns,
                       min(tokens - first, kW8Tokens), units, shared, lane, sums);
    const PrefillResult result = {bias, y, rows, tokens, add, scale};
#pragma unroll
    for (int i = 0; i < kW8Blocks; ++i) {
        if (own.blocks[i] == nullptr) continue;
        write_w8_tokens(sums[i], result, W8::row_scale(own.blocks[i], units, lane), token_scales, first,
                        (row_block + i) * kRowBlock + 2 * lane.group, lane);
    }
}
EXPORT_KERNEL(linear_w8a8_prefill)
