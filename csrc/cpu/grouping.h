// Tokens gathered per expert.
#pragma once

#include <cstdint>

#include "cpu/arena.h"
#include "cpu/experts.h"

namespace strata::cpu {

// Where tokens go: ids, weights [tokens][top_k]. slices: per expert where its slices stand, or null for those
// that are computed elsewhere. Every id is below `experts`.
struct Routes {
    const int32_t* ids;
    const float* weights;
    int64_t tokens, top_k;
    const FfnSlice* const* slices;
    int experts;
};

struct ExpertWorks {
    const ExpertWork* works;
    int count;
};

// The routing turned round: the experts that stand here and have tokens, ascending, each with its tokens
// ascending and their weights. All memory is the arena's.
ExpertWorks group_tokens(Arena& arena, const Routes& routes);

}  // namespace strata::cpu
