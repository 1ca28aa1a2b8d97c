#include "cpu/attend_latent.h"

#include <limits>

namespace strata::cpu {
namespace {

constexpr float kNoClip = std::numeric_limits<float>::infinity();

HeadsSpec plain(size_t heads, size_t dim) {
    return {heads, dim, nullptr, HeadNorm::none, 0.0f, kNoClip, 0, false};
}

HeadsSpec rotated(const Latent& part, size_t heads) {
    return {heads, part.rope, nullptr, HeadNorm::none, 0.0f, kNoClip, part.rope, part.interleaved};
}

HeadsSpec normed(size_t dim, const Norm& norm) {
    return {1, dim, norm.weight, HeadNorm::per_head, norm.eps, kNoClip, 0, false};
}

// f32 [rows, heads * (nope + rope)].
const float* project_queries(Cpu& cpu, const Latent& part, const Step& step, const float* hidden,
                             bool exact) {
    float* q = cpu.arena.take<float>(step.rows * part.q.matrix.rows);
    if (part.low_rank) {
        float* low = cpu.arena.take<float>(step.rows * part.q_norm.dim);
        project(cpu, part.q_a, hidden, step.rows, exact, low);
        normalize(cpu, part.q_norm, low, step.rows, low);
        hidden = low;
    }
    project(cpu, part.q, hidden, step.rows, exact, q);
    return q;
}

// Each head's plain part in the latent's space and its rotated part: f32 [rows, heads * (rank + rope)].
const float* queries(Cpu& cpu, const Latent& part, const Step& step, const float* hidden, bool exact) {
    const size_t rows = step.rows, heads = part.heads;
    const size_t from = part.nope + part.rope, to = part.rank + part.rope;
    const float* q = project_queries(cpu, part, step, hidden, exact);
    float* nope = cpu.arena.take<float>(rows * heads * part.nope);
    float* latent = cpu.arena.take<float>(rows * heads * part.rank);
    float* query = cpu.arena.take<float>(rows * heads * to);
    const HeadsJob split[] = {
        {plain(heads, part.nope), {q, heads * from, from}, {nope, heads * part.nope, part.nope}},
        {rotated(part, heads), {q + part.nope, heads * from, from}, {query + part.rank, heads * to, to}},
    };
    prepare(cpu, split, 2, step);
    project_heads(cpu, part.k_b, heads, nope, rows, exact, latent);
    const HeadsJob expanded = {
        plain(heads, part.rank), {latent, heads * part.rank, part.rank}, {query, heads * to, to}};
    prepare(cpu, &expanded, 1, step);
    return query;
}

// The normalized latent and the rotated part: f32 [rows, rank + rope].
const float* keys(Cpu& cpu, const Latent& part, const Step& step, const float* hidden, bool exact) {
    const size_t width = part.rank + part.rope;
    float* both = cpu.arena.take<float>(step.rows * width);
    project(cpu, part.kv_a, hidden, step.rows, exact, both);
    const HeadsJob jobs[] = {
        {normed(part.rank, part.latent_norm), {both, width, width}, {both, width, width}},
        {rotated(part, 1), {both + part.rank, width, width}, {both + part.rank, width, width}},
    };
    prepare(cpu, jobs, 2, step);
    return both;
}

}  // namespace

void attend_latent(Cpu& cpu, const Latent& part, const KvLayer& cache, const Step& step, bool exact,
                   float* residual) {
    const size_t hidden = part.norm.dim, rows = step.rows;
    float* input = cpu.arena.take<float>(rows * hidden);
    float* mixed = cpu.arena.take<float>(rows * part.heads * part.rank);
    float* values = cpu.arena.take<float>(rows * part.v_b.matrix.rows);
    float* branch = input;  // nobody needs the input any more when the output is written

    normalize(cpu, part.norm, residual, rows, input);
    const float* query = queries(cpu, part, step, input, exact);
    const float* key = keys(cpu, part, step, input, exact);
    append_and_attend(cpu, part.attention, cache, step, query, key, nullptr, mixed);
    project_heads(cpu, part.v_b, part.heads, mixed, rows, exact, values);
    project(cpu, part.out, values, rows, exact, branch);
    join(cpu, residual, branch, part.scale, rows, hidden);
}

}  // namespace strata::cpu
