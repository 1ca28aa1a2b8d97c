// Writing new tokens' keys and values into KV pages.
#pragma once

#include "cpu/kv_cache.h"
#include "cpu/sequence.h"
#include "cpu/thread_pool.h"

namespace strata::cpu {

// k: f32 [rows, kv_heads * key_dim], v: f32 [rows, kv_heads * value_dim] or null with value_in_key.
// int8 rounds to nearest with scale = max|x| / 127 per token and head; a zero vector gets scale 0, one with
// an infinity or NaN gets NaN.
void kv_append(ThreadPool& pool, const KvLayer& cache, const SequenceView* sequences, size_t count,
               const float* k, const float* v);

}  // namespace strata::cpu
