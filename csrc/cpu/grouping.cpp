#include "cpu/grouping.h"

#include <algorithm>

namespace strata::cpu {

ExpertWorks group_tokens(Arena& arena, const Routes& routes) {
    const int64_t all = routes.tokens * routes.top_k;
    int32_t* tokens = arena.take<int32_t>(all);
    float* weights = arena.take<float>(all);
    ExpertWork* works = arena.take<ExpertWork>(std::min<int64_t>(all, routes.experts));
    int64_t* next = arena.take<int64_t>(routes.experts);  // counts at first, then places in tokens

    std::fill_n(next, routes.experts, 0);
    for (int64_t i = 0; i < all; i++) next[routes.ids[i]]++;
    int count = 0;
    int64_t start = 0;
    for (int e = 0; e < routes.experts; e++) {
        const int64_t found = next[e];
        next[e] = start;
        if (found == 0 || routes.slices[e] == nullptr) continue;
        works[count++] = {routes.slices[e], tokens + start, weights + start, static_cast<int>(found)};
        start += found;
    }
    for (int64_t i = 0; i < all; i++) {
        const int32_t expert = routes.ids[i];
        if (routes.slices[expert] == nullptr) continue;
        const int64_t at = next[expert]++;
        tokens[at] = static_cast<int32_t>(i / routes.top_k);
        weights[at] = routes.weights[i];
    }
    return {works, count};
}

}  // namespace strata::cpu
