// One op of a fixed size, once, inside `counted`: scripts/instruction_counts.py counts its instructions under
// callgrind. AVX2 kernels and one thread; weights, activations and caches are random but always the same.
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "cpu/attention.h"
#include "cpu/kv_append.h"
#include "cpu/linear.h"

using namespace strata::cpu;

// Callgrind collects from here on down. It finds the function by its name: no copy may be inlined or cloned.
extern "C" __attribute__((noipa)) void counted(const std::function<void()>& work) { work(); }

namespace {

std::mt19937 rng(1);

std::vector<float> normal_numbers(size_t n) {
    std::normal_distribution<float> normal;
    std::vector<float> values(n);
    for (float& value : values) value = normal(rng);
    return values;
}

// The first call grows the arena and touches memory, the second one is counted.
void count(Cpu& cpu, const std::function<void()>& op) {
    const auto call = [&] {
        const OpGuard guard(cpu);
        op();
    };
    call();
    counted(call);
}

constexpr int kW8 = 2, kW4g64 = 5;
static_assert(has_row_scales(kFormats[kW8]));
static_assert(kFormats[kW4g64].group == 64 && !kFormats[kW4g64].minimum);

// Random codes and small scales.
std::vector<uint8_t> random_weights(const Matrix& shape) {
    std::vector<uint8_t> bytes(shape.bytes);
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(rng());
    const uint16_t half = 0x2410;  // fp16 0.0159
    const float whole = 0.0159f;
    const size_t size = shape.format().scale_bytes;
    const void* scale = size == sizeof half ? static_cast<const void*>(&half) : &whole;
    for (int b = 0; b < shape.blocks; b++)
        for (size_t i = shape.scales_at; i + size <= shape.block_bytes; i += size)
            std::memcpy(bytes.data() + b * shape.block_bytes + i, scale, size);
    return bytes;
}

// y = W x. w8 meets one scale per token.
void matrix_product(Cpu& cpu, int tokens, int code) {
    constexpr int kRows = 256, kCols = 2048;
    const std::vector<uint8_t> bytes = random_weights(make_matrix(nullptr, code, kRows, kCols));
    const Matrix matrix = make_matrix(bytes.data(), code, kRows, kCols);
    const std::vector<float> x = normal_numbers(static_cast<size_t>(tokens) * kCols);
    std::vector<float> y(static_cast<size_t>(tokens) * kRows);
    cpu.token_scales = true;
    count(cpu, [&] { linear(cpu, matrix, x.data(), tokens, nullptr, false, y.data()); });
}

// `rows` queries behind `past` tokens, over an int8 cache: 8 heads of 128, 2 of keys and values.
void attend(Cpu& cpu, size_t rows, size_t past) {
    constexpr size_t kHeads = 8, kKvHeads = 2, kDim = 128, kPageTokens = 32;
    const size_t tokens = past + rows, pages = (tokens + kPageTokens - 1) / kPageTokens;
    KvLayer cache({KvType::int8, kKvHeads, kDim, kDim, kPageTokens, false});
    std::vector<uint8_t> memory(pages * cache.layer_bytes);
    std::vector<uint8_t*> blocks(pages);
    for (size_t i = 0; i < pages; i++) blocks[i] = memory.data() + i * cache.layer_bytes;
    cache.pages = blocks.data();
    std::vector<float> out(rows * kHeads * kDim);
    std::vector<int32_t> table(pages);
    for (size_t i = 0; i < pages; i++) table[i] = static_cast<int32_t>(i);
    const SequenceView all{0, tokens, 0, table.data()}, asking{0, rows, past, table.data()};
    const std::vector<float> k = normal_numbers(tokens * kKvHeads * kDim);
    const std::vector<float> v = normal_numbers(tokens * kKvHeads * kDim);
    kv_append(cpu.pool, cache, &all, 1, k.data(), v.data());
    const std::vector<float> q = normal_numbers(rows * kHeads * kDim);
    const AttentionArgs args{kHeads, 0.088f, 0, nullptr};
    count(cpu, [&] { attention(cpu, args, cache, &asking, 1, q.data(), out.data()); });
}

struct Case {
    const char* name;
    void (*run)(Cpu&);
};

constexpr Case kCases[] = {
    {"gemv", [](Cpu& cpu) { matrix_product(cpu, 1, kW4g64); }},
    {"gemm-16", [](Cpu& cpu) { matrix_product(cpu, 16, kW4g64); }},
    {"gemm-64", [](Cpu& cpu) { matrix_product(cpu, 64, kW4g64); }},
    {"w8a8-gemv", [](Cpu& cpu) { matrix_product(cpu, 1, kW8); }},
    {"w8a8-gemm-64", [](Cpu& cpu) { matrix_product(cpu, 64, kW8); }},
    {"attention-decode", [](Cpu& cpu) { attend(cpu, 1, 511); }},
    {"attention-prefill", [](Cpu& cpu) { attend(cpu, 64, 64); }},
};

}  // namespace

// Without an argument: the names of the cases.
int main(int argc, char** argv) {
    Cpu cpu({0}, false, 0, avx2::kKernels);
    for (const Case& each : kCases) {
        if (argc < 2) std::puts(each.name);
        if (argc == 2 && std::string(argv[1]) == each.name) each.run(cpu);
    }
}
