// y = x W^T + bias, or y += scale * (x W^T + bias), for packed W and many tokens: bound by the tensor cores.
//
// x is what pack_activations made, totals too (used by formats with a minimum); y f32 [tokens, rows], bias
// f32 [rows] or null. A warp takes a row block, a block as many as it has warps (at most 8) and 8 * Tiles
// tokens. Grid: (tiles of tokens, row blocks / warps): blocks that follow one another read the same weights.
// Must move: the packed matrix, x and y once; must compute: tokens * rows * columns products.
//
// head_blocks (0: none) makes it one small matrix per head: row blocks [h * head_blocks, ...) meet units
// [h * units, ...) of x; it is a multiple of a block's warps.
#include "prefill_result.cuh"

template <class Format, int Tiles>
DEVICE void linear_prefill(const u8* weight, const PackedTokens& x, const PrefillResult& result, int units) {
    SHARED_MEMORY(shared);
    using Stage = Stages<Format, Tiles>;
    const Lane lane = this_lane();
    const int row_block = blockIdx.y * (blockDim.x / kWarp) + threadIdx.x / kWarp;
    const int first = blockIdx.x * Stage::kTokens;
    const bool exists = row_block * kRowBlock < result.rows;
    const u8* const block =
        exists ? weight + static_cast<size_t>(row_block) * Format::block_bytes(units) : nullptr;
    float sums[Tiles][4] = {};
    const RowRange rows = {first, min(result.tokens - first, Stage::kTokens)};
    multiply_tokens(block, units, x, rows, Stage{shared}, lane, sums);
    scale_rows<Format>(block, units, lane, sums);
    write_tokens(sums, result, first, row_block * kRowBlock + 2 * lane.group, lane);
}

#define LINEAR_FORMAT(format, tiles, ...)                                                                  \
    extern "C" __global__ void __launch_bounds__(kPrefillThreads, kPrefillMinBlocks)                       \
        linear_prefill_##format(const u8* weight, const u8* x, const u8* totals, const float* bias,        \
                                float* y, int rows, int units, int tokens, int row_units, int head_blocks, \
                                float scale, int add) {                                                    \
        const size_t head = head_blocks ? blockIdx.y * (blockDim.x / kWarp) / head_blocks : 0;             \
        linear_prefill<__VA_ARGS__, tiles>(                                                                \
            weight, {x + head * units * kRowUnitBytes, totals + head * units * kTotalsBytes, row_units},   \
            {bias, y, rows, tokens, add, scale}, units);                                                   \
    }                                                                                                      \
    EXPORT_KERNEL(linear_prefill_##format)

LINEAR_FORMAT(w4g32, 16, Int4<32, false>)
LINEAR_FORMAT(w4g64, 16, Int4<64, false>)
LINEAR_FORMAT(w4g128, 16, Int4<128, false>)
LINEAR_FORMAT(w4g32m, 12, Int4<32, true>)
LINEAR_FORMAT(w4g64m, 12, Int4<64, true>)
LINEAR_FORMAT(w4g128m, 12, Int4<128, true>)
LINEAR_FORMAT(mxfp4, 16, Mxfp4)
LINEAR_FORMAT(w8, 16, Int8<0>)
LINEAR_FORMAT(w8g32, 16, Int8<32>)
LINEAR_FORMAT(bf16, 16, Bf16)
LINEAR_FORMAT(f16, 16, F16)
