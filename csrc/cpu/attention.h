// Causal attention over paged keys and values, for any number of query rows per sequence.
#pragma once

#include "cpu/cpu.h"
#include "cpu/kv_cache.h"
#include "cpu/sequence.h"

namespace strata::cpu {

struct AttentionArgs {
    size_t heads;        // query heads; head h reads KV head h / (heads / kv_heads)
    float scale;         // multiplies q.k
    size_t window;       // a query at p sees tokens in (p - window, p]; 0 = all
    const float* sinks;  // [heads] or null: one more logit in each head's softmax denominator
};

// q: f32 [rows, heads * key_dim] -> out: f32 [rows, heads * value_dim]. The new tokens' keys and values must
// already be in the cache, and the caller holds an OpGuard. With int8 keys and values the products are of
// integers: queries and softmax weights have 16 bits. The result depends on neither the thread count nor on
// other sequences, bit for bit: tokens are cut at fixed places and the parts are joined in order.
void attention(Cpu& cpu, const AttentionArgs& args, const KvLayer& cache, const SequenceView* sequences,
               size_t count, const float* q, float* out);

}  // namespace strata::cpu
