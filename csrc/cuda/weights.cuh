// Packed weights in the store's own layout (strata/store/formats.py) as operands of mma.m16n8k16.
//
// A row block is the A operand as it lies in memory; nothing is repacked. Two permutations cost nothing,
// because every operand follows them:
// - rows: row g of the operand is row 2g of the block and row g + 8 is row 2g + 1, so that a lane's two
//   rows are neighbours: one 8-byte load, and one load for both scales;
// - columns: a lane's 4-bit word holds columns 8c..8c+7 of a row as (0 4)(1 5)(2 6)(3 7), low nibble first.
//   Masking nibbles 16 bits apart gives the pairs (0 2), (1 3), (4 6), (5 7): the order in which tile.cuh
//   and packed_rows.cuh have the activations.
// Formats with 8 and 16 bits are paired the same way. A warp reads each 32-byte sector of a unit (16 rows x
// 64 columns) exactly once.
//
// A format says: kScaled (a scale per group), kMinimum (scale * q + minimum), kRowScale (one scale per row,
// applied at the end), kRemainder (a number is the sum of two bf16: operand and remainder), kGroups (of a
// unit), block_bytes, load, operand, and what of scale, minimum and row_scale it has. OneNumber answers for
// what a format does not have.
#pragma once

#include "device.cuh"

constexpr int kRowBlock = 16, kUnitColumns = 64, kSteps = 4;  // steps of 16 columns per unit
constexpr u32 kOnes = 0x3f803f80u;                            // bf16x2 of 1

struct Lane {
    int group, member;  // PTX's names are groupID and threadID_in_group
};

DEVICE Lane this_lane() {
    const int lane = threadIdx.x % kWarp;
    return {lane / 4, lane % 4};
}

DEVICE float2 f16_pair(u32 pair) {
    return make_float2(to_float(f16{static_cast<u16>(pair)}), to_float(f16{static_cast<u16>(pair >> 16)}));
}

DEVICE int rounded_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

// What most formats answer: scales per group, no minimum, no scale per row, every number one bf16. The
// functions are never used.
struct OneNumber {
    static constexpr bool kScaled = true, kMinimum = false, kRowScale = false, kRemainder = false;

    template <class Unit>
    DEVICE float2 minimum(const Unit&, int) {
        return make_float2(0.0f, 0.0f);
    }
    template <class Unit>
    DEVICE void remainder(const Unit&, int, u32 (&)[4]) {}
    DEVICE float2 row_scale(const u8*, int, Lane) { return make_float2(1.0f, 1.0f); }
};

// The words of 4-bit formats; Own::numbers makes bf16 of two nibbles 16 bits apart.
template <class Own>
struct Nibbles : OneNumber {
    static constexpr int kUnitBytes = 512;

    // Chunks `member` and `member + 4`; x is row 2g, y row 2g + 1.
    DEVICE void load_words(uint2 (&words)[2], const u8* block, int unit, Lane lane) {
        const u8* const values = block + unit * kUnitBytes + lane.member * 64 + lane.group * 8;
        words[0] = load_once(reinterpret_cast<const uint2*>(values));
        words[1] = load_once(reinterpret_cast<const uint2*>(values + 256));
    }

    // The operand of step 0..3 of a unit; steps 0 and 1 are columns 8m..8m+7, 2 and 3 the same plus 32.
    template <class Unit>
    DEVICE void operand(const Unit& unit, int step, u32 (&a)[4]) {
        const uint2 words = unit.words[step / 2];
        const int shift = step % 2 * 4;
        a[0] = Own::numbers(words.x >> shift);
        a[1] = Own::numbers(words.y >> shift);
        a[2] = Own::numbers(words.x >> (shift + 8));
        a[3] = Own::numbers(words.y >> (shift + 8));
    }
};

// w4g32, w4g64, w4g128 and their forms with a minimum: scale * (q - 8), or scale * q + minimum.
template <int Columns, bool Minimum>
struct Int4 : Nibbles<Int4<Columns, Minimum>> {
    static constexpr bool kMinimum = Minimum;
    static constexpr int kGroups = Columns == 32 ? 2 : 1;  // of a unit
    static constexpr int kUnitBytes = 512;

