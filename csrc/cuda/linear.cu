// y = x W^T + bias, or y += scale * (x W^T + bias), for packed W and a few tokens: bound by the reading of W.
// With `norm`, f32 [columns], it is the RMSNorm of x that is multiplied: every block sums the squares of its
// rows, and what they are divided by multiplies the results. With `kind` (activation.cuh; -1: none) W is the
// gate_up of a dense FFN, 8 gate rows and then the 8 up rows of the same index in each row block, and y, f32
// [tokens, width], becomes act(gate) * up, without bias or sum.
//
// x is f32 [tokens, columns], rows x_stride floats apart, y f32 [tokens, rows], bias f32 [rows] or null;
// columns are a multiple of 8 and rows of x 16-byte aligned. A block takes `row_blocks` row blocks (1, 2 or
// 4) of one tile of tokens; its four warps share each row block's columns. Grid: (row blocks / row_blocks,
// tiles of tokens). Must move: the packed matrix, once. x comes from L2 again for every block: with many
// tokens let a block take more row blocks.
//
// head_rows (0: none) makes it one small matrix per head: rows [h * head_rows, ...) of W meet columns
// [h * columns, ...) of x; it is a multiple of 16 and a block takes one row block.
#include "activation.cuh"
#include "tile.cuh"

struct LinearShape {
    int rows, columns, units, row_blocks, x_stride;
};

struct Norm {
    const float* weight;  // null: none
    float eps;
};

template <int Tiles>
DEVICE Tokens<Tiles> tokens_of_tile(const float* x, int tokens, int stride, const float* factors, Lane lane) {
    Tokens<Tiles> found;
    found.factors = factors;
#pragma unroll
    for (int tile = 0; tile < Tiles; ++tile) {
        const int token = (blockIdx.y * Tiles + tile) * kTileTokens + lane.group;
        found.rows[tile] = token < tokens ? x + static_cast<size_t>(token) * stride : nullptr;
    }
    return found;
}

// Sums of squares of the tile's tokens, in shared memory behind the partial sums: [token][warp]. The rows
// come from L1, where the multiplication has left them.
template <int Tiles>
struct Squares {
    static constexpr int kTokens = PartialSums<Tiles>::kTokens;
    float* all;

    METHOD void sum(const float* x, int tokens, const LinearShape& shape) const {
        const int first = blockIdx.y * kTokens, count = min(kTokens, tokens - first);
#pragma unroll 1
        for (int token = 0; token < count; ++token) {
            const float* const row = x + static_cast<size_t>(first + token) * shape.x_stride;
            float squares = 0.0f;
#pragma unroll 2  // all loads at once would take most registers
            for (int i = threadIdx.x; i < shape.columns / 4; i += kTileThreads) {
                const float4 v = reinterpret_cast<const float4*>(row)[i];
                squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
            }
            squares = warp_sum(squares);
            if (threadIdx.x % kWarp == 0) all[token * kTileWarps + threadIdx.x / kWarp] = squares;
        }
    }

    METHOD float factor(int token, int columns, float eps) const {
        float total = 0.0f;
        for (int warp = 0; warp < kTileWarps; ++warp) total += all[token * kTileWarps + warp];
        return rsqrtf(total / static_cast<float>(columns) + eps);
    }
};

// One gated element per thread and turn.
template <int Tiles>
DEVICE void write_gated(const PartialSums<Tiles>& sums, const Squares<Tiles>& squares, const Norm& norm,
                        float* y, int tokens, const Gating& gating, int width, const LinearShape& shape) {
    constexpr int kTokens = PartialSums<Tiles>::kTokens, kHalf = kRowBlock / 2;
    for (int i = threadIdx.x; i < shape.row_blocks * kHalf * kTokens; i += kTileThreads) {
        const int own = i / (kHalf * kTokens), element = i % kHalf, token_in_tile = i / kHalf % kTokens;
        const int column = (blockIdx.x * shape.row_blocks + own) * kHalf + element;
        const int token = blockIdx.y * kTokens + token_in_tile;
        if (column >= width || token >= tokens) continue;
        float gate = sums.total(own, shape.row_blocks, element, token_in_tile);
        float up = sums.total(own, shape.row_blocks, element + kHalf, token_in_tile);
        if (norm.weight != nullptr) {
            const float factor = squares.factor(token_in_tile, shape.columns, norm.eps);
            gate *= factor;
            up *= factor;
        }
        y[static_cast<size_t>(token) * width + column] = gated(gate, up, gating);
    }
}

