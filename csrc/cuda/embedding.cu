// y[token] = scale * row ids[token] of a packed matrix, as f32 [tokens, columns]; every format.
//
// values: 0 int4, 1 E2M1, 2 int8, 3 bf16, 4 f16 (strata/store/formats.py); group: columns that share a scale,
// 0 for the whole row; a scale has 0 (none), 1 (E8M0), 2 (f16) or 4 (f32) bytes; minimum 1: scale * q +
// minimum. Grid: tokens. Must move: one row; moves 32 bytes for every 4 of them, because 16 rows lie
// interleaved: a few KB per token.
#include "device.cuh"

constexpr int kInt4 = 0, kE2m1 = 1, kInt8 = 2, kBf16 = 3, kRows = 16;

struct PackedRow {
    const u8 *values, *scales,
        *minimums;  // of the row's first word, of its first group; minimums may be null
    int kind, group, scale_bytes;
};

DEVICE float e2m1(u32 code) {
    const u32 exponent = code >> 1 & 3u, mantissa = code & 1u;
    const float half_steps =
        exponent == 0 ? static_cast<float>(mantissa) : static_cast<float>((2u + mantissa) << (exponent - 1));
    return code & 8u ? -0.5f * half_steps : 0.5f * half_steps;
}

DEVICE int values_per_word(int kind) { return kind <= kE2m1 ? 8 : kind == kInt8 ? 4 : 2; }

// Number i of a word; int4 without its offset.
DEVICE float number(u32 word, int i, int kind) {
    if (kind <= kE2m1) {
        const u32 code = word >> (i % 4 * 8 + i / 4 * 4) & 15u;
        return kind == kE2m1 ? e2m1(code) : static_cast<float>(code);
    }
    if (kind == kInt8) return static_cast<float>(static_cast<i8>(word >> 8 * i & 255u));
    const u16 bits = static_cast<u16>(word >> 16 * i & 0xffffu);
    return kind == kBf16 ? to_float(bf16{bits}) : to_float(f16{bits});
}

DEVICE float scale_at(const u8* scales, int group, int bytes) {
    const u8* const place = scales + group * kRows * bytes;
    if (bytes == 4) return *reinterpret_cast<const float*>(place);
    if (bytes == 2) {
        const f16 scale = *reinterpret_cast<const f16*>(place);
        return to_float(scale);
    }
    return __uint_as_float(*place == 0 ? 0x00400000u : static_cast<u32>(*place) << 23);
}

DEVICE PackedRow packed_row(const u8* matrix, int row, int padded_columns, int kind, int group,
                            int scale_bytes, int minimum) {
    const int words = padded_columns / values_per_word(kind), groups = group ? padded_columns / group : 1;
    const int value_bytes = words * kRows * 4, all_scales = groups * kRows * scale_bytes;
    const int block_bytes = (value_bytes + all_scales * (1 + minimum) + 63) / 64 * 64;
    const u8* const block = matrix + static_cast<size_t>(row / kRows) * block_bytes;
    const u8* const scales = block + value_bytes + row % kRows * scale_bytes;
    return {
        block + row % kRows * 4, scales, minimum ? scales + all_scales : nullptr, kind, group, scale_bytes};
}

extern "C" __global__ void __launch_bounds__(128)
    embedding(const u8* matrix, const int* ids, float* y, int columns, int padded_columns, int values,
              int group, int scale_bytes, int minimum, float scale) {
    const PackedRow row =
        packed_row(matrix, ids[blockIdx.x], padded_columns, values, group, scale_bytes, minimum);
    const int in_word = values_per_word(values);
    const float offset = values == kInt4 && !minimum ? 8.0f : 0.0f;
    for (int column = threadIdx.x; column < columns; column += blockDim.x) {
        const u32 word = *reinterpret_cast<const u32*>(row.values + column / in_word * kRows * 4);
        float value = number(word, column % in_word, values) - offset;
        const int own = group ? column / group : 0;
        if (scale_bytes) value *= scale_at(row.scales, own, scale_bytes);
        if (row.minimums != nullptr) value += scale_at(row.minimums, own, scale_bytes);
        y[static_cast<size_t>(blockIdx.x) * columns + column] = value * scale;
    }
}
EXPORT_KERNEL(embedding)
