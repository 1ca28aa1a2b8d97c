// Expert choice from logits that are there: one warp per row (router.cuh).
//
// logits is f32 [rows, experts] (at most 1,024), select_bias f32 [experts] or null; ids i32 and weights f32
// are [rows, top_k], best first. Block: one warp. Grid: rows. Must move: logits once.
#include "router.cuh"

extern "C" __global__ void __launch_bounds__(32)
    route(const float* logits, const float* select_bias, int* ids, float* weights, int experts, int top_k,
          int score, int groups, int top_groups, int best_two, int normalize, float normalize_eps,
          float scale) {
    SHARED_MEMORY(shared);
    const RouterShape shape = {experts,  top_k,     score,         groups, top_groups,
                               best_two, normalize, normalize_eps, scale};
    const size_t row = blockIdx.x;
    choose_experts(logits + row * experts, select_bias, ids + row * top_k, weights + row * top_k,
                   reinterpret_cast<float*>(shared), shape);
}
EXPORT_KERNEL(route)
