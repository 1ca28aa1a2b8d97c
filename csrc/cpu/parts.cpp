#include "cpu/parts.h"

#include <algorithm>

#include "cpu/kv_append.h"
#include "cpu/linear.h"
#include "cpu/norm.h"
#include "cpu/plain_linear.h"

namespace strata::cpu {
namespace {

OpCost cost_of(const Projection& projection, size_t rows) {
    const Matrix& m = projection.matrix;
    const int64_t bias_bytes = projection.bias != nullptr ? int64_t{4} * m.rows : 0;
    return {std::string(projection.name) + " " + m.format().name + " " + std::to_string(m.cols) + " -> " +
                std::to_string(m.rows),
            static_cast<int64_t>(m.bytes) + bias_bytes, static_cast<int64_t>(rows) * m.rows * m.cols,
            m.format().quantized()};
}

size_t token_bytes(const KvLayer& cache) {
    const size_t dims = cache.stored_key_dim() + (cache.value_in_key ? 0 : cache.stored_value_dim());
    const size_t scales = (cache.key_scale_bytes + cache.value_scale_bytes) / cache.page_tokens;
    return cache.kv_heads * (dims * cache.element_bytes() + scales);
}

// Tokens that rows see together are read once; each pair of a row and a token it sees is two dot products.
OpCost cost_of(const AttentionArgs& args, const KvLayer& cache, const Step& step) {
    size_t seen = 0, pairs = 0;
    for (size_t s = 0; s < step.count; ++s) {
        const SequenceView& sequence = step.sequences[s];
        const size_t all = sequence.start + sequence.count;
        seen += args.window ? std::min(all, args.window + sequence.count - 1) : all;
        for (size_t end = sequence.start + 1; end <= all; ++end)
            pairs += args.window ? std::min(end, args.window) : end;
    }
    const char* const types[] = {"int8", "bf16", "f32", "int8g"};
    const std::string group = cache.type == KvType::int8_groups ? std::to_string(cache.group) : "";
    std::string shape = types[static_cast<int>(cache.type)] + group + " " + std::to_string(args.heads) + "/" +
                        std::to_string(cache.kv_heads) + " x " + std::to_string(cache.key_dim);
    if (args.window) shape += ", window " + std::to_string(args.window);
    return {shape, static_cast<int64_t>(seen * token_bytes(cache)),
            static_cast<int64_t>(pairs * args.heads * (cache.key_dim + cache.value_dim))};
}

}  // namespace

void normalize(Cpu& cpu, const Norm& norm, const float* x, size_t rows, float* y) {
    timed(
        cpu.clock, "rms_norm", [&] { return OpCost{std::to_string(norm.dim)}; },
        [&] { rms_norm(cpu.pool, x, norm.weight, y, rows, norm.dim, norm.eps); });
}

void project(Cpu& cpu, const Projection& projection, const float* x, size_t rows, bool exact, float* y) {
    timed(
        cpu.clock, "linear", [&] { return cost_of(projection, rows); },
        [&] { linear(cpu, projection.matrix, x, static_cast<int>(rows), projection.bias, exact, y); });
}

void project_heads(Cpu& cpu, const Projection& projection, size_t heads, const float* x, size_t rows,
                   bool exact, float* y) {
    timed(
        cpu.clock, "head_linear", [&] { return cost_of(projection, rows); },
        [&] {
            head_linear(cpu, projection.matrix, x, static_cast<int>(rows), static_cast<int>(heads), exact, y);
        });
}

void project_plain(Cpu& cpu, const PlainProjection& projection, const float* x, size_t rows, float* y) {
    const size_t cols = projection.cols, outputs = projection.outputs;
    const auto cost = [&] {
        const int64_t values = static_cast<int64_t>(cols) * outputs, tokens = rows;
        return OpCost{"f32 " + std::to_string(cols) + " -> " + std::to_string(outputs), 4 * values,
                      tokens * values};
    };
    timed(cpu.clock, "plain_linear", cost,
          [&] { plain_linear(cpu.pool, x, projection.matrix, projection.bias, y, rows, cols, outputs); });
}

void prepare(Cpu& cpu, const HeadsJob* jobs, size_t count, const Step& step) {
    const auto cost = [&] {
        size_t heads = 0;
        for (size_t j = 0; j < count; ++j) heads += jobs[j].spec.heads;
        return OpCost{std::to_string(heads) + " x " + std::to_string(jobs[0].spec.dim)};
    };
    timed(cpu.clock, "prepare_heads", cost,
          [&] { prepare_heads(cpu.pool, jobs, count, step.rows, step.rope); });
}

void append_and_attend(Cpu& cpu, const AttentionArgs& args, const KvLayer& cache, const Step& step,
                       const float* q, const float* k, const float* v, float* out) {
    timed(
        cpu.clock, "kv_append", [] { return OpCost{}; },
        [&] { kv_append(cpu.pool, cache, step.sequences, step.count, k, v); });
    timed(
        cpu.clock, "attention", [&] { return cost_of(args, cache, step); },
        [&] { attention(cpu, args, cache, step.sequences, step.count, q, out); });
}

void join(Cpu& cpu, float* residual, const float* branch, float scale, size_t rows, size_t dim) {
    timed(
        cpu.clock, "add", [&] { return OpCost{std::to_string(dim)}; },
        [&] { add_scaled(cpu.pool, residual, branch, scale, rows, dim); });
}

}  // namespace strata::cpu
