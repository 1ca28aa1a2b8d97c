// Every op on packed weights with buffers of exactly the size it may touch, under a sanitizer. Results with
// int8 and with f32 activations must be close, which they are not when a kernel reads the wrong place.
#include <cstdio>
#include <memory>
#include <vector>

#include "buffers.h"
#include "cpu/experts.h"
#include "cpu/grouping.h"
#include "cpu/linear.h"

using namespace strata::cpu;

namespace {

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
    Cpu cpu({0, 0}, false, 1000, STRATA_ISA::kKernels);
    const int kW8 = 2;
    static_assert(has_row_scales(kFormats[2]));
    cpu.token_scales = true;
    for (const int tokens : {0, 1, 4, 11}) try_linear(cpu, kW8, 37, 200, tokens);
    for (const int tokens : {0, 1, 9}) try_experts(cpu, kW8, tokens);
    cpu.token_scales = false;
    for (int code = 0; code < kFormatCount; code++) {
        for (const int tokens : {0, 1, 2, 3, 4, 5, 11}) try_linear(cpu, code, 37, 200, tokens);
        try_linear(cpu, code, 1, 1, 1);
        try_heads(cpu, code);
        for (const int tokens : {0, 1, 9}) try_experts(cpu, code, tokens);
    }
    std::puts("ok");
}
