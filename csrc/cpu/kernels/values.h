// How the formats differ: decoding of the values (to bytes for int8 activations, to f32 for the exact mode)
// and of the scales. The layout is described in strata/store/formats.py.
#pragma once

#include "cpu/formats.h"
#include "cpu/kernels/simd.h"

namespace strata::cpu::STRATA_ISA {
namespace {

// Steps of four columns: byte 4 * row + j of a decoded step is column 4 * step + j.
constexpr int kStepCols = 4;
constexpr int kSteps = kUnitCols / kStepCols;
constexpr int kStepBytes = kRowBlock * kStepCols;

template <class Rows>
STRATA_INLINE typename Rows::Ints nibbles(const uint8_t* unit, int step) {
    const auto chunk = Rows::load_ints(unit + step / 2 * kStepBytes);
    return and_ints(step % 2 == 0 ? chunk : shift_right(chunk, 4), Rows::set_ints(0x0f0f0f0f));
}

// What decoded bytes exceed the values by (in their unit: half for E2M1).
constexpr int byte_offset(const Format& format) {
    if (format.values == Values::kE2m1) return 12;
    if (format.values == Values::kInt8) return kInt8Offset;
    return format.minimum ? 0 : 8;
}

// Decoded bytes of one value kind.
template <Values kKind, bool kMinimum>
struct Bytes;

template <bool kMinimum>
struct Bytes<Values::kInt4, kMinimum> {
    static constexpr int kPartSteps = unsigned_steps(15);
    static constexpr bool kSigned = false;
    template <class Rows>
    STRATA_INLINE typename Rows::Ints step(const uint8_t* unit, int step) {
        return nibbles<Rows>(unit, step);
    }
};

// Twice the E2M1 value (0 .5 1 1.5 2 3 4 6, then the negatives) plus 12, so that bytes are unsigned.
template <>
struct Bytes<Values::kE2m1, false> {
    static constexpr int kPartSteps = unsigned_steps(24);
    static constexpr bool kSigned = false;
    template <class Rows>
    STRATA_INLINE typename Rows::Ints step(const uint8_t* unit, int step) {
        const __m128i table = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
        return lookup(table, nibbles<Rows>(unit, step));
    }
};

template <>
struct Bytes<Values::kInt8, false> {
    static constexpr int kPartSteps = 8;
    static constexpr bool kSigned = kInt8Offset == 0;
    template <class Rows>
    STRATA_INLINE typename Rows::Ints step(const uint8_t* unit, int step) {
        return prepare_signed(Rows::load_ints(unit + step * kStepBytes));
    }
};

// The row scales of group `group` from row `row` of the block on; E8M0 is 2^(e - 127), with e = 0 the
// subnormal 2^-127.
template <int kScaleBytes, class Rows = WholeBlock>
STRATA_INLINE typename Rows::Floats load_scales(const uint8_t* scales, int group, int row = 0) {
    static_assert(kScaleBytes == 1 || kScaleBytes == 2 || kScaleBytes == 4, "no such scale");
    const uint8_t* at = scales + (static_cast<size_t>(group) * kRowBlock + row) * kScaleBytes;
    if constexpr (kScaleBytes == 4) return Rows::load_floats(reinterpret_cast<const float*>(at));
    if constexpr (kScaleBytes == 2) return Rows::load_f16(at);
    return as_floats(max_ints(shift_left(Rows::load_u8(at), 23), Rows::set_ints(0x00400000)));
}

// Group that column `unit * 64 + within` belongs to.
template <int kGroup>
constexpr int group_of(int unit, int within) {
    return kGroup == 0 ? 0 : (unit * kUnitCols + within) / kGroup;
}

// One column of a unit as 32-bit lanes before scaling, for the value kinds that have one scale per group.
// Used fully unrolled: `col` is a constant and the loads of a chunk are shared.
template <Values kKind>
STRATA_INLINE Floats raw_column(const uint8_t* unit, int col) {
    if constexpr (kKind == Values::kInt8) {
        const Ints chunk = load_ints(unit + col / 4 * kStepBytes);
        return to_floats(sign_shift_right(shift_left(chunk, 24 - 8 * (col % 4)), 24));
    } else if constexpr (kKind == Values::kBf16) {
        const Ints chunk = load_ints(unit + col / 2 * kStepBytes);
        return as_floats(col % 2 == 0 ? shift_left(chunk, 16) : and_ints(chunk, set_ints(-65536)));
    } else if constexpr (kKind == Values::kF16) {
        const Ints chunk = load_ints(unit + col / 2 * kStepBytes);
        return low_f16(col % 2 == 0 ? chunk : shift_right(chunk, 16));
    } else {
        const Ints chunk = load_ints(unit + col / 8 * kStepBytes);
        const Ints code = and_ints(shift_right(chunk, 8 * (col % 4) + (col % 8 < 4 ? 0 : 4)), set_ints(15));
        if constexpr (kKind == Values::kInt4) return to_floats(code);
        const __m128i doubled = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
        const Ints value = sign_shift_right(shift_left(lookup(doubled, code), 24), 24);
        return mul(to_floats(value), set_floats(0.5f));
    }
}

// Values of one unit as f32 [64 columns][16 rows], scaled; rounded like scale * q + minimum in f32, which is
// exact before the addition.
template <int kCode>
__attribute__((noinline)) static void decode_unit(const Matrix& matrix, const uint8_t* block, int unit,
                                                  float* out) {
    constexpr Format kFormat = kFormats[kCode];
    const uint8_t* values = block + static_cast<size_t>(unit) * kUnitBytes[static_cast<int>(kFormat.values)];
    constexpr int kSpan = kFormat.group == 32 ? 32 : kUnitCols;
    for (int first = 0; first < kUnitCols; first += kSpan) {
        Floats scale = set_floats(1.0f), shift = set_floats(0.0f);
        if constexpr (kFormat.scale_bytes != 0)
            scale = load_scales<kFormat.scale_bytes>(block + matrix.scales_at,
                                                     group_of<kFormat.group>(unit, first));
        if constexpr (kFormat.minimum)
            shift = load_scales<kFormat.scale_bytes>(block + matrix.mins_at,
                                                     group_of<kFormat.group>(unit, first));
        else if constexpr (kFormat.values == Values::kInt4)
            shift = mul(scale, set_floats(-8.0f));
        constexpr bool kShifted = kFormat.values == Values::kInt4;
#pragma GCC unroll 64
        for (int col = 0; col < kSpan; col++) {
            Floats value = raw_column<kFormat.values>(
                values + first * (kUnitBytes[static_cast<int>(kFormat.values)] / kUnitCols), col);
            if constexpr (kShifted)
                value = fma(value, scale, shift);
            else if constexpr (kFormat.scale_bytes != 0)
                value = mul(value, scale);
            store_floats(out + (first + col) * kRowBlock, value);
        }
    }
}

}  // namespace
}  // namespace strata::cpu::STRATA_ISA
