// What happens to heads between the projection and attention: norm, clip, RoPE, in this order.
#pragma once

#include <cstddef>

#include "cpu/thread_pool.h"

namespace strata::cpu {

// Longest rotated part of a head, in floats: one that is interleaved is turned in a buffer of that size.
constexpr size_t kMaxRotary = 1024;

enum class HeadNorm { none, per_head, all_heads };

struct HeadsSpec {
    size_t heads, dim;
    const float* norm;  // [dim] or, for all_heads, [heads * dim]; null with HeadNorm::none
    HeadNorm norm_kind;
    float eps;
    float clip;         // values are limited to [-clip, clip]; infinity = no limit
    size_t rotary_dim;  // leading elements of a head that rotate; 0 = none
    bool interleaved;   // pairs are (2i, 2i+1) and come out de-interleaved, else (i, i + rotary_dim / 2)
};

// Head h of row r begins at data + r * row + h * head.
template <class T>
struct HeadsView {
    T* data;
    size_t row, head;
};

// Heads read from one place and written to another, or to the same: then both views must be equal. With
// HeadNorm::all_heads the heads of a row lie one behind the other in both.
struct HeadsJob {
    HeadsSpec spec;
    HeadsView<const float> source;
    HeadsView<float> target;
};

// Cosines and sines of every row's position: f32 [rows, rotary_dim / 2].
struct RopeTables {
    const float *cosines, *sines;
};

// All jobs in one parallel section, spread over rows and heads: query heads, key heads and values of one
// projection belong together. Splitting a projection's result is a job without norm, clip and rotation.
void prepare_heads(ThreadPool& pool, const HeadsJob* jobs, size_t count, size_t rows, const RopeTables& rope);

}  // namespace strata::cpu
