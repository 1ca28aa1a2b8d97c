// Attention and KV append with buffers of exactly the size they may touch, by several workers, under a
// sanitizer. Results are compared with plain loops over the same keys and values.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "cpu/attention.h"
#include "cpu/kv_append.h"

using namespace strata::cpu;

namespace {

std::mt19937 rng(1);

std::unique_ptr<float[]> normal(size_t n) {
    std::normal_distribution<float> draw;
    std::unique_ptr<float[]> values(new float[n]);
    for (size_t i = 0; i < n; i++) values[i] = draw(rng);
    return values;
}

struct Case {
    KvType type;
    size_t heads, kv_heads, key_dim, value_dim, page_tokens, tokens, window;
    bool value_in_key;
    size_t group = 0;
    bool per_tensor = false;

    // Tokens of a long prompt that are appended only: 70 rows behind them, and the last one, which is split,
    // meet whatever all of them would, in a quarter of the time.
    size_t silent() const { return tokens > 200 ? tokens - 71 : 0; }
};

// Scales of a tensor that clip nothing a normal number is.
const KvSteps kSteps = [] {
    KvSteps steps;
    for (int i = 0; i < kOctet; i++) steps.keys[i] = steps.values[i] = 6.0f / 127;
    return steps;
}();

// A cache whose pages lie apart and end where they must.
struct Memory {
    std::vector<std::unique_ptr<uint8_t[]>> blocks;
    std::vector<uint8_t*> pages;
    KvLayer layer;

    Memory(const Case& c, size_t count)
        : layer({c.type, c.kv_heads, c.key_dim, c.value_dim, c.page_tokens, c.value_in_key, c.group,
                 c.per_tensor}) {
        layer.steps = &kSteps;
        // The second of two layers.
        layer.layer_at = layer.layer_bytes;
        for (size_t i = 0; i < count; i++) {
            blocks.emplace_back(new uint8_t[2 * layer.layer_bytes]());
            pages.push_back(blocks.back().get());
        }
        layer.pages = pages.data();
    }
};

// One head of one row by the definition, from the unrounded keys and values.
std::vector<double> plain(const Case& c, const float* q, const float* k, const float* v, size_t row,
                          size_t head, const float* sinks) {
    const size_t kv = head / (c.heads / c.kv_heads);
    const size_t first = c.window && row + 1 > c.window ? row + 1 - c.window : 0;
    std::vector<double> out(c.value_dim, 0.0);
    double total = std::exp(sinks[head]);
    for (size_t t = first; t <= row; t++) {
        const float* key = k + (t * c.kv_heads + kv) * c.key_dim;
        const float* value = c.value_in_key ? key : v + (t * c.kv_heads + kv) * c.value_dim;
        double score = 0;
        for (size_t d = 0; d < c.key_dim; d++) score += q[(row * c.heads + head) * c.key_dim + d] * key[d];
        const double weight = std::exp(score * 0.1);
        total += weight;
        for (size_t d = 0; d < c.value_dim; d++) out[d] += weight * value[d];
    }
    for (double& x : out) x /= total;
    return out;
}

void compare(const Case& c, const float* q, const float* k, const float* v, const float* sinks,
             const float* out) {
    double error = 0, size = 1e-12;
    for (size_t row = c.silent(); row < c.tokens; row += 1 + row / 7)
        for (size_t head = 0; head < c.heads; head++) {
            const std::vector<double> wanted = plain(c, q, k, v, row, head, sinks);
            for (size_t d = 0; d < c.value_dim; d++) {
                error += std::pow(out[(row * c.heads + head) * c.value_dim + d] - wanted[d], 2);
                size += std::pow(wanted[d], 2);
            }
        }
    // int8 and bf16 round keys and values by 1 % and 0.4 % of them, wide steps by 2 %.
    const double bound = c.type == KvType::f32 ? 1e-5 : c.per_tensor ? 0.04 : 0.02;
    if (std::sqrt(error / size) < bound) return;
    std::fprintf(stderr, "type %d, %zu/%zu heads x %zu: relative error %g\n", static_cast<int>(c.type),
                 c.heads, c.kv_heads, c.key_dim, std::sqrt(error / size));
    std::exit(1);
}

// All but the last row in one step (a long prompt in two), that one in the next.
void try_case(Cpu& cpu, const Case& c) {
    const size_t pages = (c.tokens + c.page_tokens - 1) / c.page_tokens;
    Memory memory(c, pages);
    std::unique_ptr<int32_t[]> table(new int32_t[pages]);
    for (size_t i = 0; i < pages; i++) table[i] = static_cast<int32_t>(pages - 1 - i);
    const auto q = normal(c.tokens * c.heads * c.key_dim), k = normal(c.tokens * c.kv_heads * c.key_dim);
    const auto v = normal(c.value_in_key ? 0 : c.tokens * c.kv_heads * c.value_dim), sinks = normal(c.heads);
    const std::unique_ptr<float[]> out(new float[c.tokens * c.heads * c.value_dim]);
    const AttentionArgs args{c.heads, 0.1f, c.window, sinks.get()};
    const size_t cut = c.tokens - 1, silent = c.silent();
    for (const SequenceView step :
         {SequenceView{0, silent, 0, table.get()}, SequenceView{silent, cut - silent, silent, table.get()},
          SequenceView{cut, 1, cut, table.get()}}) {
        const OpGuard guard(cpu);
        kv_append(cpu.pool, memory.layer, &step, 1, k.get(), v.get());
        if (step.start >= silent) attention(cpu, args, memory.layer, &step, 1, q.get(), out.get());
    }
    compare(c, q.get(), k.get(), v.get(), sinks.get(), out.get());
}

}  // namespace

int main() {
    Cpu cpu({0, 0, 0}, false, 1000, STRATA_ISA::kKernels);
    for (const KvType type : {KvType::int8, KvType::bf16, KvType::f32}) {
        try_case(cpu, {type, 5, 1, 20, 16, 8, 90, 0, false});
        try_case(cpu, {type, 4, 2, 18, 10, 24, 61, 20, false});
        try_case(cpu, {type, 2, 2, 64, 64, 32, 1, 0, false});
        try_case(cpu, {type, 40, 1, 40, 36, 16, 70, 0, true});
        try_case(cpu, {type, 3, 1, 24, 18, 40, 45, 3, true});
        try_case(cpu, {type, 8, 1, 32, 32, 32, 600, 0, false});
    }
    for (const size_t group : {16, 32, 64}) {
        const KvType type = KvType::int8_groups;
        try_case(cpu, {type, 5, 1, 20, 16, 8, 90, 0, false, group});
        try_case(cpu, {type, 4, 2, 72, 50, 24, 61, 20, false, group});
        try_case(cpu, {type, 40, 1, 70, 66, 16, 70, 0, true, group});
        try_case(cpu, {type, 8, 1, 96, 96, 32, 300, 0, false, group});
    }
    try_case(cpu, {KvType::int8, 5, 1, 20, 16, 8, 90, 0, false, 0, true});
    try_case(cpu, {KvType::int8, 40, 1, 40, 36, 16, 70, 0, true, 0, true});
    std::puts("ok");
}
