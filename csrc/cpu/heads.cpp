#include "cpu/heads.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/norm.h"
#include "cpu/parallel.h"

namespace strata::cpu {
namespace {

void rotate_halves(float* head, const float* __restrict cosines, const float* __restrict sines, size_t half) {
    float* __restrict low = head, * __restrict high = head + half;
    for (size_t i = 0; i < half; ++i) {
        const float a = low[i], b = high[i];
        low[i] = a * cosines[i] - b * sines[i];
        high[i] = b * cosines[i] + a * sines[i];
    }
}

// DeepSeek's pairs lie side by side; like transformers, the result is left in halves: q and k agree.
void rotate_pairs(float* head, const float* cosines, const float* sines, size_t half) {
    float turned[kMaxRotary];
    for (size_t i = 0; i < half; ++i) {
        const float a = head[2 * i], b = head[2 * i + 1];
        turned[i] = a * cosines[i] - b * sines[i];
        turned[i + half] = b * cosines[i] + a * sines[i];
    }
    std::copy_n(turned, 2 * half, head);
}

// `width` floats: one head, or with all_heads a whole row.
void norm_and_clip(const HeadsSpec& spec, const float* source, float* target, size_t width) {
    if (spec.norm_kind != HeadNorm::none)
        rms_norm_run(source, spec.norm, target, width, spec.eps);
    else if (source != target)
        std::memcpy(target, source, width * sizeof(float));
    if (std::isfinite(spec.clip))  // after the norm: OLMoE's order
        for (size_t i = 0; i < width; ++i) target[i] = std::clamp(target[i], -spec.clip, spec.clip);
}

void rotate(const HeadsSpec& spec, float* head, size_t row, const RopeTables& rope) {
    const size_t half = spec.rotary_dim / 2;
    if (half == 0) return;
    const float *cosines = rope.cosines + row * half, *sines = rope.sines + row * half;
    if (spec.interleaved)
        rotate_pairs(head, cosines, sines, half);
    else
        rotate_halves(head, cosines, sines, half);
}

// What one thread does at a time: a head, or all heads of a row where they share a norm.
size_t items_per_row(const HeadsSpec& spec) { return spec.norm_kind == HeadNorm::all_heads ? 1 : spec.heads; }

void prepare_item(const HeadsJob& job, size_t row, size_t item, const RopeTables& rope) {
    const HeadsSpec& spec = job.spec;
    const float* source = job.source.data + row * job.source.row + item * job.source.head;
    float* target = job.target.data + row * job.target.row + item * job.target.head;
    const size_t heads = spec.heads / items_per_row(spec);
    norm_and_clip(spec, source, target, heads * spec.dim);
    for (size_t h = 0; h < heads; ++h) rotate(spec, target + h * job.target.head, row, rope);
}

}  // namespace

void prepare_heads(ThreadPool& pool, const HeadsJob* jobs, size_t count, size_t rows,
                   const RopeTables& rope) {
    size_t items = 0, floats = 0;
    for (size_t j = 0; j < count; ++j) {
        items += items_per_row(jobs[j].spec);
        floats += jobs[j].spec.heads * jobs[j].spec.dim;
    }
    if (items == 0) return;
    parallel_for(pool, rows * items, 4 * floats / items, [&](size_t begin, size_t end) {
        for (size_t i = begin; i < end; ++i) {
            size_t j = 0, item = i % items;
            for (; item >= items_per_row(jobs[j].spec); ++j) item -= items_per_row(jobs[j].spec);
            prepare_item(jobs[j], i / items, item, rope);
        }
    });
}

}  // namespace strata::cpu
