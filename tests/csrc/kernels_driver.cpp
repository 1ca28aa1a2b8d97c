// Every op on packed weights with buffers of exactly the size it may touch, under a sanitizer. Results with
// int8 and with f32 activations must be close, which they are not when a kernel reads the wrong place.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "cpu/experts.h"
#include "cpu/grouping.h"
#include "cpu/linear.h"

using namespace strata::cpu;

namespace {

std::mt19937 rng(1);

// A copy on the heap whose end is the end of the allocation: one byte too far is seen.
template <class T>
std::unique_ptr<T[]> exact(const std::vector<T>& values) {
    std::unique_ptr<T[]> memory(new T[values.size()]);
    if (!values.empty()) std::memcpy(memory.get(), values.data(), values.size() * sizeof(T));
    return memory;
}

std::unique_ptr<float[]> activations(size_t n) {
    std::normal_distribution<float> normal;
    std::vector<float> values(n);
    for (float& value : values) value = normal(rng);
    return exact(values);
}

// Random codes; every scale and minimum is the same small number.
std::vector<uint8_t> packed_bytes(int code, int rows, int cols) {
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

void close(const float* got, const float* wanted, size_t n, const char* what, int code) {
    double error = 0, size = 1e-6;
    for (size_t i = 0; i < n; i++) {
        error += std::pow(got[i] - wanted[i], 2);
        size += std::pow(wanted[i], 2);
    }
    if (std::sqrt(error / size) < 0.05) return;
    std::fprintf(stderr, "%s of %s: relative error %g\n", what, kFormats[code].name, std::sqrt(error / size));
    std::exit(1);
}

void try_linear(Cpu& cpu, int code, int rows, int cols, int tokens) {
    const OpGuard guard(cpu);
    const auto bytes = exact(packed_bytes(code, rows, cols));
    const Matrix matrix = make_matrix(bytes.get(), code, rows, cols);
    const auto x = activations(static_cast<size_t>(tokens) * cols), bias = activations(rows);
    const size_t n = static_cast<size_t>(tokens) * rows;
    const std::unique_ptr<float[]> fast(new float[n]), slow(new float[n]);
    linear(cpu, matrix, x.get(), tokens, bias.get(), false, fast.get());
    linear(cpu, matrix, x.get(), tokens, bias.get(), true, slow.get());
    close(fast.get(), slow.get(), n, "linear", code);
    const std::unique_ptr<float[]> row(new float[cols]);
    const int32_t last = rows - 1;
    embedding(cpu, matrix, &last, 1, 1.0f, row.get());
}

void try_heads(Cpu& cpu, int code) {
    const OpGuard guard(cpu);
    constexpr int kHeads = 3, kHeadRows = 7, kCols = 70, kTokens = 5;
    const auto bytes = exact(packed_bytes(code, kHeads * kHeadRows, kCols));
    const Matrix matrix = make_matrix(bytes.get(), code, kHeads * kHeadRows, kCols);
    const auto x = activations(kTokens * kHeads * kCols);
    constexpr size_t kSize = kTokens * kHeads * kHeadRows;
    const std::unique_ptr<float[]> fast(new float[kSize]), slow(new float[kSize]);
    head_linear(cpu, matrix, x.get(), kTokens, kHeads, false, fast.get());
    head_linear(cpu, matrix, x.get(), kTokens, kHeads, true, slow.get());
    close(fast.get(), slow.get(), kSize, "head_linear", code);
}

void try_experts(Cpu& cpu, int code, int tokens) {
    const OpGuard guard(cpu);
    constexpr int kHidden = 70, kWidth = 20, kRows = 48, kExperts = 3;
    const auto up_bytes = exact(packed_bytes(code, kRows, kHidden));
    const auto down_bytes = exact(packed_bytes(code, kHidden, kWidth));
    const auto up_bias = activations(kRows), down_bias = activations(kHidden);
    const FfnSlice slice{make_matrix(up_bytes.get(), code, kRows, kHidden),
                         make_matrix(down_bytes.get(), code, kHidden, kWidth), up_bias.get(),
                         down_bias.get()};
    const auto x = activations(static_cast<size_t>(tokens) * kHidden), weights = activations(tokens * 2);
    std::vector<int32_t> ids;
    for (int t = 0; t < tokens; t++) ids.insert(ids.end(), {t % kExperts, (t + 1) % kExperts});
    const std::vector<const FfnSlice*> slices(kExperts, &slice);
    const auto exact_ids = exact(ids);
    const ExpertWorks found =
        group_tokens(cpu.arena, {exact_ids.get(), weights.get(), tokens, 2, slices.data(), kExperts});
    const size_t n = static_cast<size_t>(tokens) * kHidden;
    const std::unique_ptr<float[]> fast(new float[n]), slow(new float[n]);
    for (const Gate kind : {Gate::kSilu, Gate::kGeluTanh, Gate::kSwigluClamped}) {
        const Gating gating{kind, 1.7f, 7.0f};
        gated_ffn(cpu, x.get(), tokens, kHidden, found.works, found.count, 1, gating, false, fast.get());
        gated_ffn(cpu, x.get(), tokens, kHidden, found.works, found.count, 1, gating, true, slow.get());
        close(fast.get(), slow.get(), n, "gated_ffn", code);
    }
}

}  // namespace

int main() {
    Cpu cpu({0, 0}, false, 1000, avx2::kKernels);
    for (int code = 0; code < kFormatCount; code++) {
        for (const int tokens : {0, 1, 2, 3, 4, 5, 11}) try_linear(cpu, code, 37, 200, tokens);
        try_linear(cpu, code, 1, 1, 1);
        try_heads(cpu, code);
        for (const int tokens : {0, 1, 9}) try_experts(cpu, code, tokens);
    }
    std::puts("ok");
}
