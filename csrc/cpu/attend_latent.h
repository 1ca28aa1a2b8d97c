// DeepSeek's multi-head latent attention in its absorbed form, from the residual stream and back into it.
#pragma once

#include "cpu/parts.h"

namespace strata::cpu {

// A query head is `nope` plain elements and `rope` rotated ones; k_b carries the plain ones into the latent's
// `rank` dimensions. A key is a latent and one rotated part for all heads; its latent is the value, too, and
// v_b expands what was mixed. q has heads * (nope + rope) rows, kv_a
// rank + rope.
struct Latent {
    Norm norm;
    bool low_rank;      // queries are q (q_norm (q_a x)), else q x
    Projection q_a, q;  // q_a with low_rank only
    Norm q_norm;        // with low_rank only
    Projection kv_a;
    Norm latent_norm;
    Projection k_b, v_b, out;
    size_t heads, nope, rope, rank;
    bool interleaved;
    AttentionArgs attention;
    float scale;
};

// residual += scale * attention(norm(residual)), f32 [rows, norm.dim]. The new keys are appended to the
// cache.
void attend_latent(Cpu& cpu, const Latent& part, const KvLayer& cache, const Step& step, bool exact,
                   float* residual);

}  // namespace strata::cpu
