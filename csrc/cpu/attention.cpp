#include "cpu/attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "cpu/parallel.h"
#include "cpu/vec8.h"

namespace strata::cpu {
namespace {

// Tokens of KV that one work item covers: deep decodes spread over threads, short ones stay whole.
constexpr size_t kSplitTokens = 1024;
// Query vectors (rows x heads of one KV head) that share one decoded page; their state stays in L1/L2.
constexpr size_t kTileQueries = 32;
// Floats of partial results at one time. All of a 512-token chunk at once took 8 MB per 1024 tokens of
// context with 32 heads of 128, and 134 MB with DeepSeek's 128 heads of 512: gigabytes for a long prompt.
constexpr size_t kPartialFloats = size_t{4} << 20;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// One work item: some query rows of a sequence, one KV head, one range of tokens.
struct Item {
    const SequenceView* sequence;
    size_t kv_head, first_query_row, query_rows;  // rows relative to the sequence
    size_t token_begin, token_end;
    size_t state;  // index of the first query's partial result, over all items
};

// Partial softmax of each query vector from state `first` on: running maximum, sum, weighted values.
struct Partials {
    std::vector<float> top, sum, values;
    size_t first;
    void reset(size_t first_state, size_t queries, size_t dim) {
        first = first_state;
        top.assign(queries, kMinusInfinity);
        sum.assign(queries, 0.0f);
        values.assign(queries * dim, 0.0f);
    }
};

// Decodes n consecutive elements of any KV type to f32; n is a multiple of 8 or handled by the tail.
void decode(const KvLayer& cache, const void* base, size_t offset, size_t n, float* out) {
    size_t i = 0;
    if (cache.type == KvType::int8) {
        const int8_t* p = static_cast<const int8_t*>(base) + offset;
        for (; i + 8 <= n; i += 8) _mm256_storeu_ps(out + i, vec8::load_i8(p + i));
        for (; i < n; ++i) out[i] = p[i];
    } else if (cache.type == KvType::bf16) {
        const uint16_t* p = static_cast<const uint16_t*>(base) + offset;
        for (; i + 8 <= n; i += 8) _mm256_storeu_ps(out + i, vec8::load_bf16(p + i));
        for (; i < n; ++i) {
            const uint32_t bits = static_cast<uint32_t>(p[i]) << 16;
            std::memcpy(out + i, &bits, sizeof bits);
        }
    } else {
        std::copy_n(static_cast<const float*>(base) + offset, n, out);
    }
}

// scores[0 .. 8 lanes) = sum over d of q[d] * keys[d][..]; `tokens` is the stride between elements d.
template <int Lanes>
void score_columns(const float* q, const float* keys, size_t dim, size_t tokens, float* scores) {
    __m256 acc[Lanes];
    for (int j = 0; j < Lanes; ++j) acc[j] = _mm256_setzero_ps();
    for (size_t d = 0; d < dim; ++d, keys += tokens) {
        const __m256 element = _mm256_broadcast_ss(q + d);
        for (int j = 0; j < Lanes; ++j)
            acc[j] = _mm256_fmadd_ps(element, _mm256_loadu_ps(keys + 8 * j), acc[j]);
    }
    for (int j = 0; j < Lanes; ++j) _mm256_storeu_ps(scores + 8 * j, acc[j]);
}

// All tokens of a page at once (a multiple of 8), without horizontal sums.
void score_page(const float* q, const float* keys, size_t dim, size_t tokens, float* scores) {
    size_t t = 0;
    for (; t + 32 <= tokens; t += 32) score_columns<4>(q, keys + t, dim, tokens, scores + t);
    for (; t < tokens; t += 8) score_columns<1>(q, keys + t, dim, tokens, scores + t);
}

// acc[d] += sum over t of p[t] * values[t][d].
void add_values(const float* p, const float* values, size_t stride, size_t tokens, size_t dim, float* acc) {
    for (size_t t = 0; t < tokens; ++t) {
        if (p[t] == 0.0f) continue;
        const __m256 weight = _mm256_set1_ps(p[t]);
        const float* value = values + t * stride;
        size_t d = 0;
        for (; d + 8 <= dim; d += 8)
            _mm256_storeu_ps(acc + d,
                             _mm256_fmadd_ps(weight, _mm256_loadu_ps(value + d), _mm256_loadu_ps(acc + d)));
        for (; d < dim; ++d) acc[d] += p[t] * value[d];
    }
}

// The page that a work item is looking at, decoded once for all its query vectors.
class DecodedPage {
  public:
    explicit DecodedPage(const KvLayer& cache)
        : cache_(cache),
          keys_(cache.page_tokens * cache.key_dim),
          values_(cache.page_tokens * cache.value_dim) {}

