// Packed weights in the store's own layout (strata/store/formats.py) as operands of mma.m16n8k16.
//
// A row block is the A operand as it lies in memory; nothing is repacked. Two permutations cost nothing,
// because every operand follows them:
// - rows: row g of the operand is row 2g of the block and row g + 8 is row 2g + 1, so that a lane's two
//   rows are neighbours: one 8-byte load, and one load for both scales;
// - columns: a lane's 4-bit word holds columns 8c..8c+7 of a row as (0 4)(1 5)(2 6)(3 7), low nibble first.
//   Masking nibbles 16 bits apart gives the pairs (0 2), (1 3), (4 6), (5 7): the order in which tokens.cuh
//   packs the activations.
// A warp reads each 32-byte sector of a unit (16 rows x 64 columns) exactly once.
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

// w4g32, w4g64, w4g128 and their forms with a minimum: scale * (q - 8), or scale * q + minimum.
template <int Columns, bool Minimum>
struct Int4 {
    static constexpr bool kMinimum = Minimum;
    static constexpr int kGroups = Columns == 32 ? 2 : 1;  // of a unit
    static constexpr int kUnitBytes = 512;

    struct Unit {
        uint2 words[2];  // chunks `member` and `member + 4`; x is row 2g, y row 2g + 1
        u32 scales[kGroups], minimums[Minimum ? kGroups : 1];
    };

    DEVICE int scale_bytes(int units) { return units * kUnitColumns / Columns * kRowBlock * 2; }

    DEVICE int block_bytes(int units) {
        return rounded_up(units * kUnitBytes + scale_bytes(units) * (Minimum ? 2 : 1), 64);
    }

    DEVICE Unit load(const u8* block, int units, int unit, Lane lane) {
        Unit loaded;
        const u8* const values = block + unit * kUnitBytes + lane.member * 64 + lane.group * 8;
        loaded.words[0] = load_once(reinterpret_cast<const uint2*>(values));
        loaded.words[1] = load_once(reinterpret_cast<const uint2*>(values + 256));
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

    // The operand of step 0..3 of a unit; steps 0 and 1 are columns 8m..8m+7, 2 and 3 the same plus 32.
    DEVICE void operand(const Unit& unit, int step, u32 (&a)[4]) {
        const uint2 words = unit.words[step / 2];
        const int shift = step % 2 * 4;
        a[0] = numbers(words.x >> shift);
        a[1] = numbers(words.y >> shift);
        a[2] = numbers(words.x >> (shift + 8));
        a[3] = numbers(words.y >> (shift + 8));
    }

    // Two nibbles 16 bits apart as bf16: 0x4300 | q is 128 + q, exactly.
    DEVICE u32 numbers(u32 nibbles) {
        const u32 raised = (nibbles & 0x000f000fu) | 0x43004300u;
        return fma_bf16x2(raised, kOnes, Minimum ? 0xc300c300u : 0xc308c308u);  // - 128, or - 136
    }

    DEVICE float2 scale(const Unit& unit, int group) { return f16_pair(unit.scales[group]); }
    DEVICE float2 minimum(const Unit& unit, int group) { return f16_pair(unit.minimums[group]); }
};
