#include "cpu/attend.h"

namespace strata::cpu {
namespace {

struct Heads {
    float *q, *k, *v;  // f32 [rows, heads * dim] each
};

// Queries, keys and values out of the projection's rows, ready for attention.
Heads split_heads(Cpu& cpu, const GroupedQuery& part, const Step& step, const float* qkv) {
    const HeadsSpec* specs[] = {&part.queries, &part.keys, &part.values};
    const size_t width = part.qkv.matrix.rows, dim = part.queries.dim;
    HeadsJob jobs[3];
    size_t column = 0;
    for (int i = 0; i < 3; ++i) {
        const size_t columns = specs[i]->heads * dim;
        float* target = cpu.arena.take<float>(step.rows * columns);
        jobs[i] = {*specs[i], {qkv + column, width, dim}, {target, columns, dim}};
        column += columns;
    }
    prepare(cpu, jobs, 3, step);
    return {jobs[0].target.data, jobs[1].target.data, jobs[2].target.data};
}

}  // namespace

void attend(Cpu& cpu, const GroupedQuery& part, const KvLayer& cache, const Step& step, bool exact,
            float* residual) {
    const size_t hidden = part.norm.dim, rows = step.rows;
    float* normed = cpu.arena.take<float>(rows * hidden);
    float* qkv = cpu.arena.take<float>(rows * part.qkv.matrix.rows);
    float* mixed = cpu.arena.take<float>(rows * part.out.matrix.cols);
    float* branch = normed;  // nobody needs the input any more when the output is written

    normalize(cpu, part.norm, residual, rows, normed);
    project(cpu, part.qkv, normed, rows, exact, qkv);
    const Heads heads = split_heads(cpu, part, step, qkv);
    append_and_attend(cpu, part.attention, cache, step, heads.q, heads.k, heads.v, mixed);
    project(cpu, part.out, mixed, rows, exact, branch);
    join(cpu, residual, branch, part.scale, rows, hidden);
}

}  // namespace strata::cpu
