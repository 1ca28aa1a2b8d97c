// hidden[pair] = act(gate x) * (up x): the first half of every routed expert, of experts in their slots.
//
// x is f32 [tokens, columns]; the tables (expert_words.cuh) say whose row a pair reads. hidden is f32 [pairs,
// width]: slice after slice of the intermediate dimension. A record (strata/store/formats.py, ExpertLayout)
// holds `slices` interleaved matrices, slice_bytes apart: 8 gate rows, then the 8 up rows of the same index,
// in each row block. bias: offset of f32 biases in the record in the order of the rows, or 0. Columns and a
// slice's width are multiples of 8. Grid: (row blocks of all slices, experts, tiles of tokens of the largest
// expert). Must move: gate_up of every expert, once per tile of tokens.
#include "activation.cuh"
#include "expert_words.cuh"

struct GateUpShape {
    int columns, units, slice_width, slice_bytes, bias;
};

// One value per thread: 8 gated elements of one tile's tokens.
template <int Tiles>
DEVICE void write_hidden(const PartialSums<Tiles>& sums, const float* bias, float* hidden, int pairs,
                         int width, const Gating& gating) {
    for (int i = threadIdx.x; i < 8 * PartialSums<Tiles>::kTokens; i += kTileThreads) {
        const int element = i % 8, token = i / 8;
        if (token >= pairs) continue;
        float gate = sums.total(0, 1, element, token), up = sums.total(0, 1, element + 8, token);
        if (bias != nullptr) {
            gate += bias[element];
            up += bias[element + 8];
        }
        hidden[static_cast<size_t>(token) * width + element] = gated(gate, up, gating);
    }
}

template <class Format, int Tiles>
DEVICE void expert_gate_up(const ExpertWords& experts, const float* x, float* hidden,
                           const GateUpShape& shape, const Gating& gating) {
    SHARED_MEMORY(shared);
    constexpr int kTokens = PartialSums<Tiles>::kTokens;
    const PartialSums<Tiles> partial = {reinterpret_cast<float*>(shared)};
    const int first = experts.begin() + blockIdx.z * kTokens, pairs = min(experts.end() - first, kTokens);
    if (pairs <= 0) return;
    const Lane lane = this_lane();
    const int blocks_per_slice = shape.slice_width / 8, warp = threadIdx.x / kWarp;
    const int slice = blockIdx.x / blocks_per_slice, row_block = blockIdx.x % blocks_per_slice;
    const u8* const record = experts.record();
    const u8* const block = record + static_cast<size_t>(slice) * shape.slice_bytes +
                            static_cast<size_t>(row_block) * Format::block_bytes(shape.units);
    Tokens<Tiles> tokens;
#pragma unroll
    for (int tile = 0; tile < Tiles; ++tile) {
        const int token = tile * kTileTokens + lane.group;
        tokens.rows[tile] =
            token < pairs ? x + static_cast<size_t>(experts.token_of_pair(first + token)) * shape.columns
                          : nullptr;
    }
    float sums[Tiles][4] = {};
    multiply_row_block<Format, Tiles>(block, shape.units, shape.columns, warp, kTileWarps, tokens, lane,
                                      sums);
    partial.write(warp, lane, sums);
    __syncthreads();
    const float* const bias =
        shape.bias ? reinterpret_cast<const float*>(record + shape.bias) + blockIdx.x * kRowBlock : nullptr;
    const int width = gridDim.x * 8;
    write_hidden<Tiles>(partial, bias, hidden + static_cast<size_t>(first) * width + blockIdx.x * 8, pairs,
                        width, gating);
}

#define GATE_UP(format, tiles, ...)                                                                          \
    extern "C" __global__ void __launch_bounds__(kTileThreads, kTileMinBlocks)                               \
        expert_gate_up_##format##_##tiles(const u32* far, const NearWords near, const float* x,              \
                                          float* hidden, int columns, int units, int slice_width,            \
                                          int slice_bytes, int bias, int kind, float alpha, float limit) {   \
        expert_gate_up<__VA_ARGS__, tiles>(                                                                  \
            {far, near}, x, hidden, {columns, units, slice_width, slice_bytes, bias}, {kind, alpha, limit}); \
    }                                                                                                        \
    EXPORT_KERNEL(expert_gate_up_##format##_##tiles)

#define GATE_UP_FORMAT(format, ...) \
    GATE_UP(format, 1, __VA_ARGS__) \
    GATE_UP(format, 2, __VA_ARGS__)

GATE_UP_FORMAT(w4g32, Int4<32, false>)
GATE_UP_FORMAT(w4g64, Int4<64, false>)
GATE_UP_FORMAT(w4g128, Int4<128, false>)
GATE_UP_FORMAT(w4g32m, Int4<32, true>)
GATE_UP_FORMAT(w4g64m, Int4<64, true>)
GATE_UP_FORMAT(w4g128m, Int4<128, true>)
GATE_UP_FORMAT(mxfp4, Mxfp4)
GATE_UP_FORMAT(w8, Int8<0>)
GATE_UP_FORMAT(w8g32, Int8<32>)
GATE_UP_FORMAT(bf16, Bf16)
GATE_UP_FORMAT(f16, F16)
