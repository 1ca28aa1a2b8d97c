// How experts are chosen from their logits: one warp per row, every variant of RouterSpec
// (strata/plan/spec.py), in f32 throughout.
//
// score: 0 softmax over all, 1 sigmoid, 2 softmax over the chosen logits. groups > 1: only experts of the
// `top_groups` best groups may be chosen; a group counts as its best score (best_two 0) or the sum of its two
// best. Best first, equal scores to the lowest index.
//
// A lane treats elements lane, lane + 32, ... in every loop: barriers stand only where it reads others'
// elements.
#pragma once

#include "device.cuh"

constexpr int kSoftmax = 0, kSigmoid = 1, kSoftmaxOfChosen = 2;
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kOut = -3.0e38f;  // below every score

struct RouterShape {
    int experts, top_k, score, groups, top_groups, best_two, normalize;
    float normalize_eps, scale;
};

// Floats of shared memory that a row's warp needs.
DEVICE int row_floats(const RouterShape& shape) { return 2 * shape.experts + shape.top_k + 2 * shape.groups; }

DEVICE int lane_of_row() { return static_cast<int>(threadIdx.x) % kWarp; }

struct Best {
    float score;
    int index;
};

DEVICE Best better(Best a, Best b) {
    return b.score > a.score || (b.score == a.score && b.index < a.index) ? b : a;
}

// The best of `count` scores, the same in all lanes.
DEVICE Best best_of(const float* scores, int count) {
    Best best = {kOut, 0x7fffffff};
    for (int i = lane_of_row(); i < count; i += kWarp) best = better(best, {scores[i], i});
    for (int bits = 16; bits > 0; bits >>= 1)
        best =
            better(best, {__shfl_xor_sync(FULL, best.score, bits), __shfl_xor_sync(FULL, best.index, bits)});
    return best;
}

// Logits to what experts are ranked and weighted by; in place.
DEVICE void score_experts(float* scores, const RouterShape& shape) {
    if (shape.score == kSoftmaxOfChosen) return;
    if (shape.score == kSigmoid) {
        for (int i = lane_of_row(); i < shape.experts; i += kWarp)
            scores[i] = 1.0f / (1.0f + exp2_approx(-scores[i] * kLog2E));
    } else {
        float largest = kOut, sum = 0.0f;
        for (int i = lane_of_row(); i < shape.experts; i += kWarp) largest = fmaxf(largest, scores[i]);
        largest = warp_max(largest);
        for (int i = lane_of_row(); i < shape.experts; i += kWarp) {
            scores[i] = exp2_approx((scores[i] - largest) * kLog2E);
            sum += scores[i];
        }
        sum = warp_sum(sum);
        for (int i = lane_of_row(); i < shape.experts; i += kWarp) scores[i] /= sum;
    }
}

// Puts experts outside the best groups out of the choice; `room` is for two floats per group.
DEVICE void keep_best_groups(float* choice, float* room, const RouterShape& shape) {
    float *const group_scores = room, *const kept = room + shape.groups;
    const int size = shape.experts / shape.groups;
    for (int group = lane_of_row(); group < shape.groups; group += kWarp) {
        float first = kOut, second = kOut;
        for (int i = 0; i < size; ++i) {
            const float score = choice[group * size + (i + group) % size];  // spread over the banks
            second = fmaxf(second, fminf(first, score));
            first = fmaxf(first, score);
        }
        group_scores[group] = shape.best_two ? first + second : first;
        kept[group] = 0.0f;
    }
    for (int i = 0; i < shape.top_groups; ++i) {
        const int group = best_of(group_scores, shape.groups).index;
        __syncwarp();
        if (lane_of_row() == 0) {
            group_scores[group] = kOut;
            kept[group] = 1.0f;
        }
        __syncwarp();
    }
    for (int i = lane_of_row(); i < shape.experts; i += kWarp) {
        if (kept[i / size] == 0.0f) choice[i] = kOut;
    }
}

// weights[0 .. top_k) from the chosen scores; all lanes work alike, lane 0 writes.
DEVICE void write_weights(const float* chosen, float* weights, const RouterShape& shape) {
    float sum = 0.0f;
    for (int i = 0; i < shape.top_k; ++i) {
        const bool as_logit = shape.score == kSoftmaxOfChosen;
        sum += as_logit ? exp2_approx((chosen[i] - chosen[0]) * kLog2E) : chosen[i];
    }
    for (int i = lane_of_row(); i < shape.top_k; i += kWarp) {
        float weight = chosen[i];
        if (shape.score == kSoftmaxOfChosen)
            weight = exp2_approx((weight - chosen[0]) * kLog2E) / sum;
        else if (shape.normalize)
            weight /= sum + shape.normalize_eps;
        weights[i] = weight * shape.scale;
    }
}

// One row's choice by the calling warp; `room` has row_floats floats of shared memory.
DEVICE void choose_experts(const float* logits, const float* select_bias, int* ids, float* weights,
                           float* room, const RouterShape& shape) {
    float *const scores = room, *const choice = scores + shape.experts;
    float *const chosen = choice + shape.experts, *const group_scores = chosen + shape.top_k;
    for (int i = lane_of_row(); i < shape.experts; i += kWarp) scores[i] = logits[i];
    score_experts(scores, shape);
    for (int i = lane_of_row(); i < shape.experts; i += kWarp)
        choice[i] = scores[i] + (select_bias != nullptr ? select_bias[i] : 0.0f);
    __syncwarp();
    if (shape.groups > 1) keep_best_groups(choice, group_scores, shape);
    for (int i = 0; i < shape.top_k; ++i) {
        const int expert = best_of(choice, shape.experts).index;
        __syncwarp();
        if (lane_of_row() == 0) {
            ids[i] = expert;
            chosen[i] = scores[expert];
            choice[expert] = kOut * 1.1f;  // below those of other groups, so that no expert is chosen twice
        }
        __syncwarp();
    }
    write_weights(chosen, weights, shape);
}
