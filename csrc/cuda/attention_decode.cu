// Attention of single query tokens over the paged KV cache, split over the KV length (flash decoding).
// q is f32 [rows, heads * Dim]. A row sees tokens max(0, tokens[row] - window) .. tokens[row] (window 0: all)
// of its sequence, whose pages are pages[first_page[row] ..]; without these two tables all rows are
// successive tokens of one sequence: row r sees its first start + r + 1. The layer's block lies `layer_at`
// bytes into a page. A block takes up to eight query heads of one KV head and one split of the tokens; its
// warps take 16 tokens in turn. partial is f32 [rows, heads, splits, Dim + 2]: the sum weighted by 2^(score -
// largest), then the largest score (in powers of two) and the sum of weights; attention_combine joins the
// splits. Grid: (splits, kv_heads * groups of eight query heads, rows). Must move: the visible keys and
// values with their scales, once per group of eight query heads.
//
// Keys are the A operand of mma (16 tokens x 16 elements), eight queries the B operand; the weights then turn
// into the B operand of values x weights by one transposition in registers. What a word of a page holds is
// what a register of a fragment wants: nothing is reordered in memory. int8 codes become f16 (keys) and bf16
// (values: their weights carry scales of any size) exactly.
#include "kv_page.cuh"

constexpr int kAttentionWarps = 4, kAttentionThreads = kAttentionWarps * kWarp, kQueries = 8;
constexpr float kNothing = -1e30f;  // the largest score of no token
constexpr float kLog2E = 1.4426950408889634f;

struct QueryLane {
    int group, member;
};

// The next two classes say for each kind of page: which token a row of the A operand is, and the operands.
template <int Dim>
struct Int8Attention {
    typedef Int8Kv Codes;
    static constexpr int kSteps = Dim / 16, kTiles = Dim / 16;

    struct Keys {
        uint2 words[kSteps];
    };
    struct Values {
        uint2 words[kTiles];
    };

    DEVICE int token(int row) { return row % 8 * 2 + row / 8; }

    DEVICE Keys load_keys(const KvHead<Codes, Dim>& head, int token, QueryLane lane) {
        Keys loaded;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const u8* const words =
                head.keys + key_word_offset<Codes, Dim>(token + 2 * lane.group, 4 * step + lane.member);
            loaded.words[step] = load_once(reinterpret_cast<const uint2*>(words));
        }
        return loaded;
    }

    DEVICE Values load_values(const KvHead<Codes, Dim>& head, int token, int page_tokens, QueryLane lane) {
        Values loaded;
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            const u8* const words =
                head.values +
                value_word_offset<Codes>(page_tokens, token / 4 + lane.member, 16 * tile + 2 * lane.group);
            loaded.words[tile] = load_once(reinterpret_cast<const uint2*>(words));
        }
        return loaded;
    }

    DEVICE float2 key_scales(const KvHead<Codes, Dim>& head, int token, QueryLane lane) {
        return *reinterpret_cast<const float2*>(head.key_scales + token + 2 * lane.group);
    }

    DEVICE float2 value_scales(const KvHead<Codes, Dim>& head, int token, QueryLane lane) {
        return *reinterpret_cast<const float2*>(head.value_scales + token + 2 * lane.group);
    }

    // Bytes 0 1 (or 2 3) as f16: 0x6400 | u is 1024 + u; less 1152 is the code.
    DEVICE u32 key_numbers(u32 word, u32 selector) {
        return sub_f16x2(__byte_perm(word, 0x64646464u, selector), 0x64806480u);
    }

    DEVICE void multiply_keys(float (&scores)[4], const Keys& keys, int step, const u32 (&query)[2]) {
        const uint2 words = keys.words[step];
        const u32 a[4] = {key_numbers(words.x, 0x4140), key_numbers(words.y, 0x4140),
                          key_numbers(words.x, 0x4342), key_numbers(words.y, 0x4342)};
        mma_f16(scores, a, query);
    }

    // Stored codes have the sign bit flipped; else as Int8 in weights.cuh.
    DEVICE u32 value_numbers(u32 word, u32 selector) {
        const u32 bytes = __byte_perm(word ^ 0x80808080u, 0, selector);
        const u32 raised = (bytes & 0x007f007fu) | 0x43004300u, base = (bytes & 0x00800080u) | 0xc300c300u;
        return fma_bf16x2(raised, 0x3f803f80u, base);
    }

    DEVICE void multiply_values(float (&sums)[4], const Values& values, int tile, const u32 (&weights)[2],
                                int) {
        const uint2 words = values.words[tile];
        const u32 a[4] = {value_numbers(words.x, 0x4140), value_numbers(words.y, 0x4140),
                          value_numbers(words.x, 0x4342), value_numbers(words.y, 0x4342)};
        mma_bf16(sums, a, weights);
    }

    // Elements of a query that meet step's operand: 4m, 4m + 2 and 4m + 1, 4m + 3.
    DEVICE void query_operand(const float* query, int step, float factor, QueryLane lane, u32 (&b)[2]) {
        const float4 q = *reinterpret_cast<const float4*>(query + 16 * step + 4 * lane.member);
        b[0] = pack_f16(q.x * factor, q.z * factor);
        b[1] = pack_f16(q.y * factor, q.w * factor);
    }
};

