// From the QKV projection to what attention reads, one warp per row and head, in one pass:
//
//     + bias, RMSNorm over the head, clip, RoPE        (each of them optional; values get bias and clip only)
//
// prepare_qkv does it for all heads of a row of qkv, f32 [rows, (heads + 2 kv_heads) dim]: queries go to q,
// f32 [rows, heads * dim], keys and values into the KV pages as int8 with a scale (absmax / 127) per token,
// head and `code_group` elements (a multiple of 4; dim: one scale per head), or, with 0, as bf16.
// prepare_heads does it in place for `heads` heads of f32 [rows, heads * dim] and writes no pages; with
// append_kv instead, keys and values that are ready go into the pages (v null: keys alone, whose beginnings
// are the values).
//
// cosines and sines are f32 [rows, rotary / 2]; the first `rotary` elements of a head turn: element i with
// i + rotary / 2, or, interleaved, 2i with 2i + 1. pages, first_page and layer_at are attention_decode's;
// positions[row] is the token that a row writes;
// without these two tables rows are successive tokens of one sequence, from `start` on. clip 0: none. dim is
// a multiple of 16. Must move: qkv once, q once, the row's place in the pages once. Grid: (heads / 4, rows),
// four warps.
#include "kv_page.cuh"

constexpr int kHeadWarps = 4;

struct HeadRules {
    const float *cosines, *sines;  // of the row
    int dim, rotary, interleaved;
    float eps, clip;
};

// A warp's head in shared memory.
DEVICE float* own_head(int dim) {
    SHARED_MEMORY(shared);
    return reinterpret_cast<float*>(shared) + threadIdx.x / kWarp * dim;
}

DEVICE void load_head(float* head, const float* source, const float* bias, int dim) {
    for (int i = threadIdx.x % kWarp; i < dim; i += kWarp)
        head[i] = source[i] + (bias != nullptr ? bias[i] : 0.0f);
    __syncwarp();
}

DEVICE void normalize(float* head, const float* weight, const HeadRules& rules) {
    float squares = 0.0f;
    for (int i = threadIdx.x % kWarp; i < rules.dim; i += kWarp) squares += head[i] * head[i];
    const float factor = rsqrtf(warp_sum(squares) / static_cast<float>(rules.dim) + rules.eps);
    for (int i = threadIdx.x % kWarp; i < rules.dim; i += kWarp) head[i] *= factor * weight[i];
    __syncwarp();
}

DEVICE void clip(float* head, const HeadRules& rules) {
    for (int i = threadIdx.x % kWarp; i < rules.dim; i += kWarp)
        head[i] = fminf(fmaxf(head[i], -rules.clip), rules.clip);
    __syncwarp();
}

DEVICE float2 turned(float a, float b, float cosine, float sine) {
    return make_float2(a * cosine - b * sine, b * cosine + a * sine);
}

// Each lane turns whole pairs.
DEVICE void rotate(float* head, const HeadRules& rules) {
    const int pairs = rules.rotary / 2;
    for (int i = threadIdx.x % kWarp; i < pairs; i += kWarp) {
        if (rules.interleaved) {
            float2* const pair = reinterpret_cast<float2*>(head) + i;
            *pair = turned(pair->x, pair->y, rules.cosines[i], rules.sines[i]);
        } else {
            const float2 pair = turned(head[i], head[i + pairs], rules.cosines[i], rules.sines[i]);
            head[i] = pair.x;
            head[i + pairs] = pair.y;
        }
    }
    __syncwarp();
}

// weight null: no norm. turns: queries and keys.
DEVICE void prepare(float* head, const float* weight, const HeadRules& rules, bool turns) {
    if (weight != nullptr) normalize(head, weight, rules);
    if (rules.clip > 0.0f) clip(head, rules);
    if (turns) rotate(head, rules);
}

DEVICE void store_head(float* target, const float* head, int dim) {
    for (int i = threadIdx.x % kWarp; i < dim; i += kWarp) target[i] = head[i];
}

// Where one token of one KV head goes.
struct KvTarget {
    u8 *keys, *values;
    float *key_scale, *value_scale;  // of the first group
    int token, page_tokens, dim, code_group;
};

