#include "cpu/best_logits.h"

#include <immintrin.h>

#include <algorithm>
#include <limits>

#include "cpu/parallel.h"

namespace strata::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
// Columns that one thread looks through at a time, at least.
constexpr size_t kSpan = 4096;
constexpr size_t kStep = 32;

struct Candidate {
    float value;
    int32_t id;
};

// Orders a heap so that the worst candidate is its first.
bool better(const Candidate& a, const Candidate& b) {
    return a.value > b.value || (a.value == b.value && a.id < b.id);
}

// The best of a span of one row: `kept`, which has room for `count`. sound: no NaN or +infinity was taken.
struct Best {
    Candidate* kept;
    size_t count, found = 0;
    bool sound = true;

    // What a later one must exceed.
    float bar() const { return found < count ? -kInfinity : kept[0].value; }

    void take(Candidate one) {
        sound = sound && one.value < kInfinity;
        if (!(one.value > bar())) return;
        if (found == count) {
            std::pop_heap(kept, kept + count, better);
            kept[count - 1] = one;
        } else {
            kept[found++] = one;
        }
        std::push_heap(kept, kept + found, better);
    }
};

// Columns [begin, end), in ascending order. Of 32 columns hardly any is better than the best so far, or NaN:
// they are compared at once.
void look_through(const float* row, size_t begin, size_t end, Best& best) {
    size_t i = begin;
    for (; i + kStep <= end; i += kStep) {
        const __m256 bar = _mm256_set1_ps(best.bar());
        __m256 any = _mm256_setzero_ps();
        for (int part = 0; part < 4; ++part)
            any = _mm256_or_ps(any, _mm256_cmp_ps(_mm256_loadu_ps(row + i + 8 * part), bar, _CMP_NLE_UQ));
        if (_mm256_movemask_ps(any) == 0) continue;
        for (size_t at = i; at < i + kStep; ++at)
            if (!(row[at] <= best.bar())) best.take({row[at], static_cast<int32_t>(at)});
    }
    for (; i < end; ++i) best.take({row[i], static_cast<int32_t>(i)});
}

}  // namespace

bool best_logits(Cpu& cpu, const float* logits, size_t rows, size_t stride, size_t columns, size_t count,
                 float* values, int32_t* ids) {
    const size_t spans = std::max<size_t>(1, std::min<size_t>(cpu.pool.size(), columns / kSpan));
    Candidate* all = cpu.arena.take<Candidate>(rows * spans * count);
    Best* bests = cpu.arena.take<Best>(rows * spans);
    // Span after span: a thread finds in its cache what it has just computed. A float is only compared, which
    // takes a quarter of what parallel_for counts with.
    parallel_for(cpu.pool, rows * spans, columns / spans / 4, [&](size_t begin, size_t end) {
        for (size_t unit = begin; unit < end; ++unit) {
            const size_t row = unit % rows, span = unit / rows, place = row * spans + span;
            bests[place] = {all + place * count, count};
            look_through(logits + row * stride, columns * span / spans, columns * (span + 1) / spans,
                         bests[place]);
        }
    });
    if (!std::all_of(bests, bests + rows * spans, [](const Best& best) { return best.sound; })) return false;
    for (size_t row = 0; row < rows; ++row) {
        Candidate* first = all + row * spans * count;
        size_t found = 0;
        for (size_t span = 0; span < spans; ++span) {
            const Best& best = bests[row * spans + span];
            std::copy_n(best.kept, best.found, first + found);
            found += best.found;
        }
        if (found < count) return false;
        std::partial_sort(first, first + count, first + found, better);
        for (size_t i = 0; i < count; ++i) {
            values[row * count + i] = first[i].value;
            ids[row * count + i] = first[i].id;
        }
    }
    return true;
}

}  // namespace strata::cpu
