// Attention of prompts over the paged KV cache. Queries begin at any depth of their sequences, whose earlier
// tokens are in the pages already, and so are their own; several sequences share a launch.
//
// q and out are f32 [rows, heads * Dim]. tiles holds four ints per tile (RowTile): successive tokens of one
// sequence, at most 64 rows of (token, query head of a KV head). A row at token t sees tokens
// max(0, t + 1 - window) .. t (window 0: all). The layer's block lies `layer_at` bytes into a page. sinks is
// f32 [heads] (natural logits) or null. A few tiles of one sequence may be split over their tokens: with
// partial, f32 [rows from first_row on, heads, splits, Dim + 2], attention_decode says what is left to
// attention_combine; else null. Grid: (tiles, kv_heads, splits); the last tiles, of the most tokens, begin
// first. Must move: the visible keys and values with their scales, once per tile.
//
// Four warps take 16 rows each. Keys and values cross shared memory in stages of 32 tokens, three at a time,
// as the pages hold them: a word is a register of a B operand, queries and weights are the A operands.
#include "attention_tile.cuh"

constexpr int kPrefillWarps = 4, kPrefillThreads = kPrefillWarps * kWarp, kStages = 3, kStageChunks = 2;

// Bytes of 16 tokens in shared memory: keys, values, int8's scales of both.
template <class Codes, int Dim>
struct Chunk {
    static constexpr int kPart = kKvTokens * Dim * Codes::kBytes, kScales = Codes::kBytes == 1 ? 64 : 0;
    static constexpr int kBytes = 2 * (kPart + kScales), kUnits = kPart / 16;
    static constexpr int kValueUnits = kKvTokens / Codes::kPerWord * kKvChunk / 16;  // of 16 elements
};

// Where a unit of 16 bytes of a chunk lies in shared memory: every other pair of words (64 bytes each) has
// its halves swapped. A fragment's loads, of 32 bytes of each of four words, then meet all banks.
DEVICE int unit_place(int unit) { return unit ^ (unit >> 3 & 1) << 1; }

// Byte `at` of the word that is a lane's among four.
DEVICE int word_place(int at, QueryLane lane) { return lane.member * kKvChunk + (at ^ lane.member / 2 * 32); }

// Blocks on an SM of 100 KiB, as the compiler is told: with less than 168 registers three of them fit.
template <class Codes, int Dim>
constexpr int kPrefillBlocks = kStages * kStageChunks * Chunk<Codes, Dim>::kBytes > 33 << 10 ? 2 : 3;

struct Int8Prefill : Int8Tile {
    DEVICE void multiply_keys(float (&even)[4], float (&odd)[4], const u8* keys, int step,
                              const u32 (&query)[4], QueryLane lane) {
        const uint2 words =
            *reinterpret_cast<const uint2*>(keys + 4 * step * kKvChunk + word_place(8 * lane.group, lane));
        const u32 first[2] = {codes_as_f16(words.x, kEvenCodes), codes_as_f16(words.x, kOddCodes)};
        const u32 second[2] = {codes_as_f16(words.y, kEvenCodes), codes_as_f16(words.y, kOddCodes)};
        mma_f16(even, query, first);
        mma_f16(odd, query, second);
    }

    // Columns of even and odd are elements 2 group and the next.
    DEVICE void multiply_values(float (&even)[4], float (&odd)[4], const u8* values, int tile,
                                const u32 (&weights)[4], QueryLane lane) {
        const uint2 words =
            *reinterpret_cast<const uint2*>(values + 4 * tile * kKvChunk + word_place(8 * lane.group, lane));
        const u32 first[2] = {codes_as_bf16(words.x, kEvenCodes), codes_as_bf16(words.x, kOddCodes)};
        const u32 second[2] = {codes_as_bf16(words.y, kEvenCodes), codes_as_bf16(words.y, kOddCodes)};
        mma_bf16(even, weights, first);
        mma_bf16(odd, weights, second);
    }
};

struct Bf16Prefill : Bf16Tile {
    DEVICE void multiply_keys(float (&even)[4], float (&odd)[4], const u8* keys, int step,
                              const u32 (&query)[4], QueryLane lane) {
        const u8* const even_words = keys + 8 * step * kKvChunk + word_place(4 * lane.group, lane);
        const u8* const odd_words = keys + 8 * step * kKvChunk + word_place(4 * lane.group + 32, lane);
        const u32 first[2] = {*reinterpret_cast<const u32*>(even_words),
                              *reinterpret_cast<const u32*>(even_words + 4 * kKvChunk)};
        const u32 second[2] = {*reinterpret_cast<const u32*>(odd_words),
                               *reinterpret_cast<const u32*>(odd_words + 4 * kKvChunk)};
        mma_bf16(even, query, first);
        mma_bf16(odd, query, second);
    }