DEVICE KvTarget kv_target(u64 page, int layer_at, int heads, int head, int token, int page_tokens, int dim,
                          int code_group, bool values) {
    u8* const layer = reinterpret_cast<u8*>(page) + layer_at;
    const int bytes = page_tokens * dim * (code_group ? 1 : 2);
    const int scales = code_group ? (dim + code_group - 1) / code_group * page_tokens * 4 : 0;
    u8* const all_values = layer + kv_padded(heads * bytes);
    u8* const all_key_scales = all_values + (values ? kv_padded(heads * bytes) : 0);
    u8* const all_value_scales = all_key_scales + kv_padded(heads * scales);
    return {layer + head * bytes,
            all_values + head * bytes,
            reinterpret_cast<float*>(all_key_scales + head * scales) + token,
            reinterpret_cast<float*>(all_value_scales + head * scales) + token,
            token,
            page_tokens,
            dim,
            code_group};
}

DEVICE int key_place(const KvTarget& to, int word, int element_bytes) {
    return to.token / kKvTokens * kKvTokens * to.dim * element_bytes + word * kKvChunk +
           to.token % kKvTokens * 4;
}

DEVICE u32 stored_code(float value, float steps) {
    const float code = fminf(fmaxf(rintf(value * steps), -127.0f), 127.0f);
    return static_cast<u32>(static_cast<int>(code) + 128);
}

DEVICE float largest_of(const float* head, int dim) {
    float largest = 0.0f;
    for (int i = threadIdx.x % kWarp; i < dim; i += kWarp) largest = fmaxf(largest, fabsf(head[i]));
    return warp_max(largest);
}

// Elements [begin, end) of a head, the group `group`.
DEVICE void write_group(const KvTarget& to, const float* head, bool is_key, int group, int begin, int end) {
    const float scale = largest_of(head + begin, end - begin) / 127.0f;
    const float steps = scale > 0.0f ? 1.0f / scale : 0.0f;
    if (threadIdx.x % kWarp == 0) (is_key ? to.key_scale : to.value_scale)[group * to.page_tokens] = scale;
    if (is_key) {
        for (int word = begin / 4 + threadIdx.x % kWarp; word < end / 4; word += kWarp) {
            const float4 four = reinterpret_cast<const float4*>(head)[word];
            *reinterpret_cast<u32*>(to.keys + key_place(to, word, 1)) =
                stored_code(four.x, steps) << 8 * code_place(0) |
                stored_code(four.y, steps) << 8 * code_place(1) |
                stored_code(four.z, steps) << 8 * code_place(2) |
                stored_code(four.w, steps) << 8 * code_place(3);
        }
        return;
    }
    for (int i = begin + threadIdx.x % kWarp; i < end; i += kWarp) {
        const int place =
            value_word_offset<Int8Kv>(to.page_tokens, to.token / 4, i) + code_place(to.token % 4);
        to.values[place] = static_cast<u8>(stored_code(head[i], steps));
    }
}

DEVICE void write_int8(const KvTarget& to, const float* head, bool is_key) {
    for (int group = 0, begin = 0; begin < to.dim; ++group, begin += to.code_group)
        write_group(to, head, is_key, group, begin, min(begin + to.code_group, to.dim));
}

DEVICE void write_bf16(const KvTarget& to, const float* head, bool is_key) {
    if (is_key) {
        for (int word = threadIdx.x % kWarp; word < to.dim / 2; word += kWarp) {
            const float2 two = reinterpret_cast<const float2*>(head)[word];
            *reinterpret_cast<u32*>(to.keys + key_place(to, word, 2)) = pack_bf16(two.x, two.y);
        }
        return;
    }
    for (int i = threadIdx.x % kWarp; i < to.dim; i += kWarp) {
        const int place = value_word_offset<Bf16Kv>(to.page_tokens, to.token / 2, i) + to.token % 2 * 2;
        *reinterpret_cast<bf16*>(to.values + place) = to_bf16(head[i]);
    }
}

