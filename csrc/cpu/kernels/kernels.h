// The dispatch table: one per instruction set, filled by kernels/table.cpp, which is compiled for each.
//
// Files in this folder are compiled once per instruction set, in namespace `avx2` or `avx512`
// (STRATA_ISA). They define nothing with external linkage but functions of that namespace: an inline
// function shared between the two would be merged by the linker and could carry AVX-512 code to a machine
// without it (a test looks for such symbols). So: `static` or an anonymous namespace, no std:: containers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/ahead.h"
#include "cpu/formats.h"
#include "cpu/kernels/attention.h"

namespace strata::cpu {

// What the sum of a span's codes is wanted for: weights stored as value + offset start their integer sums at
// -offset * sum; a minimum is multiplied by scale * sum.
union SpanTotal {
    int32_t start;
    float scaled;
};

// 64 activations as int8: value = code * scale. One span of 64 columns uses entry 0; spans of 32 columns
// (formats of group 32) use both; a span of all columns (quantize_token) uses entry 0 of its first unit.
// Everything a kernel needs of one token and unit stands behind one pointer.
struct QuantUnit {
    int8_t codes[kUnitCols];
    float scales[2];
    SpanTotal totals[2];
};

// Neighbouring row blocks that a kernel takes at once: with two, many tokens share each of their loads.
constexpr int kMostBlocks = 2;

// `blocks` row blocks of a matrix, the first at `block`, times some tokens. x: a panel of activations,
// [units][stride] of QuantUnit or of float[64]; the first `tokens` of each unit are used.
// out: f32 [blocks][tokens][16], overwritten. ahead: null, or what to prefetch meanwhile.
struct BlockJob {
    const Matrix* matrix;
    const uint8_t* block;
    int blocks;
    const void* x;
    int stride;
    int tokens;
    float* out;
    Ahead* ahead;
};
using BlockFn = void (*)(const BlockJob&);
using DecodeRowFn = void (*)(const Matrix& matrix, int row, float* out);

enum class Gate : int { kSilu, kGeluTanh, kSwigluClamped };
struct Gating {
    Gate kind;
    float alpha, limit;
};

// Columns whose products of codes, 127 * 127 each, a 32-bit sum holds for certain.
constexpr int kMostTokenCols = INT32_MAX / (127 * 127);

struct Kernels {
    const char* name;
    // Indexed by format code. int8 activations; null for bf16 and f16.
    const BlockFn* dot_q8;
    // w8 with one activation scale per token (quantize_token); at most kMostTokenCols columns.
    BlockFn dot_w8a8;
    // f32 activations; every format.
    const BlockFn* dot_f32;
    // One row of a matrix as f32 [cols].
    const DecodeRowFn* decode_row;
    // x [cols] as weights of this format meet it -> out[unit * stride]; columns beyond cols count as 0.
    void (*quantize)(const Format& format, const float* x, int cols, int units, QuantUnit* out, int stride);
    // x [cols] with one scale for all of them, as dot_w8a8 reads it: scale and total stand in the first unit.
    void (*quantize_token)(const float* x, int cols, int units, QuantUnit* out, int stride);
    // z [tokens][16] = 8 gate and 8 up values, bias [16] or null -> h[token * stride + 0..7].
    void (*gate)(const Gating& gating, const float* z, const float* bias, int tokens, float* h,
                 size_t stride);
    // Does int8 multiply-adds for a while and returns how many; sums [16] is overwritten.
    int64_t (*int8_peak)(int64_t rounds, int32_t* sums);
    // Indexed by KvType.
    const AttentionFns* attention;
};

// Columns that share an activation scale when they meet weights of this format.
STRATA_ALWAYS_INLINE constexpr int activation_span(const Format& format) {
    return format.group == 32 ? 32 : 64;
}

// Weights with one scale per row, whose products with a token's codes need no scale in between.
STRATA_ALWAYS_INLINE constexpr bool has_row_scales(const Format& format) {
    return format.values == Values::kInt8 && format.group == 0;
}

namespace avx2 {
extern const Kernels kKernels;
}
namespace avx512 {
extern const Kernels kKernels;
}

}  // namespace strata::cpu
