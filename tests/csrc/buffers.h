// What drivers of ops on packed weights need: random inputs in buffers that end where they must.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "cpu/formats.h"

using namespace strata::cpu;

inline std::mt19937 rng(1);

// A copy on the heap whose end is the end of the allocation: one byte too far is seen.
template <class T>
std::unique_ptr<T[]> exact(const std::vector<T>& values) {
    std::unique_ptr<T[]> memory(new T[values.size()]);
    if (!values.empty()) std::memcpy(memory.get(), values.data(), values.size() * sizeof(T));
    return memory;
}

inline std::unique_ptr<float[]> activations(size_t n) {
    std::normal_distribution<float> normal;
    std::vector<float> values(n);
    for (float& value : values) value = normal(rng);
    return exact(values);
}

// Random codes; every scale and minimum is the same small number.
inline std::vector<uint8_t> packed_bytes(int code, int rows, int cols) {
    const Matrix shape = make_matrix(nullptr, code, rows, cols);
    const Format& format = shape.format();
    std::vector<uint8_t> bytes(shape.bytes);
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(rng());
    for (int b = 0; b < shape.blocks; b++) {
        uint8_t* block = bytes.data() + b * shape.block_bytes;
        const uint16_t half = format.values == Values::kBf16 ? 0x3c10 : 0x2410;
        const float whole = 0.01f;
        if (format.scale_bytes == 0)
            for (size_t i = 0; i < shape.block_bytes; i += 2) std::memcpy(block + i, &half, 2);
        for (size_t i = shape.scales_at;
             i + format.scale_bytes <= shape.block_bytes && format.scale_bytes > 0; i += format.scale_bytes) {
            if (format.scale_bytes == 1) block[i] = 121;
            if (format.scale_bytes == 2) std::memcpy(block + i, &half, 2);
            if (format.scale_bytes == 4) std::memcpy(block + i, &whole, 4);
        }
    }
    return bytes;
}

inline void close(const float* got, const float* wanted, size_t n, const char* what, int code) {
    double error = 0, size = 1e-6;
    for (size_t i = 0; i < n; i++) {
        error += std::pow(got[i] - wanted[i], 2);
        size += std::pow(wanted[i], 2);
    }
    if (std::sqrt(error / size) < 0.05) return;
    std::fprintf(stderr, "%s of %s: relative error %g\n", what, kFormats[code].name, std::sqrt(error / size));
    std::exit(1);
}
