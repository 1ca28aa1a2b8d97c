#include "cpu/router.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/parallel.h"

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

// Index of the largest value that is not yet taken; the lowest index among equals.
static size_t take_best(float* values, size_t n) {
    const size_t best = std::max_element(values, values + n) - values;
    values[best] = kExcluded;
    return best;
}

static void exclude_weak_groups(const RouterArgs& args, float* choice, std::vector<float>& groups) {
    const size_t size = args.experts / args.groups;
    for (size_t g = 0; g < args.groups; ++g) groups[g] = group_score(args, choice + g * size, size);
    std::vector<bool> kept(args.groups, false);
    for (size_t i = 0; i < args.top_groups; ++i) kept[take_best(groups.data(), args.groups)] = true;
    for (size_t g = 0; g < args.groups; ++g)
        if (!kept[g]) std::fill_n(choice + g * size, size, kExcluded);
}

static void weigh(const RouterArgs& args, float* weights) {
    if (args.score == RouterScore::softmax_topk) softmax(weights, weights, args.top_k);
    float total = args.normalize_eps;
    for (size_t i = 0; i < args.top_k; ++i) total += weights[i];
    const float factor = args.normalize ? args.scale / total : args.scale;
    for (size_t i = 0; i < args.top_k; ++i) weights[i] *= factor;
}

void route(ThreadPool& pool, const RouterArgs& args, const float* logits, int32_t* ids, float* weights) {
    parallel_for(pool, args.rows, 16 * args.experts, [&](size_t begin, size_t end) {
        std::vector<float> scores(args.experts), choice(args.experts), groups(args.groups);
        for (size_t row = begin; row < end; ++row) {
            score_experts(args, logits + row * args.experts, scores.data());
            for (size_t e = 0; e < args.experts; ++e)
                choice[e] = scores[e] + (args.select_bias ? args.select_bias[e] : 0.0f);
            if (args.groups > 1) exclude_weak_groups(args, choice.data(), groups);
            for (size_t i = 0; i < args.top_k; ++i) {
                const size_t expert = take_best(choice.data(), args.experts);
                ids[row * args.top_k + i] = static_cast<int32_t>(expert);
                weights[row * args.top_k + i] = scores[expert];
            }
            weigh(args, weights + row * args.top_k);
        }
    });
}

}  // namespace strata::cpu