    void load(size_t page, size_t head) {
        const size_t tokens = cache_.page_tokens;
        decode(cache_, cache_.keys, cache_.block(page, head, cache_.key_dim), tokens * cache_.key_dim,
               keys_.data());
        if (cache_.value_in_key) {
            for (size_t d = 0; d < cache_.value_dim; ++d)
                for (size_t t = 0; t < tokens; ++t) values_[t * cache_.value_dim + d] = keys_[d * tokens + t];
        } else {
            decode(cache_, cache_.values, cache_.block(page, head, cache_.value_dim),
                   tokens * cache_.value_dim, values_.data());
        }
        scales_ = (page * cache_.kv_heads + head) * tokens;
    }
    const float* keys() const { return keys_.data(); }
    const float* values() const { return values_.data(); }
    float key_scale(size_t t) const { return is_int8() ? cache_.key_scales[scales_ + t] : 1.0f; }
    float value_scale(size_t t) const {
        if (!is_int8()) return 1.0f;
        return cache_.value_in_key ? cache_.key_scales[scales_ + t] : cache_.value_scales[scales_ + t];
    }

  private:
    bool is_int8() const { return cache_.type == KvType::int8; }
    const KvLayer& cache_;
    std::vector<float> keys_, values_;
    size_t scales_ = 0;
};

// Online softmax step of one query over the page tokens [begin, end) that it may see.
void absorb_page(const DecodedPage& page, const KvLayer& cache, const float* q, float scale, size_t begin,
                 size_t end, float* scores, float& top, float& sum, float* values) {
    score_page(q, page.keys(), cache.key_dim, cache.page_tokens, scores);
    float page_top = kMinusInfinity;
    for (size_t t = begin; t < end; ++t) {
        scores[t] *= scale * page.key_scale(t);
        page_top = std::max(page_top, scores[t]);
    }
    if (page_top > top) {
        const float shrink = std::exp(top - page_top);
        sum *= shrink;
        for (size_t d = 0; d < cache.value_dim; ++d) values[d] *= shrink;
        top = page_top;
    }
    for (size_t t = 0; t < begin; ++t) scores[t] = kMinusInfinity;
    for (size_t t = end; t < cache.page_tokens; ++t) scores[t] = kMinusInfinity;
    for (size_t t = 0; t < cache.page_tokens; t += 8) {
        const __m256 shifted = _mm256_sub_ps(_mm256_loadu_ps(scores + t), _mm256_set1_ps(top));
        const __m256 seen = _mm256_cmp_ps(shifted, _mm256_set1_ps(-87.0f), _CMP_GE_OQ);
        _mm256_storeu_ps(scores + t, _mm256_and_ps(vec8::exp(shifted), seen));
    }
    for (size_t t = begin; t < end; ++t) {
        sum += scores[t];
        scores[t] *= page.value_scale(t);
    }
    add_values(scores + begin, page.values() + begin * cache.value_dim, cache.value_dim, end - begin,
               cache.value_dim, values);
}

void run_item(const AttentionArgs& args, const KvLayer& cache, const Item& item, const float* q,
              Partials& partials) {
    const SequenceView& seq = *item.sequence;
    const size_t group = args.heads / cache.kv_heads, tokens = cache.page_tokens;
    DecodedPage page(cache);
    std::vector<float> scores(tokens);
    for (size_t first = item.token_begin / tokens * tokens; first < item.token_end; first += tokens) {
        page.load(static_cast<size_t>(seq.pages[first / tokens]), item.kv_head);
        for (size_t i = 0; i < item.query_rows * group; ++i) {
            const size_t row = item.first_query_row + i / group;
            const size_t head = item.kv_head * group + i % group;
            const size_t position = seq.start + row;
            size_t low = item.token_begin, high = std::min(item.token_end, position + 1);
            if (args.window && position + 1 > args.window) low = std::max(low, position + 1 - args.window);
            low = std::max(low, first);
            high = std::min(high, first + tokens);
            if (low >= high) continue;
            const size_t index = item.state - partials.first + i;
            absorb_page(page, cache, q + ((seq.first_row + row) * args.heads + head) * cache.key_dim,
                        args.scale, low - first, high - first, scores.data(), partials.top[index],
                        partials.sum[index], partials.values.data() + index * cache.value_dim);
        }
    }
}

// Cuts a batch into work items; the splits of one query tile lie one after another in `items`.
std::vector<Item> make_items(const AttentionArgs& args, const KvLayer& cache, const SequenceView* sequences,
                             size_t count, size_t& states) {
    std::vector<Item> items;
    const size_t group = args.heads / cache.kv_heads;
    const size_t tile = std::max<size_t>(1, kTileQueries / group);
    states = 0;
    for (size_t s = 0; s < count; ++s)
        for (size_t row = 0; row < sequences[s].count; row += tile)
            for (size_t head = 0; head < cache.kv_heads; ++head) {
                const size_t rows = std::min(tile, sequences[s].count - row);
                const size_t end = sequences[s].start + row + rows;
                const size_t oldest = sequences[s].start + row + 1;
                const size_t seen = args.window && oldest > args.window ? oldest - args.window : 0;
                for (size_t t = seen / kSplitTokens * kSplitTokens; t < end; t += kSplitTokens) {
                    items.push_back(
                        {&sequences[s], head, row, rows, t, std::min(end, t + kSplitTokens), states});
                    states += rows * group;
                }
            }
    return items;
}

// Joins the splits [begin, end) of one query tile, in order, and writes its outputs.
void combine(const AttentionArgs& args, const KvLayer& cache, const Item* begin, const Item* end,
             const Partials& partials, float* out) {
    const size_t group = args.heads / cache.kv_heads, dim = cache.value_dim;
    for (size_t i = 0; i < begin->query_rows * group; ++i) {
        const size_t head = begin->kv_head * group + i % group;
        const size_t row = begin->sequence->first_row + begin->first_query_row + i / group;
        float* result = out + (row * args.heads + head) * dim;
        float top = args.sinks ? args.sinks[head] : kMinusInfinity;
        for (const Item* item = begin; item != end; ++item)
            top = std::max(top, partials.top[item->state - partials.first + i]);
        float total = args.sinks ? std::exp(args.sinks[head] - top) : 0.0f;
        std::fill_n(result, dim, 0.0f);
        for (const Item* item = begin; item != end; ++item) {
            const size_t index = item->state - partials.first + i;
            const float factor = std::exp(partials.top[index] - top);
            total += factor * partials.sum[index];
            const float* values = partials.values.data() + index * dim;
            for (size_t d = 0; d < dim; ++d) result[d] += factor * values[d];
        }
        const float inverse = 1.0f / total;
        for (size_t d = 0; d < dim; ++d) result[d] *= inverse;
    }
}

bool same_tile(const Item& a, const Item& b) {
    return a.sequence == b.sequence && a.kv_head == b.kv_head && a.first_query_row == b.first_query_row;
}

// Where a query tile begins: its first item, and that item's first state.
struct Tile {
    size_t item, state;
};

// The tiles in order, closed by the ends of items and states.
std::vector<Tile> find_tiles(const std::vector<Item>& items, size_t states) {
    std::vector<Tile> tiles;
    for (size_t i = 0; i < items.size(); ++i)
        if (i == 0 || !same_tile(items[i - 1], items[i])) tiles.push_back({i, items[i].state});
    tiles.push_back({items.size(), states});
    return tiles;
}

// End of the wave of tiles that begins with `first`: as many as kPartialFloats allows, at least one.
size_t wave_end(const std::vector<Tile>& tiles, size_t dim, size_t first) {
    size_t end = first + 1;
    while (end + 1 < tiles.size() && (tiles[end + 1].state - tiles[first].state) * dim <= kPartialFloats)
        ++end;
    return end;
}

}  // namespace

void attention(ThreadPool& pool, const AttentionArgs& args, const KvLayer& cache,
               const SequenceView* sequences, size_t count, const float* q, float* out) {
    size_t states = 0;
    const std::vector<Item> items = make_items(args, cache, sequences, count, states);
    const std::vector<Tile> tiles = find_tiles(items, states);
    // Reused from step to step: a prefill's partial results are megabytes.
    static thread_local Partials storage;
    Partials& partials = storage;
    for (size_t first = 0, last; first + 1 < tiles.size(); first = last) {
        last = wave_end(tiles, cache.value_dim, first);
        const Item* begin = &items[tiles[first].item];
        partials.reset(tiles[first].state, tiles[last].state - tiles[first].state, cache.value_dim);
        parallel_items(pool, tiles[last].item - tiles[first].item,
                       [&](size_t i) { run_item(args, cache, begin[i], q, partials); });
        parallel_for(pool, last - first, args.heads * cache.value_dim, [&](size_t from, size_t to) {
            for (size_t t = first + from; t < first + to; ++t)
                combine(args, cache, &items[tiles[t].item], items.data() + tiles[t + 1].item, partials, out);
        });
    }
}

}  // namespace strata::cpu
