// Causal attention over paged keys and values, for any number of query rows per sequence.
#pragma once

#include "cpu/kv_cache.h"
#include "cpu/sequence.h"
#include "cpu/thread_pool.h"

namespace strata::cpu {

struct AttentionArgs {
    size_t heads;        // query heads; head h reads KV head h / (heads / kv_heads)
    float scale;         // multiplies q.k
    size_t window;       // a query at p sees tokens in (p - window, p]; 0 = all
    const float* sinks;  // [heads] or null: one more logit in each head's softmax denominator
};

// q: f32 [rows, heads * key_dim] -> out: f32 [rows, heads * value_dim]. The new tokens' keys and values must
// already be in the cache. The result depends on neither the thread count nor on other sequences: work is cut
// at fixed token counts and the parts are combined in order.
void attention(ThreadPool& pool, const AttentionArgs& args, const KvLayer& cache,
               const SequenceView* sequences, size_t count, const float* q, float* out);

}  // namespace strata::cpu
