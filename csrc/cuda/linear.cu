// y = x W^T + bias, or y += scale * (x W^T + bias), for packed W and a few tokens: bound by the reading of W.
//
// x is f32 [tokens, columns], rows x_stride floats apart, y f32 [tokens, rows], bias f32 [rows] or null;
// columns are a multiple of 8 and rows of x 16-byte aligned. A block takes `row_blocks` row blocks (1, 2 or
// 4) of one tile of tokens; its four warps share each row block's columns. Grid: (row blocks / row_blocks,
// tiles of tokens). Must move: the packed matrix, once. x comes from L2 again for every block: with many
// tokens let a block take more row blocks.
//
// head_rows (0: none) makes it one small matrix per head: rows [h * head_rows, ...) of W meet columns
// [h * columns, ...) of x; it is a multiple of 16 and a block takes one row block.
#include "tile.cuh"

struct LinearShape {
    int rows, columns, units, row_blocks, x_stride;
};

template <int Tiles>
DEVICE Tokens<Tiles> tokens_of_tile(const float* x, int tokens, int stride, Lane lane) {
    Tokens<Tiles> found;
#pragma unroll
    for (int tile = 0; tile < Tiles; ++tile) {
        const int token = (blockIdx.y * Tiles + tile) * kTileTokens + lane.group;
        found.rows[tile] = token < tokens ? x + static_cast<size_t>(token) * stride : nullptr;
    }
    return found;
}

// One value per thread and turn: 8 rows x 4 tokens per warp.
template <int Tiles>
DEVICE void write_result(const PartialSums<Tiles>& sums, float* y, const float* bias, int tokens, float scale,
                         int add, const LinearShape& shape) {
    constexpr int kTokens = PartialSums<Tiles>::kTokens;
    for (int i = threadIdx.x; i < shape.row_blocks * kRowBlock * kTokens; i += kTileThreads) {
        const int own = i / (kRowBlock * kTokens), row_in_block = i % 8 + i / 32 % 2 * 8;
        const int token_in_tile = i / 8 % 4 + i / 64 % (kTokens / 4) * 4;
        const int row = (blockIdx.x * shape.row_blocks + own) * kRowBlock + row_in_block;
        const int token = blockIdx.y * kTokens + token_in_tile;
        if (row >= shape.rows || token >= tokens) continue;
        float value = sums.total(own, shape.row_blocks, row_in_block, token_in_tile);
        if (bias != nullptr) value += bias[row];
        float* const target = y + static_cast<size_t>(token) * shape.rows + row;
        *target = add ? *target + scale * value : value;
    }
}

template <class Format, int Tiles>
DEVICE void linear(const u8* weight, const float* x, const float* bias, float* y, int tokens, float scale,
                   int add, const LinearShape& shape) {
    SHARED_MEMORY(shared);
    const PartialSums<Tiles> partial = {reinterpret_cast<float*>(shared)};
    const Lane lane = this_lane();
    const int warp = threadIdx.x / kWarp, own = warp % shape.row_blocks;
    const int row_block = blockIdx.x * shape.row_blocks + own;
    float sums[Tiles][4] = {};
    if (row_block * kRowBlock < shape.rows) {
        const u8* const block = weight + static_cast<size_t>(row_block) * Format::block_bytes(shape.units);
        multiply_row_block<Format, Tiles>(block, shape.units, shape.columns, warp / shape.row_blocks,
                                          kTileWarps / shape.row_blocks,
                                          tokens_of_tile<Tiles>(x, tokens, shape.x_stride, lane), lane, sums);
    }
    partial.write(warp, lane, sums);
    __syncthreads();
    write_result<Tiles>(partial, y, bias, tokens, scale, add, shape);
}

#define LINEAR(format, tiles, ...)                                                                        \
    extern "C" __global__ void __launch_bounds__(kTileThreads, kTileMinBlocks) linear_##format##_##tiles( \
        const u8* weight, const float* x, const float* bias, float* y, int rows, int columns, int units,  \
        int tokens, int row_blocks, int x_stride, int head_rows, float scale, int add) {                  \
        const int head = head_rows ? blockIdx.x * kRowBlock / head_rows : 0;                              \
        linear<__VA_ARGS__, tiles>(weight, x + head * columns, bias, y, tokens, scale, add,               \
                                   {rows, columns, units, row_blocks, x_stride});                         \
    }                                                                                                     \
    EXPORT_KERNEL(linear_##format##_##tiles)

#define LINEAR_FORMAT(format, ...) \
    LINEAR(format, 1, __VA_ARGS__) \
    LINEAR(format, 2, __VA_ARGS__)

LINEAR_FORMAT(w4g32, Int4<32, false>)
LINEAR_FORMAT(w4g64, Int4<64, false>)
LINEAR_FORMAT(w4g128, Int4<128, false>)
LINEAR_FORMAT(w4g32m, Int4<32, true>)
LINEAR_FORMAT(w4g64m, Int4<64, true>)
LINEAR_FORMAT(w4g128m, Int4<128, true>)
LINEAR_FORMAT(mxfp4, Mxfp4)
LINEAR_FORMAT(w8, Int8<0>)
LINEAR_FORMAT(w8g32, Int8<32>)
LINEAR_FORMAT(bf16, Bf16)
LINEAR_FORMAT(f16, F16)
