// RMSNorm of a few rows, their logits of all experts and the choice, in one launch: what stands between
// attention and the experts.
//
//     hidden = x / sqrt(mean(x^2) + eps) * norm,    logits = hidden matrix^T + bias,    choice (router.cuh)
//
// x and hidden are f32 [rows, columns], hidden may be null; norm f32 [columns], matrix f32 [experts,
// columns], bias and select_bias f32 [experts] or null; ids i32 and weights f32 [rows, top_k], best first.
// logits, f32 [rows, experts], is scratch. columns are a multiple of 4.
//
// A warp takes one expert and eight rows; what a row is divided by comes out beside its product. The last
// block of eight rows chooses (last_block.cuh). Grid: (experts / 4, rows / 8); tickets: one per eight rows.
// Must move: the matrix, once per eight rows; x and hidden.
#include "last_block.cuh"
#include "router.cuh"

constexpr int kRowsAtOnce = 8, kOutputWarps = 4, kThreads = kOutputWarps * kWarp;
constexpr int kRouteMinBlocks = 5;  // per SM: left to itself NVRTC 12.9 keeps to 64 registers and spills

struct Router {
    const float4 *norm, *matrix;
    const float *bias, *select_bias;
    int* ids;
    float* weights;
    float eps;
};

struct Rows {
    const float4* x;
    float4* hidden;
    int first, count, quads;
};

DEVICE float dot4(float4 a, float4 b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }

DEVICE float4 times(float4 a, float4 b) { return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w); }

// sums: of x times the normed output's weights; factors: 1 / sqrt(mean(x^2) + eps). The same in all lanes.
DEVICE void multiply_rows(const Rows& rows, const Router& router, int output, float (&sums)[kRowsAtOnce],
                          float (&factors)[kRowsAtOnce]) {
    float squares[kRowsAtOnce] = {};
    for (int i = lane_of_row(); i < rows.quads; i += kWarp) {
        const float4 norm = router.norm[i];
        float4 weights = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (output >= 0) weights = router.matrix[static_cast<size_t>(output) * rows.quads + i];
        weights = times(weights, norm);
#pragma unroll
        for (int row = 0; row < kRowsAtOnce; ++row) {
            if (row < rows.count) {
                const float4 values = rows.x[static_cast<size_t>(rows.first + row) * rows.quads + i];
                sums[row] += dot4(weights, values);
                squares[row] += dot4(values, values);
            }
        }
    }
#pragma unroll
    for (int row = 0; row < kRowsAtOnce; ++row) {
        sums[row] = warp_sum(sums[row]);
        const float mean = warp_sum(squares[row]) / static_cast<float>(4 * rows.quads);
        factors[row] = rsqrtf(mean + router.eps);
    }
}

// Every warp writes its columns.
DEVICE void write_hidden(const Rows& rows, const Router& router, const float (&factors)[kRowsAtOnce]) {
    for (int i = blockIdx.x * kThreads + threadIdx.x; i < rows.quads; i += gridDim.x * kThreads) {
        const float4 norm = router.norm[i];
#pragma unroll
        for (int row = 0; row < kRowsAtOnce; ++row) {
            if (row < rows.count) {
                const size_t place = static_cast<size_t>(rows.first + row) * rows.quads + i;
                const float4 values = rows.x[place];
                const float factor = factors[row];
                rows.hidden[place] = times(times(values, make_float4(factor, factor, factor, factor)), norm);
            }
        }
    }
}

DEVICE void norm_route_rows(const Rows& rows, const Router& router, float* logits, u32* ticket,
                            const RouterShape& shape) {
    SHARED_MEMORY(shared);
    const int warp = threadIdx.x / kWarp, output = blockIdx.x * kOutputWarps + warp;
    const bool exists = output < shape.experts;
    float sums[kRowsAtOnce] = {}, factors[kRowsAtOnce];
    multiply_rows(rows, router, exists ? output : -1, sums, factors);
    if (rows.hidden != nullptr) write_hidden(rows, router, factors);
#pragma unroll
    for (int row = 0; row < kRowsAtOnce; ++row) {
        if (exists && row < rows.count && lane_of_row() == 0)
            logits[static_cast<size_t>(rows.first + row) * shape.experts + output] =
                sums[row] * factors[row] + (router.bias != nullptr ? router.bias[output] : 0.0f);
    }
    if (!last_of(ticket, gridDim.x)) return;
    float* const room = reinterpret_cast<float*>(shared) + warp * row_floats(shape);
    for (int row = rows.first + warp; row < rows.first + rows.count; row += kOutputWarps)
        choose_experts(logits + static_cast<size_t>(row) * shape.experts, router.select_bias,
                       router.ids + static_cast<size_t>(row) * shape.top_k,
                       router.weights + static_cast<size_t>(row) * shape.top_k, room, shape);
}

extern "C" __global__ void __launch_bounds__(kThreads, kRouteMinBlocks)
    norm_route(const float4* x, float4* hidden, const float4* norm, const float4* matrix, const float* bias,
               const float* select_bias, int* ids, float* weights, float* logits, u32* tickets, int rows,
               int quads, int experts, int top_k, int score, int groups, int top_groups, int best_two,
               int normalize, float normalize_eps, float scale, float eps) {
    const RouterShape shape = {experts,  top_k,     score,         groups, top_groups,
                               best_two, normalize, normalize_eps, scale};
    const int first = blockIdx.y * kRowsAtOnce;
    norm_route_rows({x, hidden, first, min(kRowsAtOnce, rows - first), quads},
                    {norm, matrix, bias, select_bias, ids, weights, eps}, logits, tickets + blockIdx.y,
                    shape);
}
EXPORT_KERNEL(norm_route)