template <int Dim>
struct Bf16Attention {
    typedef Bf16Kv Codes;
    static constexpr int kSteps = Dim / 16, kTiles = Dim / 16;

    struct Keys {
        u32 words[kSteps][4];
    };
    struct Values {
        uint2 words[kTiles][2];
    };

    DEVICE int token(int row) { return row; }

    DEVICE Keys load_keys(const KvHead<Codes, Dim>& head, int token, QueryLane lane) {
        Keys loaded;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int offset = key_word_offset<Codes, Dim>(token + lane.group + i % 2 * 8,
                                                               8 * step + lane.member + i / 2 * 4);
                loaded.words[step][i] = load_once(reinterpret_cast<const u32*>(head.keys + offset));
            }
        }
        return loaded;
    }

    DEVICE Values load_values(const KvHead<Codes, Dim>& head, int token, int page_tokens, QueryLane lane) {
        Values loaded;
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int offset = value_word_offset<Codes>(page_tokens, token / 2 + lane.member + half * 4,
                                                            16 * tile + 2 * lane.group);
                loaded.words[tile][half] = load_once(reinterpret_cast<const uint2*>(head.values + offset));
            }
        }
        return loaded;
    }

    DEVICE float2 key_scales(const KvHead<Codes, Dim>&, int, QueryLane) { return make_float2(1.0f, 1.0f); }
    DEVICE float2 value_scales(const KvHead<Codes, Dim>&, int, QueryLane) { return make_float2(1.0f, 1.0f); }

    DEVICE void multiply_keys(float (&scores)[4], const Keys& keys, int step, const u32 (&query)[2]) {
        mma_bf16(scores, keys.words[step], query);
    }

    // What lies behind the last token may be NaN: it is cleared. valid: of the 16 tokens, those before the
    // end.
    DEVICE u32 cleared(u32 pair, int first, int valid) {
        const u32 low = first < valid ? 0x0000ffffu : 0u, high = first + 1 < valid ? 0xffff0000u : 0u;
        return pair & (low | high);
    }

    DEVICE void multiply_values(float (&sums)[4], const Values& values, int tile, const u32 (&weights)[2],
                                int valid) {
        const int first = threadIdx.x % 4 * 2;
        const uint2 near = values.words[tile][0], far = values.words[tile][1];
        const u32 a[4] = {cleared(near.x, first, valid), cleared(near.y, first, valid),
                          cleared(far.x, first + 8, valid), cleared(far.y, first + 8, valid)};
        mma_bf16(sums, a, weights);
    }

    DEVICE void query_operand(const float* query, int step, float factor, QueryLane lane, u32 (&b)[2]) {
        const float2 low = *reinterpret_cast<const float2*>(query + 16 * step + 2 * lane.member);
        const float2 high = *reinterpret_cast<const float2*>(query + 16 * step + 2 * lane.member + 8);
        b[0] = pack_bf16(low.x * factor, low.y * factor);
        b[1] = pack_bf16(high.x * factor, high.y * factor);
    }
};