    struct Unit {
        uint2 words[2];
        u32 scales[kGroups], minimums[Minimum ? kGroups : 1];
    };

    DEVICE int scale_bytes(int units) { return units * kUnitColumns / Columns * kRowBlock * 2; }

    DEVICE int block_bytes(int units) {
        return rounded_up(units * kUnitBytes + scale_bytes(units) * (Minimum ? 2 : 1), 64);
    }

    DEVICE Unit load(const u8* block, int units, int unit, Lane lane) {
        Unit loaded;
        Int4::load_words(loaded.words, block, unit, lane);
        const u8* const scales = block + units * kUnitBytes + lane.group * 4;
#pragma unroll
        for (int i = 0; i < kGroups; ++i) {
            const int group = unit * kUnitColumns / Columns + i;
            loaded.scales[i] = load_once(reinterpret_cast<const u32*>(scales + group * 32));
            if (Minimum) {
                const u8* const minimums = scales + scale_bytes(units) + group * 32;
                loaded.minimums[i] = load_once(reinterpret_cast<const u32*>(minimums));
            }
        }
        return loaded;
    }

    // 0x4300 | q is 128 + q, exactly.
    DEVICE u32 numbers(u32 nibbles) {
        const u32 raised = (nibbles & 0x000f000fu) | 0x43004300u;
        return fma_bf16x2(raised, kOnes, Minimum ? 0xc300c300u : 0xc308c308u);  // - 128, or - 136
    }

    DEVICE float2 scale(const Unit& unit, int group) { return f16_pair(unit.scales[group]); }
    DEVICE float2 minimum(const Unit& unit, int group) { return f16_pair(unit.minimums[group]); }
};

// mxfp4: E2M1 values, one E8M0 byte per 32 columns. As bf16 with exponent and mantissa bits shifted into
// place a value is 2^-126 of what it means, subnormal ones included.
struct Mxfp4 : Nibbles<Mxfp4> {
    static constexpr int kGroups = 2;
    static constexpr u32 kTwoTo126 = 0x7e807e80u;

    struct Unit {
        uint2 words[2];
        u16 scales[kGroups];  // of rows 2g and 2g + 1
    };

    DEVICE int block_bytes(int units) { return rounded_up(units * (kUnitBytes + 2 * kRowBlock), 64); }

    DEVICE Unit load(const u8* block, int units, int unit, Lane lane) {
        Unit loaded;
        load_words(loaded.words, block, unit, lane);
        const u8* const scales = block + units * kUnitBytes + unit * 32 + lane.group * 2;
        loaded.scales[0] = *reinterpret_cast<const u16*>(scales);
        loaded.scales[1] = *reinterpret_cast<const u16*>(scales + 16);
        return loaded;
    }

    DEVICE u32 numbers(u32 nibbles) {
        const u32 bits = (nibbles & 0x00070007u) << 6 | (nibbles & 0x00080008u) << 12;
        return fma_bf16x2(bits, kTwoTo126, 0x80008000u);  // + -0 keeps the sign of zeros
    }

    DEVICE float2 scale(const Unit& unit, int group) {
        return make_float2(power(unit.scales[group] & 255u), power(unit.scales[group] >> 8));
    }

    // 2^(e - 127); the smallest is subnormal.
    DEVICE float power(u32 exponent) { return __uint_as_float(exponent == 0 ? 0x00400000u : exponent << 23); }
};

// w8g32 (Columns 32, an fp16 scale per 32 columns) and w8 (Columns 0, an f32 scale per row).
template <int Columns>
struct Int8 : OneNumber {
    static constexpr bool kRowScale = Columns == 0, kScaled = !kRowScale;
    static constexpr int kGroups = kRowScale ? 1 : 2, kUnitBytes = 1024;

    struct Unit {
        uint2 words[kSteps];  // of step s: four columns of rows 2g and 2g + 1
        u32 scales[kGroups];
    };

    DEVICE int block_bytes(int units) {
        return rounded_up(units * kUnitBytes + (kRowScale ? 4 : units * 4) * kRowBlock, 64);
    }