struct KvPlaces {
    const u64* pages;
    const int *first_page, *positions;
    int kv_heads, page_tokens, layer_at, code_group, start;
    bool values;  // false: a value is the beginning of its key

    METHOD void write(const float* head, int row, int kv_head, int dim, bool is_key) const {
        const int position = positions != nullptr ? positions[row] : start + row;
        const u64 page = pages[(first_page != nullptr ? first_page[row] : 0) + position / page_tokens];
        const KvTarget to = kv_target(page, layer_at, kv_heads, kv_head, position % page_tokens, page_tokens,
                                      dim, code_group, values);
        if (code_group)
            write_int8(to, head, is_key);
        else
            write_bf16(to, head, is_key);
    }
};

extern "C" __global__ void __launch_bounds__(kHeadWarps* kWarp)
    prepare_qkv(const float* qkv, const float* bias, const float* q_norm, const float* k_norm,
                const float* cosines, const float* sines, const u64* pages, const int* first_page,
                const int* positions, float* q, int heads, int kv_heads, int dim, int rotary, int interleaved,
                int page_tokens, int layer_at, int code_group, int start, float eps, float clip) {
    const int all = heads + 2 * kv_heads, row = blockIdx.y,
              head = blockIdx.x * kHeadWarps + threadIdx.x / kWarp;
    if (head >= all) return;  // a whole warp; nothing waits for others
    float* const own = own_head(dim);
    const HeadRules rules = {
        cosines + row * (rotary / 2), sines + row * (rotary / 2), dim, rotary, interleaved, eps, clip};
    load_head(own, qkv + (static_cast<size_t>(row) * all + head) * dim,
              bias != nullptr ? bias + head * dim : nullptr, dim);
    const bool is_query = head < heads, is_key = !is_query && head < heads + kv_heads;
    prepare(own, is_query ? q_norm : is_key ? k_norm : nullptr, rules, is_query || is_key);
    if (is_query) {
        store_head(q + (static_cast<size_t>(row) * heads + head) * dim, own, dim);
        return;
    }
    const KvPlaces places = {pages,    first_page, positions, kv_heads, page_tokens,
                             layer_at, code_group, start,     true};
    places.write(own, row, (head - heads) % kv_heads, dim, is_key);
}
EXPORT_KERNEL(prepare_qkv)

extern "C" __global__ void __launch_bounds__(kHeadWarps* kWarp)
    prepare_heads(float* x, const float* norm, const float* cosines, const float* sines, int heads, int dim,
                  int rotary, int interleaved, float eps, float clip) {
    const int row = blockIdx.y, head = blockIdx.x * kHeadWarps + threadIdx.x / kWarp;
    if (head >= heads) return;
    float* const own = own_head(dim);
    float* const place = x + (static_cast<size_t>(row) * heads + head) * dim;
    const HeadRules rules = {
        cosines + row * (rotary / 2), sines + row * (rotary / 2), dim, rotary, interleaved, eps, clip};
    load_head(own, place, nullptr, dim);
    prepare(own, norm, rules, true);
    store_head(place, own, dim);
}
EXPORT_KERNEL(prepare_heads)

extern "C" __global__ void __launch_bounds__(kHeadWarps* kWarp)
    append_kv(const float* k, const float* v, const u64* pages, const int* first_page, const int* positions,
              int kv_heads, int dim, int page_tokens, int layer_at, int code_group, int start) {
    const int row = blockIdx.y, head = blockIdx.x * kHeadWarps + threadIdx.x / kWarp;
    if (head >= (v != nullptr ? 2 : 1) * kv_heads) return;
    float* const own = own_head(dim);
    const bool is_key = head < kv_heads;
    const float* const source = is_key ? k : v;
    load_head(own, source + (static_cast<size_t>(row) * kv_heads + head % kv_heads) * dim, nullptr, dim);
    const KvPlaces places = {pages,    first_page, positions, kv_heads,    page_tokens,
                             layer_at, code_group, start,     v != nullptr};
    places.write(own, row, head % kv_heads, dim, is_key);
}
EXPORT_KERNEL(append_kv)
