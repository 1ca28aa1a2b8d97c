// A decoded unit swept over many tokens in tiles whose sums fill the registers.
#pragma once

#include "cpu/kernels/kernels.h"
#include "cpu/kernels/simd.h"

namespace strata::cpu::STRATA_ISA {
namespace {

// units: one per row block of a tile; out: [blocks][tokens][16] lanes of which those of the tile's tokens,
// from the first on, are added to.
template <class Unit>
using TileFn = void (*)(const Unit* units, const QuantUnit* x, float* out, int tokens);

// The function for `count` tokens. Tile::of<T>() is the one for T.
template <class Tile, int T>
STRATA_INLINE TileFn<typename Tile::Unit> tile_of(int count) {
    if constexpr (T > 1)
        if (count < T) return tile_of<Tile, T - 1>(count);
    return Tile::template of<T>();
}

// Tokens cut into tiles of nearly equal size: one of few tokens would leave registers empty. Known before the
// sweeps, which are too short for divisions.
template <class Tile>
struct Sweep {
    using Unit = typename Tile::Unit;
    const int tokens, tiles, least, larger;  // the first `larger` tiles have a token more than the others
    const TileFn<Unit> most_fn, least_fn;

    STRATA_ALWAYS_INLINE explicit Sweep(int tokens)
        : tokens(tokens),
          tiles((tokens + kTile - 1) / kTile),
          least(tokens / tiles),
          larger(tokens % tiles),
          most_fn(tile_of<Tile, kTile>(least + 1)),
          least_fn(tile_of<Tile, kTile>(least)) {}

    STRATA_ALWAYS_INLINE void run(const Unit* units, const QuantUnit* x, float* out) const {
        for (int i = 0; i < larger; i++, x += least + 1, out += (least + 1) * kRowBlock)
            most_fn(units, x, out, tokens);
        for (int i = larger; i < tiles; i++, x += least, out += least * kRowBlock)
            least_fn(units, x, out, tokens);
    }
};

}  // namespace
}  // namespace strata::cpu::STRATA_ISA