// Eight queries as B operands, each divided by its largest element: factors give heads 2 member and the next
// back what was taken, with the softmax's scale.
template <class Kind, int Dim>
struct Queries {
    u32 operands[Kind::kSteps][2];
    float2 factors;

    METHOD Queries(const float* rows, int count, float scale, QueryLane lane) {
        const bool present = lane.group < count;
        const float* const query = rows + lane.group * Dim;
        float largest = 0.0f;
        for (int i = lane.member; present && i < Dim; i += 4) largest = fmaxf(largest, fabsf(query[i]));
        largest = fmaxf(largest, __shfl_xor_sync(FULL, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(FULL, largest, 2));
        const float inverse = largest > 0.0f ? 1.0f / largest : 0.0f;
#pragma unroll
        for (int step = 0; step < Kind::kSteps; ++step) {
            operands[step][0] = operands[step][1] = 0;
            if (present) Kind::query_operand(query, step, inverse, lane, operands[step]);
        }
        const float factor = largest * scale * kLog2E;
        factors.x = __shfl_sync(FULL, factor, lane.member * 8);
        factors.y = __shfl_sync(FULL, factor, lane.member * 8 + 4);
    }
};

// What a warp knows after some tokens, of heads 2 member and the next: sums[tile][i] is element
// 2 * group + i / 2 of the tile, head i % 2. weights are this lane's part of the sum of weights.
template <int Tiles>
struct Softmax {
    float sums[Tiles][4];
    float2 largest, weights;

    METHOD void clear() {
#pragma unroll
        for (int tile = 0; tile < Tiles; ++tile) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[tile][i] = 0.0f;
        }
        largest = make_float2(kNothing, kNothing);
        weights = make_float2(0.0f, 0.0f);
    }

    METHOD void rescale(float2 factors) {
#pragma unroll
        for (int tile = 0; tile < Tiles; ++tile) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[tile][i] *= i % 2 ? factors.y : factors.x;
        }
        weights = make_float2(weights.x * factors.x, weights.y * factors.y);
    }
};

// Over the eight groups of a warp.
DEVICE float over_groups_max(float value) {
    for (int bits = 4; bits < kWarp; bits <<= 1) value = fmaxf(value, __shfl_xor_sync(FULL, value, bits));
    return value;
}

DEVICE float over_groups_sum(float value) {
    for (int bits = 4; bits < kWarp; bits <<= 1) value += __shfl_xor_sync(FULL, value, bits);
    return value;
}

// Visible tokens of a page's 16, [begin, end), both possibly outside.
struct Visible {
    int begin, end;
    METHOD bool has(int token) const { return token >= begin && token < end; }
};

// Scores to weights; scores[i] is row `group + i / 2 * 8`, head i % 2.
template <class Kind, int Tiles>
DEVICE void weigh(float (&scores)[4], float2 factors, float2 scales, Visible visible, QueryLane lane,
                  Softmax<Tiles>& state) {
    const bool seen[2] = {visible.has(Kind::token(lane.group)), visible.has(Kind::token(lane.group + 8))};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        scores[i] *= (i % 2 ? factors.y : factors.x) * (i / 2 ? scales.y : scales.x);
        if (!seen[i / 2]) scores[i] = kNothing;
    }
    const float first = over_groups_max(fmaxf(scores[0], scores[2]));
    const float second = over_groups_max(fmaxf(scores[1], scores[3]));
    const float2 largest = make_float2(fmaxf(state.largest.x, first), fmaxf(state.largest.y, second));
    state.rescale(
        make_float2(exp2_approx(state.largest.x - largest.x), exp2_approx(state.largest.y - largest.y)));
    state.largest = largest;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        scores[i] = seen[i / 2] ? exp2_approx(scores[i] - (i % 2 ? largest.y : largest.x)) : 0.0f;
    state.weights =
        make_float2(state.weights.x + scores[0] + scores[2], state.weights.y + scores[1] + scores[3]);
}

