// Grouped-query attention of one decoder layer, from the residual stream and back into it.
#pragma once

#include "cpu/parts.h"

namespace strata::cpu {

// qkv's rows: the query heads, then the key heads, then the value heads. queries, keys, values: what becomes
// of each of them; they have the same dim.
struct GroupedQuery {
    Norm norm;
    Projection qkv, out;
    HeadsSpec queries, keys, values;
    AttentionArgs attention;
    float scale;
};

// residual += scale * attention(norm(residual)), f32 [rows, norm.dim]. The new keys and values are appended
// to the cache. exact: activations of the projections stay f32.
void attend(Cpu& cpu, const GroupedQuery& part, const KvLayer& cache, const Step& step, bool exact,
            float* residual);

}  // namespace strata::cpu