// One value per thread and turn: 8 rows x 4 tokens per warp.
template <int Tiles>
DEVICE void write_result(const PartialSums<Tiles>& sums, const Squares<Tiles>& squares, const Norm& norm,
                         float* y, const float* bias, int tokens, float scale, int add,
                         const LinearShape& shape) {
    constexpr int kTokens = PartialSums<Tiles>::kTokens;
    for (int i = threadIdx.x; i < shape.row_blocks * kRowBlock * kTokens; i += kTileThreads) {
        const int own = i / (kRowBlock * kTokens), row_in_block = i % 8 + i / 32 % 2 * 8;
        const int token_in_tile = i / 8 % 4 + i / 64 % (kTokens / 4) * 4;
        const int row = (blockIdx.x * shape.row_blocks + own) * kRowBlock + row_in_block;
        const int token = blockIdx.y * kTokens + token_in_tile;
        if (row >= shape.rows || token >= tokens) continue;
        float value = sums.total(own, shape.row_blocks, row_in_block, token_in_tile);
        if (norm.weight != nullptr) value *= squares.factor(token_in_tile, shape.columns, norm.eps);
        if (bias != nullptr) value += bias[row];
        float* const target = y + static_cast<size_t>(token) * shape.rows + row;
        *target = add ? *target + scale * value : value;
    }
}

template <class Format, int Tiles>
DEVICE void linear(const u8* weight, const float* x, const float* bias, float* y, int tokens, float scale,
                   int add, const Norm& norm, const Gating& gating, int width, const LinearShape& shape) {
    SHARED_MEMORY(shared);
    const PartialSums<Tiles> partial = {reinterpret_cast<float*>(shared)};
    const Squares<Tiles> squares = {partial.all + kTileWarps * PartialSums<Tiles>::kWarpFloats};
    const Lane lane = this_lane();
    const int warp = threadIdx.x / kWarp, own = warp % shape.row_blocks;
    const int row_block = blockIdx.x * shape.row_blocks + own;
    float sums[Tiles][4] = {};
    if (row_block * kRowBlock < shape.rows) {
        const u8* const block = weight + static_cast<size_t>(row_block) * Format::block_bytes(shape.units);
        const Tokens<Tiles> rows = tokens_of_tile<Tiles>(x, tokens, shape.x_stride, norm.weight, lane);
        multiply_row_block<Format, Tiles>(block, shape.units, shape.columns, warp / shape.row_blocks,
                                          kTileWarps / shape.row_blocks, rows, lane, sums);
    }
    if (norm.weight != nullptr) squares.sum(x, tokens, shape);
    partial.write(warp, lane, sums);
    __syncthreads();
    if (gating.kind >= 0)
        write_gated<Tiles>(partial, squares, norm, y, tokens, gating, width, shape);
    else
        write_result<Tiles>(partial, squares, norm, y, bias, tokens, scale, add, shape);
}

#define LINEAR(format, tiles, ...)                                                                        \
    extern "C" __global__ void __launch_bounds__(kTileThreads, kTileMinBlocks) linear_##format##_##tiles( \
        const u8* weight, const float* x, const float* bias, float* y, int rows, int columns, int units,  \
        int tokens, int row_blocks, int x_stride, int head_rows, float scale, int add, const float* norm, \
        float eps, int kind, float alpha, float limit, int width) {                                       \
        const int head = head_rows ? blockIdx.x * kRowBlock / head_rows : 0;                              \
        linear<__VA_ARGS__, tiles>(weight, x + head * columns, bias, y, tokens, scale, add, {norm, eps},  \
                                   {kind, alpha, limit}, width,                                           \
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