template <class Kind, int Dim>
DEVICE void attend_chunk(const KvHead<typename Kind::Codes, Dim>& head, int token, int page_tokens,
                         Visible visible, const Queries<Kind, Dim>& queries, QueryLane lane,
                         Softmax<Kind::kTiles>& state) {
    const typename Kind::Keys keys = Kind::load_keys(head, token, lane);
    const typename Kind::Values values = Kind::load_values(head, token, page_tokens, lane);
    const float2 key_scales = Kind::key_scales(head, token, lane);
    float2 value_scales = Kind::value_scales(head, token, lane);
    if (!visible.has(Kind::token(lane.group))) value_scales.x = 0.0f;  // may be anything
    if (!visible.has(Kind::token(lane.group + 8))) value_scales.y = 0.0f;
    float scores[4] = {};
#pragma unroll
    for (int step = 0; step < Kind::kSteps; ++step)
        Kind::multiply_keys(scores, keys, step, queries.operands[step]);
    weigh<Kind>(scores, queries.factors, key_scales, visible, lane, state);
    const u32 weights[2] = {transpose8x8(pack_bf16(scores[0] * value_scales.x, scores[1] * value_scales.x)),
                            transpose8x8(pack_bf16(scores[2] * value_scales.y, scores[3] * value_scales.y))};
#pragma unroll
    for (int tile = 0; tile < Kind::kTiles; ++tile)
        Kind::multiply_values(state.sums[tile], values, tile, weights, visible.end);
}

// The warps' results in shared memory: sums [warp][head][Dim + 4], then (largest, weights) [warp][head].
template <int Dim>
struct WarpResults {
    static constexpr int kStride = Dim + 4;  // spreads the 8-byte writes of fragments over all banks
    float* sums;
    float2* states;

    template <int Tiles>
    METHOD void write(int warp, QueryLane lane, const Softmax<Tiles>& state) const {
        const float first = over_groups_sum(state.weights.x), second = over_groups_sum(state.weights.y);
        const int head = warp * kQueries + 2 * lane.member;
#pragma unroll
        for (int tile = 0; tile < Tiles; ++tile) {
            float* const place = sums + head * kStride + 16 * tile + 2 * lane.group;
            *reinterpret_cast<float2*>(place) = make_float2(state.sums[tile][0], state.sums[tile][2]);
            *reinterpret_cast<float2*>(place + kStride) =
                make_float2(state.sums[tile][1], state.sums[tile][3]);
        }
        if (lane.group == 0) {
            states[head] = make_float2(state.largest.x, first);
            states[head + 1] = make_float2(state.largest.y, second);
        }
    }

    // Element `element` of a head over all warps, and the head's state.
    METHOD float total(int head, int element, float2& state) const {
        float largest = kNothing, sum = 0.0f, weights = 0.0f;
        for (int warp = 0; warp < kAttentionWarps; ++warp)
            largest = fmaxf(largest, states[warp * kQueries + head].x);
        for (int warp = 0; warp < kAttentionWarps; ++warp) {
            const float2 own = states[warp * kQueries + head];
            const float factor = exp2_approx(own.x - largest);
            weights += own.y * factor;
            sum += sums[(warp * kQueries + head) * kStride + element] * factor;
        }
        state = make_float2(largest, weights);
        return sum;
    }
};

struct DecodeShape {
    int heads, kv_heads, page_tokens, layer_at, window, splits, start;
    float scale;
};

