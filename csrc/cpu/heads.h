// What happens to heads between the projection and attention: norm, clip, RoPE, in this order.
#pragma once

#include <cstddef>

#include "cpu/thread_pool.h"

namespace strata::cpu {

enum class HeadNorm { none, per_head, all_heads };

struct HeadsSpec {
    size_t rows, heads, dim;
    const float* norm;  // [dim] or, for all_heads, [heads * dim]; null with HeadNorm::none
    HeadNorm norm_kind;
    float eps;
    float clip;                    // values are limited to [-clip, clip]; infinity = no limit
    const float *cosines, *sines;  // [rows, rotary_dim / 2]
    size_t rotary_dim;             // leading elements of a head that rotate; 0 = none
    bool interleaved;  // pairs are (2i, 2i+1) and come out de-interleaved, else (i, i + rotary_dim / 2)
};

// In place on x: f32 [rows, heads * dim], row stride `stride` floats (q, k and v share a row).
void prepare_heads(ThreadPool& pool, const HeadsSpec& spec, float* x, size_t stride);

}  // namespace strata::cpu
