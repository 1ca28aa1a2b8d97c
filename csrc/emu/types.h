// Number types of the kernels as the host sees them: the emulator's twin of what CUDA and PTX provide.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int8_t i8;

struct alignas(8) uint2 {
    u32 x, y;
};
struct alignas(16) uint4 {
    u32 x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
static inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// 16-bit floats are storage only; arithmetic happens in f32 or in packed PTX instructions.
struct f16 {
    u16 bits;
};
struct bf16 {
    u16 bits;
};

static inline u32 __float_as_uint(float value) {
    u32 bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static inline float __uint_as_float(u32 bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline float to_float(float value) { return value; }
static inline float to_float(bf16 value) { return __uint_as_float(static_cast<u32>(value.bits) << 16); }

static inline float to_float(f16 value) {
    const u32 sign = (value.bits & 0x8000u) << 16, exponent = value.bits >> 10 & 31,
              rest = value.bits & 1023u;
    if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | rest << 13);
    if (exponent == 0) return __uint_as_float(__float_as_uint(static_cast<float>(rest) * 0x1p-24f) | sign);
    return __uint_as_float(sign | (exponent + 112) << 23 | rest << 13);
}

// Both round to nearest, ties to even.
static inline bf16 to_bf16(float value) {
    const u32 bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fff};
    return {static_cast<u16>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16)};
}

static inline f16 to_f16(float value) {
    u32 bits = __float_as_uint(value);
    const u32 sign = bits >> 16 & 0x8000u;
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u) return {static_cast<u16>(sign | 0x7fff)};
    if (bits >= 0x477ff000u) return {static_cast<u16>(sign | 0x7c00)};  // from 65520 on
    if (bits < 0x38800000u) {                                           // below the smallest normal number
        const float steps = std::nearbyint(__uint_as_float(bits) * 0x1p24f);
        return {static_cast<u16>(sign | static_cast<u16>(steps))};
    }
    bits += 0xfffu + (bits >> 13 & 1);
    return {static_cast<u16>(sign | (bits - 0x38000000u) >> 13)};
}
