"""Grids, blocks and shared memory of the tensor-core kernels for many tokens, and when they pay."""

from __future__ import annotations

from strata.backends.cuda.launch_shapes import TILE_TOKENS, WARP, LaunchShape
from strata.store.formats import FORMATS

PREFILL_WARPS, PREFILL_STAGES = 8, 3
"""csrc/cuda/prefill.cuh: most warps of a block, stages of activations in shared memory."""


def prefill_pays(nbytes: int, columns: int, tokens: int) -> bool:
    """Whether linear_prefill is quicker than linear, by bytes: nbytes of the matrix, columns of x.

    linear reads the matrix once per 16 tokens, linear_prefill once per tile (at most 128), but x must be
    packed first: 6 bytes per number and a launch, which is worth LAUNCH_BYTES.
    """
    saved = (-(-tokens // (2 * TILE_TOKENS)) - -(-tokens // 128)) * nbytes
    return saved > LAUNCH_BYTES + 6 * tokens * columns


LAUNCH_BYTES = int(2e-6 * 0.9 * 936e9)
"""What a 3090 reads while a kernel starts, both by assumption: 2 us, 90 % of 936 GB/s."""


def prefill_tokens(fmt: str) -> int:
    """Tokens of one block of linear_prefill: with totals of activations beside them fewer find room."""
    return 96 if FORMATS[fmt].minimum else 128


def prefill_stage_bytes(fmt: str, tokens: int) -> int:
    """Shared memory of `Stages` in prefill.cuh."""
    return PREFILL_STAGES * tokens * (128 + (16 if FORMATS[fmt].minimum else 0))


def prefill_warps(row_blocks: int, token_tiles: int) -> int:
    """8, 4 or 2. More save reads of activations, but there must be a block for each of 82 SMs."""
    warps = PREFILL_WARPS
    while warps > 2 and -(-row_blocks // warps) * token_tiles < 82:
        warps //= 2
    return warps


def linear_prefill(fmt: str, rows: int, tokens: int, warps: int | None = None) -> LaunchShape:
    """warps: row blocks of one block, chosen when None."""
    at_once = prefill_tokens(fmt)
    row_blocks, tiles = -(-rows // 16), -(-tokens // at_once)
    warps = warps or prefill_warps(row_blocks, tiles)
    grid = (tiles, -(-row_blocks // warps), 1)
    shared = prefill_stage_bytes(fmt, at_once)
    return LaunchShape("linear_prefill", f"linear_prefill_{fmt}", grid, warps * WARP, shared)


def pack_activations(rows: int, units: int) -> LaunchShape:
    """One thread per eight columns."""
    return LaunchShape("pack_activations", "pack_activations", (-(-units * 8 // 256), rows, 1), 256, 0)
