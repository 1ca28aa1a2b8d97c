// The `top` best logits of every row, for a sampler that needs no more: two launches of one kernel.
//
// logits is f32 [rows, columns], rows `stride` apart; a block takes `span` columns of a row and writes their
// best, best first, equal values to the lowest id, to values f32 and ids i32 [rows, spans, top]. Where a span
// has fewer, -3e38 with id -1 stands there; -inf is never chosen, and NaN counts as the largest f32, so that
// it is seen. given null: a column is its own id; else given[row, column]
// is one. The first launch goes over the vocabulary, the second, with one span, over what the first one
// wrote. Grid: (spans, rows). Must move: logits once.
#include "device.cuh"

constexpr int kTopWarps = 8, kTopThreads = kTopWarps * kWarp;
constexpr float kNone = -3.0e38f, kLargest = 3.40282347e38f;

struct Candidate {
    float value;
    int id, place;  // place: in the span
};

DEVICE Candidate better(Candidate a, Candidate b) {
    const bool wins =
        b.value > a.value || (b.value == a.value && static_cast<u32>(b.id) < static_cast<u32>(a.id));
    return wins ? b : a;
}

DEVICE Candidate best_of_warp(Candidate best) {
    for (int bits = 16; bits > 0; bits >>= 1)
        best = better(best, {__shfl_xor_sync(FULL, best.value, bits), __shfl_xor_sync(FULL, best.id, bits),
                             __shfl_xor_sync(FULL, best.place, bits)});
    return best;
}

// The best of what this thread looks after: every kTopThreads-th place.
DEVICE Candidate own_best(const float* span, const int* ids, int first, int count) {
    Candidate best = {kNone, -1, -1};
    for (int i = threadIdx.x; i < count; i += kTopThreads)
        if (span[i] > kNone) best = better(best, {span[i], ids != nullptr ? ids[i] : first + i, i});
    return best;
}

// The same in all threads. `room` is for one candidate per warp.
DEVICE Candidate best_of_block(Candidate best, Candidate* room) {
    best = best_of_warp(best);
    if (threadIdx.x % kWarp == 0) room[threadIdx.x / kWarp] = best;
    __syncthreads();
    best = room[0];
    for (int warp = 1; warp < kTopWarps; ++warp) {
        const Candidate other = room[warp];
        best = better(best, other);
    }
    __syncthreads();
    return best;
}

extern "C" __global__ void __launch_bounds__(kTopThreads)
    head_topk(const float* logits, const int* given, float* values, int* ids, int columns, int stride,
              int span, int top) {
    SHARED_MEMORY(shared);
    float* const kept =
        reinterpret_cast<float*>(shared);  // [span], a column's place is always the same thread's
    Candidate* const room = reinterpret_cast<Candidate*>(shared + span * 4);
    const int first = blockIdx.x * span, count = min(span, columns - first);
    const size_t row = static_cast<size_t>(blockIdx.y) * stride + first;
    const int* const own_ids = given != nullptr ? given + row : nullptr;
    for (int i = threadIdx.x; i < count; i += kTopThreads) {
        const float logit = logits[row + i];
        kept[i] = logit == logit ? logit : kLargest;
    }
    const size_t target = (static_cast<size_t>(blockIdx.y) * gridDim.x + blockIdx.x) * top;
    Candidate own = own_best(kept, own_ids, first, count);
    for (int i = 0; i < top; ++i) {
        const Candidate best = best_of_block(own, room);
        if (threadIdx.x == 0) {
            values[target + i] = best.value;
            ids[target + i] = best.id;
        }
        if (best.place >= 0 && best.place % kTopThreads == static_cast<int>(threadIdx.x)) {
            kept[best.place] = kNone;  // chosen; only its owner looks again
            own = own_best(kept, own_ids, first, count);
        }
    }
}
EXPORT_KERNEL(head_topk)
