// Writing new tokens' keys and values into KV pages.
#pragma once

#include "cpu/kv_cache.h"
#include "cpu/sequence.h"
#include "cpu/thread_pool.h"

namespace strata::cpu {

// k: f32 [rows, kv_heads * key_dim], v: f32 [rows, kv_heads * value_dim] or null with value_in_key.
// int8 rounds to nearest with scale = max|x| / 127 per token, head and group; zeros get scale 0, what has an
// infinity or NaN gets NaN. With per_tensor scales are those of `cache.steps`.
void kv_append(ThreadPool& pool, const KvLayer& cache, const SequenceView* sequences, size_t count,
               const float* k, const float* v);

}  // namespace strata::cpu