    DEVICE Unit load(const u8* block, int units, int unit, Lane lane) {
        Unit loaded;
        const u8* const values = block + unit * kUnitBytes + lane.member * 128 + lane.group * 8;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const u8* const chunk = values + step % 2 * 64 + step / 2 * 512;
            loaded.words[step] = load_once(reinterpret_cast<const uint2*>(chunk));
        }
        if (kRowScale) return loaded;
        const u8* const scales = block + units * kUnitBytes + unit * 64 + lane.group * 4;
#pragma unroll
        for (int i = 0; i < kGroups; ++i)
            loaded.scales[i] = load_once(reinterpret_cast<const u32*>(scales + i * 32));
        return loaded;
    }

    DEVICE void operand(const Unit& unit, int step, u32 (&a)[4]) {
        a[0] = numbers(unit.words[step].x);
        a[1] = numbers(unit.words[step].y);
        a[2] = numbers(unit.words[step].x >> 8);
        a[3] = numbers(unit.words[step].y >> 8);
    }

    // Bytes 0 and 2 as bf16: the low seven bits as 128 + v, then - 128, or - 256 where the sign bit is set;
    // that bit turns one into the other.
    DEVICE u32 numbers(u32 bytes) {
        const u32 raised = (bytes & 0x007f007fu) | 0x43004300u, base = (bytes & 0x00800080u) | 0xc300c300u;
        return fma_bf16x2(raised, kOnes, base);
    }

    DEVICE float2 scale(const Unit& unit, int group) {
        return kRowScale ? make_float2(1.0f, 1.0f) : f16_pair(unit.scales[group]);
    }

    DEVICE float2 row_scale(const u8* block, int units, Lane lane) {
        return *reinterpret_cast<const float2*>(block + units * kUnitBytes + lane.group * 8);
    }
};

// The words of 16-bit formats, as they are stored.
struct Halves : OneNumber {
    static constexpr bool kScaled = false;
    static constexpr int kGroups = 1, kUnitBytes = 2048;

    struct Unit {
        uint2 words[kSteps][2];  // columns 0 1 and 2 3 of a step's four
    };

    DEVICE int block_bytes(int units) { return units * kUnitBytes; }

    DEVICE Unit load(const u8* block, int, int unit, Lane lane) {
        Unit loaded;
        const u8* const values = block + unit * kUnitBytes + lane.member * 256 + lane.group * 8;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const u8* const chunk = values + step % 2 * 128 + step / 2 * 1024;
            loaded.words[step][0] = load_once(reinterpret_cast<const uint2*>(chunk));
            loaded.words[step][1] = load_once(reinterpret_cast<const uint2*>(chunk + 64));
        }
        return loaded;
    }

    DEVICE void operand(const Unit& unit, int step, u32 (&a)[4]) {
        const uint2 first = unit.words[step][0], second = unit.words[step][1];
        a[0] = __byte_perm(first.x, second.x, 0x5410);
        a[1] = __byte_perm(first.y, second.y, 0x5410);
        a[2] = __byte_perm(first.x, second.x, 0x7632);
        a[3] = __byte_perm(first.y, second.y, 0x7632);
    }

    DEVICE float2 scale(const Unit&, int) { return make_float2(1.0f, 1.0f); }
};

struct Bf16 : Halves {};

// f16 has 11 significant bits and bf16 has 8: a number is the sum of two bf16, exactly.
struct F16 : Halves {
    static constexpr bool kRemainder = true;

    DEVICE void operand(const Unit& unit, int step, u32 (&a)[4]) {
        Halves::operand(unit, step, a);
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = rounded(a[i]);
    }

    DEVICE void remainder(const Unit& unit, int step, u32 (&a)[4]) {
        Halves::operand(unit, step, a);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 all = f16_pair(a[i]);
            const u32 first = rounded(a[i]);
            a[i] = pack_bf16(all.x - __uint_as_float(first << 16), all.y - __uint_as_float(first & ~0xffffu));
        }
    }

    DEVICE u32 rounded(u32 pair) {
        const float2 values = f16_pair(pair);
        return pack_bf16(values.x, values.y);
    }
};
