// Many tokens times int8 activations: a unit is decoded once into L1 and swept over all tokens in tiles of
// some row blocks and tokens, whose sums fill the registers; partial results rest in job.out.
#include "cpu/kernels/spans.h"
#include "cpu/kernels/sweep.h"
#include "cpu/kernels/tables.h"

namespace strata::cpu::STRATA_ISA {
namespace {

// One unit of one row block, decoded.
struct Decoded {
    alignas(64) uint8_t bytes[kSteps * kStepBytes];
    alignas(64) float scales[2][kRowBlock];
    alignas(64) float minimums[2][kRowBlock];

    STRATA_ALWAYS_INLINE Ints step(int index) const { return load_ints(bytes + index * kStepBytes); }
};

template <int kCode>
STRATA_INLINE void decode(const Matrix& matrix, const uint8_t* block, int unit, Decoded* out) {
    using F = Traits<kCode>;
    const uint8_t* packed = block + static_cast<size_t>(unit) * F::kUnit;
#pragma GCC unroll 16
    for (int step = 0; step < kSteps; step++)
        store_ints(out->bytes + step * kStepBytes, F::Decode::template step<WholeBlock>(packed, step));
    for (int span = 0; span < F::Kind::kSpans; span++) {
        store_floats(out->scales[span], span_scales<kCode, WholeBlock>(matrix, block, unit, span));
        if constexpr (F::Kind::kMinimum)
            store_floats(out->minimums[span], span_minimums<kCode, WholeBlock>(matrix, block, unit, span));
    }
}

// B blocks times T tokens of one unit. out: f32 [B][tokens][16], of which T tokens from the first are added
// to.
template <class Kind, int B, int T>
__attribute__((noinline)) static void tile(const Decoded* units, const QuantUnit* x, float* out, int tokens) {
    const Decoded(&source)[B] = *reinterpret_cast<const Decoded(*)[B]>(units);
#pragma GCC unroll 2
    for (int span = 0; span < Kind::kSpans; span++) {
        Ints sum[B][T];
        sum_span<Kind, WholeBlock>(source, x, span, sum);
        for (int b = 0; b < B; b++) {
            const Floats scale = load_floats(source[b].scales[span]);
            const Floats minimum = load_floats(source[b].minimums[span]);
#pragma GCC unroll 16
            for (int t = 0; t < T; t++) {
                float* acc = out + (static_cast<size_t>(b) * tokens + t) * kRowBlock;
                store_floats(
                    acc, add_span<Kind, WholeBlock>(load_floats(acc), sum[b][t], scale, minimum, x[t], span));
            }
        }
    }
}

template <class Kind, int B>
struct Tiles {
    using Unit = Decoded;
    template <int T>
    STRATA_INLINE TileFn<Unit> of() {
        return tile<Kind, B, T>;
    }
};

template <int kCode, int B>
static void blocks(const BlockJob& job, int first) {
    const Matrix& matrix = *job.matrix;
    const uint8_t* block = job.block + first * matrix.block_bytes;
    float* out = job.out + static_cast<size_t>(first) * job.tokens * kRowBlock;
    for (int i = 0; i < B * job.tokens; i++) store_floats(out + i * kRowBlock, set_floats(0.0f));
    Decoded units[B];
    const Sweep<Tiles<typename Traits<kCode>::Kind, B>> sweep(job.tokens);
    const size_t passed = (B * matrix.block_bytes + matrix.units - 1) / matrix.units;
    for (int unit = 0; unit < matrix.units; unit++) {
        if (job.ahead != nullptr) job.ahead->template pass<B * Traits<kCode>::kUnitLines>(passed);
        for (int b = 0; b < B; b++) decode<kCode>(matrix, block + b * matrix.block_bytes, unit, &units[b]);
        const QuantUnit* x = static_cast<const QuantUnit*>(job.x) + static_cast<size_t>(unit) * job.stride;
        sweep.run(units, x, out);
    }
    for (int i = 0; i < B * job.tokens; i++)
        finish<kCode>(matrix, block + i / job.tokens * matrix.block_bytes, out + i * kRowBlock);
}

template <int kCode>
static void tiles(const BlockJob& job) {
    int first = 0;
    for (; first + kTileBlocks <= job.blocks; first += kTileBlocks) blocks<kCode, kTileBlocks>(job, first);
    for (; first < job.blocks; first++) blocks<kCode, 1>(job, first);
}

// Signed weights never go in tiles.
template <int kCode>
static constexpr BlockFn tiles_of() {
    if constexpr (Traits<kCode>::Kind::kSigned)
        return nullptr;
    else
        return tiles<kCode>;
}

}  // namespace

const BlockFn kTilesQ8[kFormatCount] = {nullptr,       nullptr,       tiles_of<2>(), tiles_of<3>(),
                                        tiles_of<4>(), tiles_of<5>(), tiles_of<6>(), tiles_of<7>(),
                                        tiles_of<8>(), tiles_of<9>(), tiles_of<10>()};

}  // namespace strata::cpu::STRATA_ISA
