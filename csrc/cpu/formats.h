// Weight formats and the packed layout, as strata/store/formats.py defines them (a test compares the two).
#pragma once

#include <cstddef>
#include <cstdint>

// For functions that files of different instruction sets include: never a symbol of their own, for the linker
// would keep one copy for all (see kernels/kernels.h).
#define STRATA_ALWAYS_INLINE inline __attribute__((always_inline))

namespace strata::cpu {

constexpr int kRowBlock = 16;
constexpr int kUnitCols = 64;
constexpr int kBlockAlign = 64;

enum class Values : int { kInt4, kE2m1, kInt8, kBf16, kF16 };

struct Format {
    const char* name;
    Values values;
    int group;        // columns that share a scale; 0 = the whole row, or no scale
    int scale_bytes;  // 0 none, 1 E8M0, 2 fp16, 4 f32
    bool minimum;

    STRATA_ALWAYS_INLINE constexpr bool quantized() const {
        return values != Values::kBf16 && values != Values::kF16;
    }
};

// Indexed by the format's code.
constexpr Format kFormats[] = {
    {"bf16", Values::kBf16, 0, 0, false},     {"f16", Values::kF16, 0, 0, false},
    {"w8", Values::kInt8, 0, 4, false},       {"w8g32", Values::kInt8, 32, 2, false},
    {"w4g32", Values::kInt4, 32, 2, false},   {"w4g64", Values::kInt4, 64, 2, false},
    {"w4g128", Values::kInt4, 128, 2, false}, {"w4g32m", Values::kInt4, 32, 2, true},
    {"w4g64m", Values::kInt4, 64, 2, true},   {"w4g128m", Values::kInt4, 128, 2, true},
    {"mxfp4", Values::kE2m1, 32, 1, false},
};
constexpr int kFormatCount = sizeof(kFormats) / sizeof(kFormats[0]);

// Bytes of one unit (16 rows x 64 columns).
constexpr int kUnitBytes[] = {512, 512, 1024, 2048, 2048};

// One packed matrix; the bytes belong to the caller. All sizes derive from code, rows and cols.
struct Matrix {
    const uint8_t* data;
    int code;
    int rows, cols;     // logical
    int blocks, units;  // row blocks; units of 64 columns per block
    size_t scales_at;   // offset of the scales inside a block
    size_t mins_at;
    size_t block_bytes;
    size_t bytes;

    STRATA_ALWAYS_INLINE const uint8_t* block(int index) const {
        return data + static_cast<size_t>(index) * block_bytes;
    }
    STRATA_ALWAYS_INLINE int padded_cols() const { return units * kUnitCols; }
    STRATA_ALWAYS_INLINE const Format& format() const { return kFormats[code]; }
};

Matrix make_matrix(const uint8_t* data, int code, int rows, int cols);

}  // namespace strata::cpu
