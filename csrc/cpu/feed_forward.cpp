#include "cpu/feed_forward.h"

#include <algorithm>
#include <numeric>

#include "cpu/sigmoid_gate.h"

namespace strata::cpu {

// Every expert, of `bytes` bytes each, is read once; a token costs gate, up and down.
static OpCost cost_of(const ExpertWork* works, int count, int slices, int64_t bytes) {
    OpCost cost;
    if (count == 0) return cost;
    const Matrix &gate_up = works->slices->gate_up, &down = works->slices->down;
    const int64_t width = static_cast<int64_t>(down.cols) * slices;
    cost.shape = std::string(gate_up.format().name) + (gate_up.code == down.code ? "" : "+") +
                 (gate_up.code == down.code ? "" : down.format().name) + " " + std::to_string(gate_up.cols) +
                 " x " + std::to_string(width);
    cost.quantized = gate_up.format().quantized() && down.format().quantized();
    for (int i = 0; i < count; i++) {
        cost.bytes += bytes;
        cost.macs += 3 * width * gate_up.cols * works[i].count;
    }
    return cost;
}

void dense_ffn(Cpu& cpu, const DenseFfn& part, const float* x, int tokens, bool exact, float* y) {
    int32_t* all = cpu.arena.take<int32_t>(tokens);
    float* ones = cpu.arena.take<float>(tokens);
    std::iota(all, all + tokens, 0);
    std::fill(ones, ones + tokens, 1.0f);
    const ExpertWork work{&part.slice, all, ones, tokens};
    const int count = tokens > 0 ? 1 : 0;
    const int64_t bytes = part.slice.gate_up.bytes + part.slice.down.bytes;
    timed(
        cpu.clock, "ffn", [&] { return cost_of(&work, count, 1, bytes); },
        [&] { gated_ffn(cpu, x, tokens, part.slice.down.rows, &work, count, 1, part.gating, exact, y); });
}

void feed_forward(Cpu& cpu, const Norm& norm, const DenseFfn& part, float scale, int tokens, bool exact,
                  float* residual) {
    const size_t rows = tokens, hidden = norm.dim;
    float* normed = cpu.arena.take<float>(rows * hidden);
    float* branch = cpu.arena.take<float>(rows * hidden);
    normalize(cpu, norm, residual, rows, normed);
    dense_ffn(cpu, part, normed, tokens, exact, branch);
    join(cpu, residual, branch, scale, rows, hidden);
}

// branch += shared expert, through its gate where it has one.
static void add_shared(Cpu& cpu, const RoutedFfn& part, const float* x, int tokens, bool exact,
                       float* branch) {
    const size_t rows = tokens, hidden = part.hidden;
    float* shared = cpu.arena.take<float>(rows * hidden);
    dense_ffn(cpu, *part.shared, x, tokens, exact, shared);
    if (part.shared_gate != nullptr) {
        float* gate = cpu.arena.take<float>(rows);
        project_plain(cpu, {part.shared_gate, nullptr, hidden, 1}, x, rows, gate);
        scale_by_sigmoid(cpu.pool, shared, gate, rows, hidden);
    }
    join(cpu, branch, shared, 1.0f, rows, hidden);
}

void apply_experts(Cpu& cpu, const RoutedFfn& part, const ExpertWork* works, int count, const float* x,
                   int tokens, bool exact, float* residual) {
    const size_t rows = tokens, hidden = part.hidden;
    float* branch = cpu.arena.take<float>(rows * hidden);
    timed(
        cpu.clock, "experts", [&] { return cost_of(works, count, part.slices, part.bytes); },
        [&] {
            gated_ffn(cpu, x, tokens, part.hidden, works, count, part.slices, part.gating, exact, branch,
                      OutputRows::kSummed, part.copies);
        });
    if (part.shared != nullptr) add_shared(cpu, part, x, tokens, exact, branch);
    join(cpu, residual, branch, part.scale, rows, hidden);
}

}  // namespace strata::cpu
