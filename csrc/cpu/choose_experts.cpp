#include "cpu/choose_experts.h"

namespace strata::cpu {

void choose_experts(Cpu& cpu, const RouterPart& part, const float* residual, size_t rows, float* hidden,
                    int32_t* ids, float* weights) {
    const size_t dim = part.norm.dim, experts = part.args.experts;
    float* logits = cpu.arena.take<float>(rows * experts);
    normalize(cpu, part.norm, residual, rows, hidden);
    project_plain(cpu, {part.matrix, part.bias, dim, experts}, hidden, rows, logits);
    timed(
        cpu.clock, "route",
        [&] { return OpCost{std::to_string(part.args.top_k) + " of " + std::to_string(experts)}; },
        [&] { route(cpu, part.args, logits, rows, ids, weights); });
}

}  // namespace strata::cpu
