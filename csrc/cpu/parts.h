// What a decoder layer is made of, as the fused ops see it, and the steps that they have in common. Pointers
// belong to the caller and outlive the op; scratch is the arena's.
#pragma once

#include "cpu/attention.h"
#include "cpu/cpu.h"
#include "cpu/heads.h"
#include "cpu/sequence.h"

namespace strata::cpu {

struct Norm {
    const float* weight;  // [dim]
    size_t dim;
    float eps;
};

// y = W x + bias; bias f32 [rows of W] or null. name: for whoever reads the clock.
struct Projection {
    const char* name;
    Matrix matrix;
    const float* bias;
};

// The tokens of one forward pass. rope: of the model's rotary embedding at the rows' positions.
struct Step {
    size_t rows;
    const SequenceView* sequences;
    size_t count;
    RopeTables rope;
};

// y = norm(x); x and y f32 [rows, norm.dim], they may be the same.
void normalize(Cpu& cpu, const Norm& norm, const float* x, size_t rows, float* y);

// y = W x + bias; x f32 [rows, cols of W]. exact: activations stay f32.
void project(Cpu& cpu, const Projection& projection, const float* x, size_t rows, bool exact, float* y);

// The same with one small matrix per head, see head_linear.
void project_heads(Cpu& cpu, const Projection& projection, size_t heads, const float* x, size_t rows,
                   bool exact, float* y);

// The same with an unpacked f32 matrix [outputs, cols].
struct PlainProjection {
    const float *matrix, *bias;
    size_t cols, outputs;
};
void project_plain(Cpu& cpu, const PlainProjection& projection, const float* x, size_t rows, float* y);

// prepare_heads for all rows of the step.
void prepare(Cpu& cpu, const HeadsJob* jobs, size_t count, const Step& step);

// Appends k and v (null where values stand in the keys) to the cache, then attends: q f32
// [rows, heads * key_dim] -> out [rows, heads * value_dim].
void append_and_attend(Cpu& cpu, const AttentionArgs& args, const KvLayer& cache, const Step& step,
                       const float* q, const float* k, const float* v, float* out);

// residual += scale * branch, f32 [rows, dim].
void join(Cpu& cpu, float* residual, const float* branch, float scale, size_t rows, size_t dim);

}  // namespace strata::cpu
