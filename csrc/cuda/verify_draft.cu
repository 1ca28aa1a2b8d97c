// How much of each draft the target model would have said itself, and its own next token.
//
// Every row of a sequence (its last token, then its draft's tokens) is sampled as if there were no draft; the
// draft holds as long as it is what was sampled. With a draft taken as certain this is rejection sampling: a
// proposed token x is accepted with probability p(x), and the token instead comes from p without x, here with
// the same random number, so that a seed gives the same text with and without drafts. It is
// strata/engine/sampler.py's choice among the candidates of head_topk: top_k, top_p, min_p, temperature,
// draw. The sampler computes in f64: where sums in f32 could choose otherwise, the host must decide.
//
// values f32 and ids i32 [rows, top]: candidates, best first, id -1 where there are no more. Rows
// first_row[s] .. first_row[s + 1] - 1 are sequence s's; draft[row] i32 is what was proposed after a row (of
// the last row: nothing, not read). settings f32 [sequences, 4]: 1 / temperature (0: greedy; else 1e-6 to
// 1e6, so that no candidate weighs nothing), top_p, ln min_p (-3e38: none), top_k (0: all candidates).
// uniforms f32 [rows], in [0, 1). accepted and tokens are i32 [sequences]; token -1: undecided, for a row was
// not finite, had no candidate, or its number lay within kMargin of a border. Grid: sequences / 4, one warp
// each. Must move: the candidates of the rows up to the first that was rejected.
#include "device.cuh"

constexpr int kVerifyWarps = 4, kUndecided = -1;
constexpr float kNotFinite = 3.40282347e38f;  // what head_topk makes of NaN
// Of all weights together. A weight is off by at most 1.5e-7 of the best one's (rounding of its exponent and
// of exp2), a sum of 128 by 2e-5, and the sum is at least the best one's weight.
constexpr float kMargin = 1.0f / 16384;
// Of the larger term of a sum of two: more than an f32's rounding of terms and sum.
constexpr float kSumMargin = 1.0f / (1 << 21);

struct SamplerSettings {
    float inverse_temperature, top_p, log_min_p;
    int top_k;
};

DEVICE SamplerSettings settings_of(const float* settings, int sequence) {
    const float4 four = reinterpret_cast<const float4*>(settings)[sequence];
    return {four.x, four.y, four.z, static_cast<int>(four.w)};
}

// The first `count` candidates of a row; they weigh 2^((value - best) factor), which is 0 where none is left.
struct RowCandidates {
    const float* values;
    const int* ids;
    int count;

    METHOD float weight(int i, float factor) const {
        return i < count ? exp2_approx((values[i] - values[0]) * factor) : 0.0f;
    }

    METHOD float total(float factor) const {
        float sum = 0.0f;
        for (int i = threadIdx.x % kWarp; i < count; i += kWarp) sum += weight(i, factor);
        return warp_sum(sum);
    }

    // The first candidate up to which the weights exceed `target`; else the last with a weight.
    METHOD int first_beyond(float factor, float target) const {
        const int lane = threadIdx.x % kWarp;
        float before = 0.0f;
        int last = 0;
        for (int begin = 0; begin < count; begin += kWarp) {
            const float own = weight(begin + lane, factor);
            float sum = own;
            for (int distance = 1; distance < kWarp; distance <<= 1) {
                const float other = __shfl_up_sync(FULL, sum, distance);
                if (lane >= distance) sum += other;
            }
            sum += before;
            const u32 found = __ballot_sync(FULL, begin + lane < count && sum > target);
            if (found != 0) return begin + __popc((found & (0u - found)) - 1);  // its lowest bit
            const u32 possible = __ballot_sync(FULL, own > 0.0f);               // a beginning: weights fall
            if (possible != 0) last = begin + __popc(possible) - 1;
            before = __shfl_sync(FULL, sum, kWarp - 1);
        }
        return last;
    }

    // The candidate in which `share` of all weights is reached, or kUndecided.
    METHOD int first_at_share(float factor, float share) const {
        const float all = total(factor), margin = all * kMargin;
        const int low = first_beyond(factor, share * all - margin);
        return low == first_beyond(factor, share * all + margin) ? low : kUndecided;
    }

    // How many of them, a beginning, are at least `least`.
    METHOD int at_least(float least) const {
        int found = 0;
        for (int begin = 0; begin < count; begin += kWarp) {
            const int i = begin + static_cast<int>(threadIdx.x) % kWarp;
            found += __popc(__ballot_sync(FULL, i < count && values[i] >= least));
        }
        return found;
    }
};

// How many candidates min_p leaves, or kUndecided.
DEVICE int likely_enough(const RowCandidates& row, float log_min_p) {
    if (log_min_p < -1e38f) return row.count;
    const float least = row.values[0] + log_min_p;
    const float margin = fmaxf(fabsf(row.values[0]), fabsf(log_min_p)) * kSumMargin;
    const int count = row.at_least(least + margin);
    return count == row.at_least(least - margin) ? count : kUndecided;
}

// The token that the sampler chooses, or kUndecided; the same in all lanes.
DEVICE int sampled(RowCandidates row, const SamplerSettings& settings, float uniform) {
    constexpr float kLog2E = 1.4426950408889634f;
    if (row.values[0] >= kNotFinite) return kUndecided;
    if (settings.inverse_temperature == 0.0f) return row.ids[0];
    if (settings.top_k > 0) row.count = min(row.count, settings.top_k);
    if (settings.top_p < 1.0f) {
        const int last = row.first_at_share(kLog2E, settings.top_p);
        if (last == kUndecided) return kUndecided;
        row.count = last + 1;
    }
    row.count = likely_enough(row, settings.log_min_p);
    if (row.count == kUndecided) return kUndecided;
    const int chosen = row.first_at_share(settings.inverse_temperature * kLog2E, uniform);
    return chosen == kUndecided ? kUndecided : row.ids[chosen];
}

extern "C" __global__ void __launch_bounds__(kVerifyWarps* kWarp)
    verify_draft(const float* values, const int* ids, const int* first_row, const int* draft,
                 const float* settings, const float* uniforms, int* accepted, int* tokens, int top,
                 int sequences) {
    const int sequence = blockIdx.x * kVerifyWarps + threadIdx.x / kWarp;
    if (sequence >= sequences) return;  // a whole warp
    const SamplerSettings own = settings_of(settings, sequence);
    const int begin = first_row[sequence], last = first_row[sequence + 1] - 1;
    int row = begin, token;
    for (;; ++row) {
        const size_t place = static_cast<size_t>(row) * top;
        token = sampled({values + place, ids + place, top}, own, uniforms[row]);
        if (row == last || token != draft[row]) break;
    }
    if (threadIdx.x % kWarp == 0) {
        accepted[sequence] = row - begin;
        tokens[sequence] = token;
    }
}
EXPORT_KERNEL(verify_draft)
