#include "cpu/heads.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/norm.h"
#include "cpu/parallel.h"

namespace strata::cpu {

static void rotate_halves(float* head, const float* cosines, const float* sines, size_t half) {
    for (size_t i = 0; i < half; ++i) {
        const float a = head[i], b = head[i + half];
        head[i] = a * cosines[i] - b * sines[i];
        head[i + half] = b * cosines[i] + a * sines[i];
    }
}

// DeepSeek's pairs lie side by side; like transformers, the result is left in halves: q and k agree.
static void rotate_pairs(float* head, const float* cosines, const float* sines, size_t half, float* scratch) {
    for (size_t i = 0; i < half; ++i) {
        const float a = head[2 * i], b = head[2 * i + 1];
        scratch[i] = a * cosines[i] - b * sines[i];
        scratch[i + half] = b * cosines[i] + a * sines[i];
    }
    std::copy_n(scratch, 2 * half, head);
}

static void prepare_row(const HeadsSpec& spec, float* row, const float* cosines, const float* sines,
                        float* scratch) {
    const size_t width = spec.heads * spec.dim, half = spec.rotary_dim / 2;
    if (spec.norm_kind == HeadNorm::all_heads) rms_norm_run(row, spec.norm, row, width, spec.eps);
    if (spec.norm_kind == HeadNorm::per_head)
        for (size_t h = 0; h < spec.heads; ++h)
            rms_norm_run(row + h * spec.dim, spec.norm, row + h * spec.dim, spec.dim, spec.eps);
    if (std::isfinite(spec.clip))  // after the norm: OLMoE's order
        for (size_t i = 0; i < width; ++i) row[i] = std::clamp(row[i], -spec.clip, spec.clip);
    for (size_t h = 0; h < spec.heads; ++h) {
        float* head = row + h * spec.dim;
        if (spec.interleaved)
            rotate_pairs(head, cosines, sines, half, scratch);
        else
            rotate_halves(head, cosines, sines, half);
    }
}

void prepare_heads(ThreadPool& pool, const HeadsSpec& spec, float* x, size_t stride) {
    const size_t half = spec.rotary_dim / 2;
    parallel_for(pool, spec.rows, 4 * spec.heads * spec.dim, [&](size_t begin, size_t end) {
        std::vector<float> scratch(spec.interleaved ? spec.rotary_dim : 0);
        for (size_t r = begin; r < end; ++r)
            prepare_row(spec, x + r * stride, spec.cosines + r * half, spec.sines + r * half, scratch.data());
    });
}

}  // namespace strata::cpu
