#include "cpu/expert_sum.h"

namespace strata::cpu {

void add_outputs(Cpu& cpu, const ExpertOutputs* experts, int expert_count, int slices, int hidden, float* y) {
    cpu.pool.run([&](int worker) {
        const Range columns = share(hidden, worker, cpu.pool.size());
        for (int e = 0; e < expert_count; e++) {
            const ExpertOutputs& one = experts[e];
            for (int64_t row = 0; row < int64_t{slices} * one.count; row++) {
                const float* from = one.values + row * hidden;
                float* to = y + static_cast<int64_t>(one.tokens[row % one.count]) * hidden;
                for (int64_t c = columns.begin; c < columns.end; c++) to[c] += from[c];
            }
        }
    });
}

}  // namespace strata::cpu