template <class Kind, int Dim>
DEVICE void attention_decode(const float* q, const u64* pages, const int* first_page, const int* tokens,
                             float* partial, const DecodeShape& shape) {
    SHARED_MEMORY(shared);
    const WarpResults<Dim> results = {
        reinterpret_cast<float*>(shared),
        reinterpret_cast<float2*>(shared + kAttentionWarps * kQueries * WarpResults<Dim>::kStride * 4)};
    const int warp = threadIdx.x / kWarp, row = blockIdx.z, in_warp = threadIdx.x % kWarp;
    const QueryLane lane = {in_warp / 4, in_warp % 4};
    const int per_kv_head = shape.heads / shape.kv_heads, groups = (per_kv_head + kQueries - 1) / kQueries;
    const int kv_head = blockIdx.y / groups, in_head = blockIdx.y % groups * kQueries;
    const int head = kv_head * per_kv_head + in_head, count = min(kQueries, per_kv_head - in_head);
    const Queries<Kind, Dim> queries(q + (static_cast<size_t>(row) * shape.heads + head) * Dim, count,
                                     shape.scale, lane);
    Softmax<Kind::kTiles> state;
    state.clear();
    const int end = tokens != nullptr ? tokens[row] : shape.start + row + 1;
    const u64* const own_pages = first_page != nullptr ? pages + first_page[row] : pages;
    const int begin = shape.window ? max(0, end - shape.window) : 0;
    const int first = begin / kKvTokens, chunks = (end + kKvTokens - 1) / kKvTokens - first;
    const int per_split = (chunks + shape.splits - 1) / shape.splits, from = blockIdx.x * per_split;
    const int stop = min(from + per_split, chunks);
    for (int chunk = from + warp; chunk < stop; chunk += kAttentionWarps) {
        const int token = (first + chunk) * kKvTokens;
        const u64 page = own_pages[token / shape.page_tokens];
        const KvHead<typename Kind::Codes, Dim> kv(reinterpret_cast<const u8*>(page) + shape.layer_at,
                                                   shape.kv_heads, kv_head, shape.page_tokens);
        attend_chunk<Kind, Dim>(kv, token % shape.page_tokens, shape.page_tokens,
                                {begin - token, end - token}, queries, lane, state);
    }
    results.write(warp, lane, state);
    __syncthreads();
    for (int i = threadIdx.x; i < count * Dim; i += kAttentionThreads) {
        float2 joined;
        const float sum = results.total(i / Dim, i % Dim, joined);
        float* const target =
            partial +
            ((static_cast<size_t>(row) * shape.heads + head + i / Dim) * shape.splits + blockIdx.x) *
                (Dim + 2);
        target[i % Dim] = sum;
        if (i % Dim == 0) {
            target[Dim] = joined.x;
            target[Dim + 1] = joined.y;
        }
    }
}

#define ATTENTION_DECODE(name, dim, ...)                                                                \
    extern "C" __global__ void __launch_bounds__(kAttentionThreads, 4) attention_decode_##name##_##dim( \
        const float* q, const u64* pages, const int* first_page, const int* tokens, float* partial,     \
        int heads, int kv_heads, int page_tokens, int layer_at, int window, int splits, int start,      \
        float scale) {                                                                                  \
        attention_decode<__VA_ARGS__<dim>, dim>(                                                        \
            q, pages, first_page, tokens, partial,                                                      \
            {heads, kv_heads, page_tokens, layer_at, window, splits, start, scale});                    \
    }                                                                                                   \
    EXPORT_KERNEL(attention_decode_##name##_##dim)

ATTENTION_DECODE(int8, 128, Int8Attention)
ATTENTION_DECODE(int8, 64, Int8Attention)
ATTENTION_DECODE(bf16, 128, Bf16Attention)
ATTENTION_DECODE(bf16, 64, Bf16Attention)
