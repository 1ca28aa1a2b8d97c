// What the attention kernels share: which rows of a batch a block treats, what the codes of a page mean, and
// how a warp reads queries.
#pragma once

#include "kv_page.cuh"

constexpr float kNothing = -1e30f;  // the largest score of no token
constexpr float kLog2E = 1.4426950408889634f;

// Row and pair of columns of a fragment: lane / 4 and lane % 4.
struct QueryLane {
    int group, member;
};

// Successive tokens of one sequence: `tokens` rows of the batch from first_row on, the first of which is
// token `position` of its sequence, whose pages are pages[first_page] and the following ones.
struct RowTile {
    int first_row, tokens, position, first_page;
};

DEVICE RowTile row_tile(const int* tiles, int index) {
    const uint4 words = reinterpret_cast<const uint4*>(tiles)[index];
    return {static_cast<int>(words.x), static_cast<int>(words.y), static_cast<int>(words.z),
            static_cast<int>(words.w)};
}

// Pairs of a word of stored int8 codes: bytes 0 1 or 2 3, of which the places 0 2 1 3 make codes 0 2 or 1 3.
constexpr u32 kEvenCodes = 0x4140, kOddCodes = 0x4342;

// As f16: 0x6400 | u is 1024 + u; less 1152 is the code.
DEVICE u32 codes_as_f16(u32 word, u32 pair) {
    return sub_f16x2(__byte_perm(word, 0x64646464u, pair), 0x64806480u);
}

// As bf16. Stored codes have the sign bit flipped; else as Int8 in weights.cuh.
DEVICE u32 codes_as_bf16(u32 word, u32 pair) {
    const u32 bytes = __byte_perm(word ^ 0x80808080u, 0, pair);
    const u32 raised = (bytes & 0x007f007fu) | 0x43004300u, base = (bytes & 0x00800080u) | 0xc300c300u;
    return fma_bf16x2(raised, 0x3f803f80u, base);
}

// Of a pair of bf16 values of tokens `first` and `first + 1`, those before `valid`: others may be NaN, which
// times a weight of 0 is no 0.
DEVICE u32 only_valid(u32 pair, int first, int valid) {
    const u32 low = first < valid ? 0x0000ffffu : 0u, high = first + 1 < valid ? 0xffff0000u : 0u;
    return pair & (low | high);
}

// Over the four lanes of a row.
DEVICE float over_members_max(float value) {
    value = fmaxf(value, __shfl_xor_sync(FULL, value, 1));
    return fmaxf(value, __shfl_xor_sync(FULL, value, 2));
}

DEVICE float over_members_sum(float value) {
    value += __shfl_xor_sync(FULL, value, 1);
    return value + __shfl_xor_sync(FULL, value, 2);
}

// What makes a result of a sum that is weighted by 2^(score - largest): the weights' inverse, with a logit
// that joins the weights where there are sinks (else null).
DEVICE float finishing_factor(float largest, float weights, const float* sink) {
    if (sink == nullptr) return 1.0f / weights;
    const float logit = *sink * kLog2E, raised = fmaxf(largest, logit),
                factor = exp2_approx(largest - raised);
    return factor / (weights * factor + exp2_approx(logit - raised));
}

// The largest magnitude of a query, 0 for null.
DEVICE float largest_element(const float* query, int dim, QueryLane lane) {
    float largest = 0.0f;
#pragma unroll 2  // all loads at once would take most registers
    for (int i = 4 * lane.member; query != nullptr && i < dim; i += 16) {
        const float4 four = *reinterpret_cast<const float4*>(query + i);
        largest =
            fmaxf(largest, fmaxf(fmaxf(fabsf(four.x), fabsf(four.y)), fmaxf(fabsf(four.z), fabsf(four.w))));
    }
    return over_members_max(largest);
}

// Elements of a query that meet 16 elements of keys: for int8 pages 4 member, 4 member + 2 and the next of
// both, for bf16 pages 2 member and the next, and both plus 8.
struct Int8Query {
    DEVICE uint2 operand(const float* query, float factor, QueryLane lane) {
        const float4 q = *reinterpret_cast<const float4*>(query + 4 * lane.member);
        return make_uint2(pack_f16(q.x * factor, q.z * factor), pack_f16(q.y * factor, q.w * factor));
    }
};

struct Bf16Query {
    DEVICE uint2 operand(const float* query, float factor, QueryLane lane) {
        const float2 low = *reinterpret_cast<const float2*>(query + 2 * lane.member);
        const float2 high = *reinterpret_cast<const float2*>(query + 2 * lane.member + 8);
        return make_uint2(pack_bf16(low.x * factor, low.y * factor),
                          pack_bf16(high.x * factor, high.y * factor));
    }
};