    DEVICE void multiply_values(float (&even)[4], float (&odd)[4], const u8* values, int tile,
                                const u32 (&weights)[4], QueryLane lane) {
        const u8* const words = values + 8 * tile * kKvChunk + word_place(8 * lane.group, lane);
        const uint2 near = *reinterpret_cast<const uint2*>(words);
        const uint2 far = *reinterpret_cast<const uint2*>(words + 4 * kKvChunk);
        const u32 first[2] = {near.x, far.x}, second[2] = {near.y, far.y};
        mma_bf16(even, weights, first);
        mma_bf16(odd, weights, second);
    }
};

// The keys and values of one KV head as a tile needs them: chunks of 16 tokens from chunk `first` on.
template <class Kind, int Dim>
struct Stages {
    typedef typename Kind::Codes Codes;
    typedef Chunk<Codes, Dim> Size;
    u8* shared;
    const u64* pages;
    int page_tokens, layer_at, kv_heads, kv_head, first, chunks;

    METHOD u8* stage(int index) const { return shared + index % kStages * (kStageChunks * Size::kBytes); }

    // Begins to bring a stage; zeros take the place of chunks behind the last.
    METHOD void fetch(int index) const {
#pragma unroll
        for (int i = 0; i < kStageChunks; ++i) {
            const int chunk = index * kStageChunks + i;
            fetch_chunk(stage(index) + i * Size::kBytes, min(chunk, chunks - 1), chunk < chunks);
        }
    }

    METHOD void fetch_chunk(u8* place, int chunk, bool valid) const {
        const int token = (first + chunk) * kKvTokens, in_page = token % page_tokens;
        const u8* const page = reinterpret_cast<const u8*>(pages[token / page_tokens]);
        const KvHead<Codes, Dim> head(page + layer_at, kv_heads, kv_head, page_tokens);
        const u8* const keys = head.keys + key_word_offset<Codes, Dim>(in_page, 0);
        for (int unit = threadIdx.x; unit < Size::kUnits; unit += kPrefillThreads) {
            const int offset = value_word_offset<Codes>(page_tokens, in_page / Codes::kPerWord,
                                                        unit / Size::kValueUnits * 16);
            const u8* const values = head.values + offset + unit % Size::kValueUnits * 16;
            copy_async16(place + unit_place(unit) * 16, keys + unit * 16, valid);
            copy_async16(place + Size::kPart + unit_place(unit) * 16, values, valid);
        }
        if (Size::kScales != 0 && threadIdx.x < 8) {
            const float* const scales = threadIdx.x < 4 ? head.key_scales : head.value_scales;
            copy_async16(place + 2 * Size::kPart + threadIdx.x * 16, scales + in_page + threadIdx.x % 4 * 4,
                         valid);
        }
    }

    // Values of a stage from its token `valid` on become 0.
    METHOD void clear_values(int index, int valid) const {
        for (int i = threadIdx.x; i < kStageChunks * Size::kPart / 4; i += kPrefillThreads) {
            const int chunk = i / (Size::kPart / 4), word = i % (Size::kPart / 4);
            u32* const pair =
                reinterpret_cast<u32*>(stage(index) + chunk * Size::kBytes + Size::kPart) + word;
            *pair = only_valid(*pair, chunk * kKvTokens + word / 16 % 8 * 2, valid);
        }
        __syncthreads();
    }
};

// A warp's queries as A operands, each divided by its largest element: factors give back what was taken, with
// the softmax's scale.
template <class Kind, int Dim>
struct TileQueries {
    u32 operands[Dim / 16][4];
    float factors[2];

    METHOD TileQueries(const TileRows& rows, float scale, QueryLane lane) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float* const query = rows.queries[i];
            const float largest = largest_element(query, Dim, lane);
            const float inverse = largest > 0.0f ? 1.0f / largest : 0.0f;
            factors[i] = largest * scale * kLog2E;
#pragma unroll
            for (int step = 0; step < Dim / 16; ++step) {
                uint2 pair = make_uint2(0, 0);
                if (query != nullptr) pair = Kind::operand(query + 16 * step, inverse, lane);
                operands[step][i] = pair.x;
                operands[step][i + 2] = pair.y;
            }
        }
    }
};

