// out[pair] = down hidden[pair] + bias for prompts: the second half of experts of many tokens each.
//
// hidden and totals are what expert_gate_up_prefill wrote, out f32 [pairs, rows], not yet weighted; records
// as in expert_down.cu. A block takes eight row blocks and 64 pairs of one expert. Grid: (tiles of pairs of
// the largest expert, experts, row blocks / 8), eight warps. Must move: down of every expert, once per tile
// of its pairs; must compute: pairs * rows * width products.
#include "expert_table.cuh"
#include "prefill_result.cuh"

constexpr int kPairTiles = 8;

struct DownPrefillShape {
    int rows, units, slices, slice_bytes, down, bias;
};

// Adds one slice's product, with its scale per row where the format has one.
template <class Format>
DEVICE void add_slice(const u8* block, int units, const PackedTokens& hidden, const RowRange& rows,
                      u8* shared, Lane lane, float (&sums)[kPairTiles][4]) {
    const Stages<Format, kPairTiles> stages = {shared};
    if (!Format::kRowScale) {
        multiply_tokens(block, units, hidden, rows, stages, lane, sums);
        return;
    }
    float products[kPairTiles][4] = {};
    multiply_tokens(block, units, hidden, rows, stages, lane, products);
    scale_rows<Format>(block, units, lane, products);
#pragma unroll
    for (int tile = 0; tile < kPairTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[tile][i] += products[tile][i];
    }
}

template <class Format>
DEVICE void expert_down_prefill(const ExpertTable& experts, const u8* hidden, const u8* totals, float* out,
                                const DownPrefillShape& shape) {
    SHARED_MEMORY(shared);
    constexpr int kPairs = kPairTiles * 8;
    const int first = experts.begin() + blockIdx.x * kPairs, pairs = min(experts.end() - first, kPairs);
    if (pairs <= 0) return;
    const Lane lane = this_lane();
    const int row_block = blockIdx.z * kPrefillWarps + threadIdx.x / kWarp;
    const bool exists = row_block * kRowBlock < shape.rows;
    const u8* const record = experts.record();
    float sums[kPairTiles][4] = {};
    for (int slice = 0; slice < shape.slices; ++slice) {
        const u8* const matrix = record + shape.down + static_cast<size_t>(slice) * shape.slice_bytes;
        const u8* const block =
            exists ? matrix + static_cast<size_t>(row_block) * Format::block_bytes(shape.units) : nullptr;
        const PackedTokens own = {hidden + static_cast<size_t>(slice) * shape.units * kRowUnitBytes,
                                  totals + static_cast<size_t>(slice) * shape.units * kTotalsBytes,
                                  shape.slices * shape.units};
        add_slice<Format>(block, shape.units, own, {first, pairs}, shared, lane, sums);
    }
    const float* const bias = shape.bias ? reinterpret_cast<const float*>(record + shape.bias) : nullptr;
    const PrefillResult result = {bias, out, shape.rows, first + pairs, 0, 1.0f};
    write_tokens(sums, result, first, row_block * kRowBlock + 2 * lane.group, lane);
}

#define DOWN_FORMAT(format, ...)                                                                    \
    extern "C" __global__ void __launch_bounds__(kPrefillThreads, kPrefillMinBlocks)                \
        expert_down_prefill_##format(const u64* records, const int* first_pair, const u8* hidden,   \
                                     const u8* totals, float* out, int rows, int units, int slices, \
                                     int slice_bytes, int down, int bias) {                         \
        expert_down_prefill<__VA_ARGS__>({records, first_pair}, hidden, totals, out,                \
                                         {rows, units, slices, slice_bytes, down, bias});           \
    }                                                                                               \
    EXPORT_KERNEL(expert_down_prefill_##format)

DOWN_FORMAT(w4g32, Int4<32, false>)
DOWN_FORMAT(w4g64, Int4<64, false>)
DOWN_FORMAT(w4g128, Int4<128, false>)
DOWN_FORMAT(w4g32m, Int4<32, true>)
DOWN_FORMAT(w4g64m, Int4<64, true>)
DOWN_FORMAT(w4g128m, Int4<128, true>)
DOWN_FORMAT(mxfp4, Mxfp4)
DOWN_FORMAT(w8, Int8<0>)
DOWN_FORMAT(w8g32, Int8<32>)
DOWN_FORMAT(bf16, Bf16)
DOWN_FORMAT(f16, F16)
