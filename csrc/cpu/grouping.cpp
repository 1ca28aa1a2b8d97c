#include "cpu/grouping.h"

#include <algorithm>

namespace strata::cpu {
namespace {

constexpr int64_t kElsewhere = -1;

int64_t index_of(const std::vector<int32_t>& active, int32_t id) {
    const auto at = std::lower_bound(active.begin(), active.end(), id);
    return at != active.end() && *at == id ? at - active.begin() : kElsewhere;
}

}  // namespace

Grouping group_tokens(const int32_t* ids, const float* weights, int64_t tokens, int64_t top_k,
                      const std::vector<int32_t>& active) {
    const int64_t routes = tokens * top_k;
    std::vector<int64_t> owner(routes);
    Grouping groups;
    groups.starts.assign(active.size() + 1, 0);
    for (int64_t i = 0; i < routes; i++) {
        owner[i] = index_of(active, ids[i]);
        if (owner[i] != kElsewhere) groups.starts[owner[i] + 1]++;
    }
    for (size_t i = 0; i < active.size(); i++) groups.starts[i + 1] += groups.starts[i];
    groups.tokens.resize(groups.starts.back());
    groups.weights.resize(groups.starts.back());
    std::vector<int64_t> next(groups.starts.begin(), groups.starts.end() - 1);
    for (int64_t i = 0; i < routes; i++) {
        if (owner[i] == kElsewhere) continue;
        const int64_t at = next[owner[i]]++;
        groups.tokens[at] = static_cast<int32_t>(i / top_k);
        groups.weights[at] = weights[i];
    }
    return groups;
}

}  // namespace strata::cpu