// `first`: the stage's first token.
template <class Kind, int Dim>
DEVICE void attend_stage(const u8* stage, int first, const TileRows& rows,
                         const TileQueries<Kind, Dim>& queries, QueryLane lane, TileSoftmax<Dim / 8>& state) {
    typedef Chunk<typename Kind::Codes, Dim> Size;
    float scores[2 * kStageChunks][4] = {};
    float4 key_scales[kStageChunks], value_scales[kStageChunks];
#pragma unroll
    for (int chunk = 0; chunk < kStageChunks; ++chunk) {
        const u8* const part = stage + chunk * Size::kBytes;
        key_scales[chunk] = Kind::scales(part + 2 * Size::kPart, lane);
        value_scales[chunk] = Kind::scales(part + 2 * Size::kPart + Size::kScales, lane);
#pragma unroll
        for (int step = 0; step < Dim / 16; ++step)
            Kind::multiply_keys(scores[2 * chunk], scores[2 * chunk + 1], part, step, queries.operands[step],
                                lane);
    }
    weigh_tile<Kind>(scores, first, rows, queries.factors, key_scales, value_scales, lane, state);
#pragma unroll
    for (int chunk = 0; chunk < kStageChunks; ++chunk) {
        const u8* const values = stage + chunk * Size::kBytes + Size::kPart;
        u32 weights[4];
        weights_operand(scores[2 * chunk], scores[2 * chunk + 1], weights);
#pragma unroll
        for (int tile = 0; tile < Dim / 16; ++tile)
            Kind::multiply_values(state.sums[2 * tile], state.sums[2 * tile + 1], values, tile, weights,
                                  lane);
    }
}

struct PrefillShape {
    int heads, kv_heads, page_tokens, layer_at, window, splits, first_row;
    float scale;
};

template <class Kind, int Dim>
DEVICE void attention_prefill(const float* q, const u64* pages, const int* tiles, const float* sinks,
                              float* partial, float* out, const PrefillShape& shape) {
    SHARED_MEMORY(shared);
    const QueryLane lane = {static_cast<int>(threadIdx.x) % kWarp / 4, static_cast<int>(threadIdx.x) % 4};
    const RowTile tile = row_tile(tiles, gridDim.x - 1 - blockIdx.x);
    const int per_kv_head = shape.heads / shape.kv_heads, kv_head = blockIdx.y,
              first_head = kv_head * per_kv_head;
    const int first_row = threadIdx.x / kWarp * 16;
    const TileRows rows(q, tile, first_row, per_kv_head, shape.heads, first_head, Dim, shape.window, lane);
    const TileQueries<Kind, Dim> queries(rows, shape.scale, lane);
    const int begin = shape.window ? max(0, tile.position + 1 - shape.window) : 0;
    const int end = tile.position + tile.tokens, first = begin / kKvTokens;
    const Stages<Kind, Dim> stages = {shared,
                                      pages + tile.first_page,
                                      shape.page_tokens,
                                      shape.layer_at,
                                      shape.kv_heads,
                                      kv_head,
                                      first,
                                      (end + kKvTokens - 1) / kKvTokens - first};
    const int all = (stages.chunks + kStageChunks - 1) / kStageChunks;
    const int per_split = (all + shape.splits - 1) / shape.splits, from = blockIdx.z * per_split;
    const int stop = min(from + per_split, all);
    TileSoftmax<Dim / 8> state;
    state.clear();
    for (int i = from; i < from + kStages - 1; ++i) {
        if (i < stop) stages.fetch(i);
        copy_async_commit();
    }
    for (int i = from; i < stop; ++i) {
        copy_async_wait<kStages - 2>();
        __syncthreads();
        if (i + kStages - 1 < stop) stages.fetch(i + kStages - 1);
        copy_async_commit();
        const int token = (first + i * kStageChunks) * kKvTokens;
        if (Kind::kMayBeNan && end < token + kStageChunks * kKvTokens) stages.clear_values(i, end - token);
        attend_stage<Kind, Dim>(stages.stage(i), token, rows, queries, lane, state);
    }
    copy_async_wait<0>();
    float* targets[2];
    const float* own_sinks[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = first_row + lane.group + 8 * i;
        const size_t place = TileRows::place(tile, row, per_kv_head, shape.heads, first_head);
        const size_t part =
            (place - static_cast<size_t>(shape.first_row) * shape.heads) * shape.splits + blockIdx.z;
        float* const target = partial != nullptr ? partial + part * (Dim + 2) : out + place * Dim;
        targets[i] = rows.end[i] > 0 ? target : nullptr;
        own_sinks[i] = sinks != nullptr ? sinks + first_head + row % per_kv_head : nullptr;
    }
    if (partial != nullptr)
        write_partial<Kind>(state, targets, Dim, 0, lane);
    else
        write_rows<Kind>(state, targets, own_sinks, lane);
}

#define ATTENTION_PREFILL(name, dim, Kind)                                                            \
    extern "C" __global__ void __launch_bounds__(kPrefillThreads, (kPrefillBlocks<Kind::Codes, dim>)) \
        attention_prefill_##name##_##dim(const float* q, const u64* pages, const int* tiles,          \
                                         const float* sinks, float* partial, float* out, int heads,   \
                                         int kv_heads, int page_tokens, int layer_at, int window,     \
                                         int splits, int first_row, float scale) {                    \
        attention_prefill<Kind, dim>(                                                                 \
            q, pages, tiles, sinks, partial, out,                                                     \
            {heads, kv_heads, page_tokens, layer_at, window, splits, first_row, scale});              \
    }                                                                                                 \
    EXPORT_KERNEL(attention_prefill_##name##_##dim)
