// The second half of every routed expert, and the sum: out[pair] = down hidden[pair] + bias, then, as
// combine_experts does for those of a prompt,
//
//     residual += scale * (sum of weight * out[pair] over a token's pairs + rest), or = without `add`
//
// hidden is f32 [pairs, slices * slice_width], out f32 [pairs, rows]. Slice s of the intermediate dimension
// meets the down matrix `s * slice_bytes + down` into the record; the slices' results add up. bias: offset of
// the f32 bias in the record, or 0. rest is f32 [tokens, rows] or null. The last block of a row block adds
// its rows up (last_block.cuh), in the order of the tables (expert_words.cuh), whichever block that is. Grid:
// (row blocks, experts, tiles of tokens of the largest expert); tickets: one per row block. Must move: down
// of every expert, once per tile of tokens.
#include "expert_words.cuh"
#include "last_block.cuh"

struct DownShape {
    int rows, units, slice_width, slices, slice_bytes, down, bias;
};

// What the sum joins.
struct Sum {
    const float* rest;
    float* residual;
    int tokens, add;
    float scale;
};

template <int Tiles>
DEVICE void write_pairs(const PartialSums<Tiles>& sums, const float* bias, float* out, int pairs, int rows) {
    for (int i = threadIdx.x; i < kRowBlock * PartialSums<Tiles>::kTokens; i += kTileThreads) {
        const int row_in_block = i % 8 + i / 32 % 2 * 8, token = i / 8 % 4 + i / 64 * 4;
        const int row = blockIdx.x * kRowBlock + row_in_block;
        if (row >= rows || token >= pairs) continue;
        const float value = sums.total(0, 1, row_in_block, token);
        out[static_cast<size_t>(token) * rows + row] = bias == nullptr ? value : value + bias[row];
    }
}

// first: of the expert's pairs that this block takes.
template <class Format, int Tiles>
DEVICE void multiply_pairs(const ExpertWords& experts, int first, int pairs, const float* hidden, float* out,
                           const DownShape& shape) {
    SHARED_MEMORY(shared);
    const PartialSums<Tiles> partial = {reinterpret_cast<float*>(shared)};
    const Lane lane = this_lane();
    const int warp = threadIdx.x / kWarp, width = shape.slices * shape.slice_width;
    const u8* const record = experts.record();
    float sums[Tiles][4] = {};
    for (int slice = 0; slice < shape.slices; ++slice) {
        const u8* const block = record + shape.down + static_cast<size_t>(slice) * shape.slice_bytes +
                                static_cast<size_t>(blockIdx.x) * Format::block_bytes(shape.units);
        Tokens<Tiles> tokens;
#pragma unroll
        for (int tile = 0; tile < Tiles; ++tile) {
            const int token = tile * kTileTokens + lane.group;
            const float* const row = hidden + static_cast<size_t>(first + token) * width;
            tokens.rows[tile] = token < pairs ? row + slice * shape.slice_width : nullptr;
        }
        multiply_row_block<Format, Tiles>(block, shape.units, shape.slice_width, warp, kTileWarps, tokens,
                                          lane, sums);
    }
    partial.write(warp, lane, sums);
    __syncthreads();
    const float* const bias = shape.bias ? reinterpret_cast<const float*>(record + shape.bias) : nullptr;
    write_pairs<Tiles>(partial, bias, out + static_cast<size_t>(first) * shape.rows, pairs, shape.rows);
}

// The row block's rows of all tokens, one per thread and turn.
DEVICE void add_up(const ExpertWords& experts, const float* out, const Sum& into, int rows) {
    const int row = blockIdx.x * kRowBlock + threadIdx.x % kRowBlock;
    if (row >= rows) return;
    for (int token = threadIdx.x / kRowBlock; token < into.tokens; token += kTileThreads / kRowBlock) {
        float sum = 0.0f;
        const int end = experts.first_of_token(token + 1);
        for (int i = experts.first_of_token(token); i < end; ++i)
            sum += experts.weight(i) * out[static_cast<size_t>(experts.pair_of_token(i)) * rows + row];
        const size_t place = static_cast<size_t>(token) * rows + row;
        if (into.rest != nullptr) sum += into.rest[place];
        into.residual[place] = (into.add ? into.residual[place] : 0.0f) + into.scale * sum;
    }
}

template <class Format, int Tiles>
DEVICE void expert_down(const ExpertWords& experts, const float* hidden, float* out, const Sum& into,
                        u32* tickets, const DownShape& shape) {
    constexpr int kTokens = PartialSums<Tiles>::kTokens;
    const int first = experts.begin() + blockIdx.z * kTokens, pairs = min(experts.end() - first, kTokens);
    if (pairs > 0) multiply_pairs<Format, Tiles>(experts, first, pairs, hidden, out, shape);
    if (last_of(tickets + blockIdx.x, gridDim.y * gridDim.z)) add_up(experts, out, into, shape.rows);
}

#define DOWN(format, tiles, ...)                                                                          \
    extern "C" __global__ void __launch_bounds__(kTileThreads, kTileMinBlocks)                            \
        expert_down_##format##_##tiles(const u32* far, const NearWords near, const float* hidden,         \
                                       float* out, const float* rest, float* residual, u32* tickets,      \
                                       int rows, int units, int slice_width, int slices, int slice_bytes, \
                                       int down, int bias, int tokens, float scale, int add) {            \
        expert_down<__VA_ARGS__, tiles>({far, near}, hidden, out, {rest, residual, tokens, add, scale},   \
                                        tickets,                                                          \
                                        {rows, units, slice_width, slices, slice_bytes, down, bias});     \
    }                                                                                                     \
    EXPORT_KERNEL(expert_down_##format##_##tiles)

#define DOWN_FORMAT(format, ...) \
    DOWN(format, 1, __VA_ARGS__) \
    DOWN(format, 2, __VA_ARGS__)

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
