// Tokens gathered per expert.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/experts.h"

namespace strata::cpu {

// The routing of a batch turned round: for each active expert its tokens, ascending, with their weights.
struct Grouping {
    std::vector<int32_t> tokens;
    std::vector<float> weights;
    std::vector<int64_t> starts;  // [active + 1]

    ExpertWork work(int64_t index, const FfnSlice* slices) const {
        const int64_t start = starts[index];
        return {slices, tokens.data() + start, weights.data() + start,
                static_cast<int>(starts[index + 1] - start)};
    }
};

// ids, weights [tokens][top_k]; active: ascending ids of the experts wanted. Routes to other experts are left
// out: they are computed elsewhere.
Grouping group_tokens(const int32_t* ids, const float* weights, int64_t tokens, int64_t top_k,
                      const std::vector<int32_t>& active);

}  // namespace strata::cpu
