// y = x W^T + bias, or y += scale * (x W^T + bias), for w8 and a few tokens in int8: bound by the reading of
// W.
//
// x is int8 [tokens, units * 64] with f32 token_scales [tokens], from quantize_rows or rms_norm; y f32
// [tokens, rows], bias f32 [rows] or null. A block takes one row block of one tile of tokens; its four warps
// share the columns. Grid: (row blocks, tiles of tokens). Must move: the packed matrix, once.
#include "w8a8.cuh"

constexpr int kW8Warps = 4, kW8Threads = kW8Warps * kWarp, kW8MinBlocks = 4;

struct W8Result {
    const float *bias, *token_scales;
    float* y;
    int rows, tokens, add;
    float scale;
};

// A lane's part of a unit of its tokens; zeros where there is none.
template <int Tiles>
struct W8Tokens {
    uint2 values[Tiles][2];

    METHOD void load(const u8* x, int first, int tokens, int units, int unit, Lane lane) {
#pragma unroll
        for (int tile = 0; tile < Tiles; ++tile) {
            const int token = first + tile * 8 + lane.group;
            const bool valid = token < tokens;
            const u8* const row = x + (static_cast<size_t>(token) * units + unit) * kUnitColumns;
#pragma unroll
            for (int step = 0; step < 2; ++step) {
                const uint2* const eight = reinterpret_cast<const uint2*>(row + step * 32 + lane.member * 8);
                values[tile][step] = valid ? *eight : make_uint2(0, 0);
            }
        }
    }
};

// Units of one warp, a unit ahead of the multiplication.
template <int Tiles>
DEVICE void multiply_units_w8(const u8* block, const u8* x, int first, int tokens, int units, int warp,
                              Lane lane, int (&sums)[Tiles][4]) {
    if (warp >= units) return;
    W8::Unit next = W8::load(block, units, warp, lane);
    W8Tokens<Tiles> next_x;
    next_x.load(x, first, tokens, units, warp, lane);
    for (int unit = warp; unit < units; unit += kW8Warps) {
        const W8::Unit current = next;
        const W8Tokens<Tiles> current_x = next_x;
        if (unit + kW8Warps < units) {
            next = W8::load(block, units, unit + kW8Warps, lane);
            next_x.load(x, first, tokens, units, unit + kW8Warps, lane);
        }
#pragma unroll
        for (int tile = 0; tile < Tiles; ++tile) {
            multiply_w8(sums[tile], current, 0, current_x.values[tile][0]);
            multiply_w8(sums[tile], current, 1, current_x.values[tile][1]);
        }
    }
}

// Sums of the block's warps, [warp][row][token], strides as in tile.cuh.
template <int Tiles>
DEVICE void write_w8(int* partial, const int (&sums)[Tiles][4], const W8Result& result,
                     const float* row_scales, int first, Lane lane) {
    constexpr int kTokens = Tiles * 8, kStride = kTokens + 4, kWarpInts = kRowBlock * kStride;
#pragma unroll
    for (int tile = 0; tile < Tiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            const int place = threadIdx.x / kWarp * kWarpInts + (2 * lane.group + i / 2) * kStride + tile * 8;
            *reinterpret_cast<uint2*>(partial + place + 2 * lane.member) =
                make_uint2(static_cast<u32>(sums[tile][i]), static_cast<u32>(sums[tile][i + 1]));
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kRowBlock * kTokens; i += kW8Threads) {
        const int row_in_block = i % 8 + i / 32 % 2 * 8, token_in_tile = i / 8 % 4 + i / 64 * 4;
        const int row = blockIdx.x * kRowBlock + row_in_block, token = first + token_in_tile;
        if (row >= result.rows || token >= result.tokens) continue;
        int sum = 0;
        for (int warp = 0; warp < kW8Warps; ++warp)
            sum += partial[warp * kWarpInts + row_in_block * kStride + token_in_tile];
        float value = static_cast<float>(sum) * row_scales[row_in_block] * result.token_scales[token];
        if (result.bias != nullptr) value += result.bias[row];
        float* const target = result.y + static_cast<size_t>(token) * result.rows + row;
        *target = result.add ? *target + result.scale * value : value;
    }
}

template <int Tiles>
DEVICE void linear_w8a8(const u8* weight, const u8* x, const W8Result& result, int units) {
    SHARED_MEMORY(shared);
    const Lane lane = this_lane();
    const u8* const block = weight + static_cast<size_t>(blockIdx.x) * W8::block_bytes(units);
    const int first = blockIdx.y * Tiles * 8;
    int sums[Tiles][4] = {};
    multiply_units_w8<Tiles>(block, x, first, result.tokens, units, threadIdx.x / kWarp, lane, sums);
    const float* const row_scales = reinterpret_cast<const float*>(block + units * W8::kUnitBytes);
    write_w8<Tiles>(reinterpret_cast<int*>(shared), sums, result, row_scales, first, lane);
}

#define LINEAR_W8A8(tiles)                                                                               \
    extern "C" __global__ void __launch_bounds__(kW8Threads, kW8MinBlocks)                               \
        linear_w8a8_##tiles(const u8* weight, const u8* x, const float* token_scales, const float* bias, \
                            float* y, int rows, int units, int tokens, float scale, int add) {           \
        linear_w8a8<tiles>(weight, x, {bias, token_scales, y, rows, tokens, add, scale}, units);         \
    }                                                                                                    \
    EXPORT_KERNEL(linear_w8a8_##tiles)

LINEAR_W8A8(1)
LINEAR_W8A8(2)
