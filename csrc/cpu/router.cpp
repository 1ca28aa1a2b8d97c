#include "cpu/router.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/parallel.h"
#include "cpu/vec8.h"

namespace strata::cpu {

static constexpr float kExcluded = -std::numeric_limits<float>::infinity();

static void softmax(const float* logits, float* scores, size_t n) {
    const float top = *std::max_element(logits, logits + n);
    float total = 0;
    for (size_t i = 0; i < n; ++i) total += scores[i] = std::exp(logits[i] - top);
    for (size_t i = 0; i < n; ++i) scores[i] /= total;
}

static void score_experts(const RouterArgs& args, const float* logits, float* scores) {
    switch (args.score) {
        case RouterScore::softmax:
            return softmax(logits, scores, args.experts);
        case RouterScore::sigmoid:
            for (size_t e = 0; e < args.experts; ++e) scores[e] = 1.0f / (1.0f + std::exp(-logits[e]));
            return;
        case RouterScore::softmax_topk:
            std::copy_n(logits, args.experts, scores);
    }
}

static float group_score(const RouterArgs& args, const float* choice, size_t size) {
    float best = kExcluded, second = kExcluded;
    for (size_t i = 0; i < size; ++i) {
        if (choice[i] > best) {
            second = best;
            best = choice[i];
        } else {
            second = std::max(second, choice[i]);
        }
    }
    return args.group_score == GroupScore::max ? best : best + second;
}

// Index of the largest value, the lowest among equals; it is then taken, and nobody finds it again.
static size_t take_best(float* values, size_t n) {
    __m256 tops = _mm256_set1_ps(kExcluded);
    size_t i = 0;
    // The order of operands matters: a NaN is passed over.
    for (; i + 8 <= n; i += 8) tops = _mm256_max_ps(_mm256_loadu_ps(values + i), tops);
    float top = vec8::max(tops);
    for (; i < n; ++i) top = std::max(top, values[i]);
    const size_t best = std::find(values, values + n, top) - values;
    if (best == n) return n - 1;  // all are NaN
    values[best] = kExcluded;
    return best;
}

// scores, kept: room for one float per group each.
static void exclude_weak_groups(const RouterArgs& args, float* choice, float* scores, float* kept) {
    const size_t size = args.experts / args.groups;
    for (size_t g = 0; g < args.groups; ++g) scores[g] = group_score(args, choice + g * size, size);
    std::fill_n(kept, args.groups, 0.0f);
    for (size_t i = 0; i < args.top_groups; ++i) kept[take_best(scores, args.groups)] = 1.0f;
    for (size_t g = 0; g < args.groups; ++g)
        if (kept[g] == 0.0f) std::fill_n(choice + g * size, size, kExcluded);
}

static void weigh(const RouterArgs& args, float* weights) {
    if (args.score == RouterScore::softmax_topk) softmax(weights, weights, args.top_k);
    float total = args.normalize_eps;
    for (size_t i = 0; i < args.top_k; ++i) total += weights[i];
    const float factor = args.normalize ? args.scale / total : args.scale;
    for (size_t i = 0; i < args.top_k; ++i) weights[i] *= factor;
}

static void route_row(const RouterArgs& args, const float* logits, float* scratch, int32_t* ids,
                      float* weights) {
    float *scores = scratch, *choice = scores + args.experts, *groups = choice + args.experts;
    score_experts(args, logits, scores);
    for (size_t e = 0; e < args.experts; ++e)
        choice[e] = scores[e] + (args.select_bias ? args.select_bias[e] : 0.0f);
    if (args.groups > 1) exclude_weak_groups(args, choice, groups, groups + args.groups);
    for (size_t i = 0; i < args.top_k; ++i) {
        const size_t expert = take_best(choice, args.experts);
        ids[i] = static_cast<int32_t>(expert);
        weights[i] = scores[expert];
    }
    weigh(args, weights);
}

void route(Cpu& cpu, const RouterArgs& args, const float* logits, size_t rows, int32_t* ids, float* weights) {
    const size_t scratch = 2 * (args.experts + args.groups), top_k = args.top_k;
    float* memory = cpu.arena.take<float>(rows * scratch);
    parallel_for(cpu.pool, rows, 16 * args.experts, [&](size_t begin, size_t end) {
        for (size_t row = begin; row < end; ++row)
            route_row(args, logits + row * args.experts, memory + row * scratch, ids + row * top_k,
                      weights + row * top_k);
    });
}

}  // namespace strata::cpu
