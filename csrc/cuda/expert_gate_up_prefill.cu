// hidden[pair] = act(gate x) * (up x) for prompts: experts of many tokens each, on tensor cores.
//
// x is what pack_activations made of f32 [tokens, columns], totals too; token_of_pair says whose row a pair
// reads. hidden is packed again, for expert_down_prefill: bf16 [pairs, slices * hidden_units * 64] in the
// order of packed_rows.cuh, each slice on its own with zeros up to whole units, and hidden_totals (null:
// nobody asks) f32 [pairs, slices * hidden_units, 4]. Records as in expert_gate_up.cu. A block takes 64
// elements of hidden, that is eight row blocks, and 64 pairs of one expert; pairs that are not there cost
// nothing by 16. Grid: (tiles of pairs of the largest expert, experts, slices * hidden_units), eight warps.
// Must move: gate_up of every expert, once per tile of its pairs; must compute: pairs * 2 * width * columns
// products.
#include "activation.cuh"
#include "expert_table.cuh"
#include "prefill.cuh"

constexpr int kHiddenTiles = 8, kElements = 8;  // 64 pairs; elements of a row block

struct GateUpPrefillShape {
    int units, slice_width, slice_bytes, hidden_units, bias;
};

struct PairRows {
    const int* token_of_pair;
    int count;
    METHOD int row(int pair) const { return token_of_pair[pair]; }
};

struct HiddenRows {
    u8* values;
    float4* totals;
    int row_units;
};

// Lanes of the lower half have gate, those of the upper half up, of the same two elements and two pairs:
// after the exchange the lower ones have both of the first pair, the upper ones of the second.
DEVICE float2 gated_pair(const float (&sums)[4], bool upper, const Gating& gating) {
    float2 result;
#pragma unroll
    for (int element = 0; element < 2; ++element) {
        const float first = sums[2 * element], second = sums[2 * element + 1];
        const float other = __shfl_xor_sync(FULL, upper ? first : second, 16);
        const float value = upper ? gated(other, second, gating) : gated(first, other, gating);
        if (element == 0)
            result.x = value;
        else
            result.y = value;
    }
    return result;
}

// The block's hidden in shared memory, one unit per pair, its chunks placed as in a stage. A warp has the
// same word of four chunks: in two of them it changes places with a neighbour, or two lanes would share a
// bank.
DEVICE bf16* hidden_place(u8* shared, int pair, int chunk) {
    return reinterpret_cast<bf16*>(shared + pair * kRowUnitBytes + (chunk ^ pair % 8) * 16);
}

DEVICE void put_hidden(u8* shared, const float (&sums)[kHiddenTiles][4], const Gating& gating, Lane lane) {
    const int warp = threadIdx.x / kWarp, quarter = lane.group % 4;
    const bool upper = lane.group >= 4;
    const int word = packed_word(warp * kElements, quarter / 2 * 2), chunk = word / 4;
    const int place = (word % 4 ^ chunk / 2 % 2) * 2 + quarter % 2;
#pragma unroll
    for (int tile = 0; tile < kHiddenTiles; ++tile) {
        const float2 values = gated_pair(sums[tile], upper, gating);
        const int pair = tile * 8 + 2 * lane.member + upper;
        hidden_place(shared, pair, chunk)[place] = to_bf16(values.x);
        hidden_place(shared, pair, chunk + 1)[place] = to_bf16(values.y);
    }
}

DEVICE float sum_of(uint4 eight) {
    return pair_sum(eight.x) + pair_sum(eight.y) + pair_sum(eight.z) + pair_sum(eight.w);
}

DEVICE void store_hidden(u8* shared, const HiddenRows& hidden, int first, int pairs) {
    for (int i = threadIdx.x; i < kHiddenTiles * 8 * 8; i += kPrefillThreads) {
        const int pair = i / 8, chunk = i % 8;
        const size_t unit = static_cast<size_t>(first + pair) * hidden.row_units + blockIdx.z;
        uint4 eight = make_uint4(0, 0, 0, 0);
        if (pair < pairs) {
            eight = *reinterpret_cast<const uint4*>(hidden_place(shared, pair, chunk));
            if (chunk / 2 % 2) eight = make_uint4(eight.y, eight.x, eight.w, eight.z);
            *reinterpret_cast<uint4*>(hidden.values + unit * kRowUnitBytes + chunk * 16) = eight;
        }
        if (hidden.totals == nullptr) continue;
        const float4 totals = unit_totals(sum_of(eight));
        if (pair < pairs && chunk == 0) hidden.totals[unit] = totals;
    }
}

DEVICE void add_bias(const float* bias, float (&sums)[kHiddenTiles][4]) {
    const float first = bias[0], second = bias[1];
#pragma unroll
    for (int tile = 0; tile < kHiddenTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[tile][i] += i < 2 ? first : second;
    }
}

template <class Format>
DEVICE void expert_gate_up_prefill(const ExpertTable& experts, const int* token_of_pair,
                                   const PackedTokens& x, const HiddenRows& hidden,
                                   const GateUpPrefillShape& shape, const Gating& gating) {
    SHARED_MEMORY(shared);
    using Stage = Stages<Format, kHiddenTiles>;
    const int first = experts.begin() + blockIdx.x * Stage::kTokens;
    const int pairs = min(experts.end() - first, Stage::kTokens);
    if (pairs <= 0) return;
    const Lane lane = this_lane();
    const int slice = blockIdx.z / shape.hidden_units, blocks = shape.slice_width / kElements;
    const int row_block = blockIdx.z % shape.hidden_units * kPrefillWarps + threadIdx.x / kWarp;
    const u8* const record = experts.record();
    const u8* const matrix = record + static_cast<size_t>(slice) * shape.slice_bytes;
    const u8* const block = row_block < blocks
                                ? matrix + static_cast<size_t>(row_block) * Format::block_bytes(shape.units)
                                : nullptr;
    float sums[kHiddenTiles][4] = {};
    const PairRows rows = {token_of_pair + first, pairs};
    multiply_tokens(block, shape.units, x, rows, Stage{shared}, lane, sums);
    scale_rows<Format>(block, shape.units, lane, sums);
    if (shape.bias && block != nullptr) {
        const float* const bias = reinterpret_cast<const float*>(record + shape.bias);
        add_bias(bias + (slice * blocks + row_block) * kRowBlock + 2 * lane.group, sums);
    }
    put_hidden(shared, sums, gating, lane);
    __syncthreads();
    store_hidden(shared, hidden, first, pairs);
}

#define GATE_UP_FORMAT(format, ...)                                                                          \
    extern "C" __global__ void __launch_bounds__(kPrefillThreads, kPrefillMinBlocks)                         \
        expert_gate_up_prefill_##format(const u64* records, const int* first_pair, const int* token_of_pair, \
                                        const u8* x, const u8* totals, u8* hidden, float4* hidden_totals,    \
                                        int units, int slice_width, int slice_bytes, int hidden_units,       \
                                        int slices, int bias, int kind, float alpha, float limit) {          \
        expert_gate_up_prefill<__VA_ARGS__>({records, first_pair}, token_of_pair, {x, totals, units},        \
                                            {hidden, hidden_totals, slices * hidden_units},                  \
                                            {units, slice_width, slice_bytes, hidden_units, bias},           \
                                            {kind, alpha, limit});                                           \
    }                                                                                                        \
    EXPORT_KERNEL(expert_gate_up_prefill_##format)

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
