"""Grids, blocks and shared memory of the tensor-core kernels for many tokens, and when they pay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from strata.backends.cuda.launch_shapes import TILE_TOKENS, TILE_WARPS, WARP, LaunchShape, partial_sums_bytes
from strata.store.formats import FORMATS

PREFILL_WARPS, PREFILL_STAGES, EXPERT_PAIRS = 8, 3, 64
"""csrc/cuda/prefill.cuh: most warps of a block, stages of activations in shared memory; pairs of a block."""


LAUNCH_BYTES = int(2e-6 * 0.9 * 936e9)
"""What a 3090 reads while a kernel starts, both by assumption: 2 us, 90 % of 936 GB/s."""


@dataclass(frozen=True)
class PrefillChoice:
    """Whether kernels for prompts are quicker, by bytes; or from `rows` rows on (in tests).

    The others read weights once per 16 tokens, these once per tile of 64 (experts) or 128, but x must be
    packed first: 6 bytes per number and a launch, which is worth LAUNCH_BYTES. int8: matrices in w8 take
    activations in int8 with a scale per row, for one row and for many.
    """

    rows: int | None = None
    int8: bool = False

    def linear(self, nbytes: int, columns: int, rows: int) -> bool:
        """nbytes: of the matrix; columns: of x."""
        return self._pays((_tiles(rows, 16) - _tiles(rows, 128)) * nbytes, columns, rows)

    def experts(self, nbytes: int, columns: int, rows: int, counts: Sequence[int]) -> bool:
        """nbytes: of an expert's matrices; counts: rows of each expert."""
        saved = sum(_tiles(count, 16) - _tiles(count, EXPERT_PAIRS) for count in counts)
        return self._pays(saved * nbytes, columns, rows)

    def _pays(self, saved: int, columns: int, rows: int) -> bool:
        if self.rows is not None:
            return rows >= self.rows
        return saved > LAUNCH_BYTES + 6 * rows * columns


def _tiles(rows: int, at_once: int) -> int:
    return -(-rows // at_once)


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
    return LaunchShape("pack_activations", "pack_activations", (rows, -(-units * 8 // 256), 1), 256, 0)


def expert_gate_up_prefill(fmt: str, slices: int, units: int, experts: int, most: int) -> LaunchShape:
    """units: of hidden, of one slice; most: pairs of one expert."""
    return _expert_shape("expert_gate_up_prefill", fmt, slices * units, experts, most)


def expert_down_prefill(fmt: str, blocks: int, experts: int, most: int) -> LaunchShape:
    """blocks: row blocks of down; most: pairs of one expert."""
    return _expert_shape("expert_down_prefill", fmt, -(-blocks // PREFILL_WARPS), experts, most)


def _expert_shape(file: str, fmt: str, parts: int, experts: int, most: int) -> LaunchShape:
    grid = (_tiles(most, EXPERT_PAIRS), experts, parts)
    shared = prefill_stage_bytes(fmt, EXPERT_PAIRS)
    return LaunchShape(file, f"{file}_{fmt}", grid, PREFILL_WARPS * WARP, shared)


W8_TOKENS, W8_STAGES, W8_BLOCKS = 64, 4, 2
"""csrc/cuda/linear_w8a8_prefill.cu: tokens of a block, stages, row blocks of a warp."""


def quantize_rows(rows: int) -> LaunchShape:
    """One block of eight warps per row."""
    return LaunchShape("quantize_rows", "quantize_rows", (rows, 1, 1), 256, 8 * 4)


def linear_w8a8(rows: int, tokens: int) -> LaunchShape:
    """One block per row block and 8 or 16 tokens."""
    tiles = 1 if tokens <= TILE_TOKENS else 2
    grid = (-(-rows // 16), _tiles(tokens, tiles * TILE_TOKENS), 1)
    return LaunchShape(
        "linear_w8a8", f"linear_w8a8_{tiles}", grid, TILE_WARPS * WARP, partial_sums_bytes(tiles)
    )


def linear_w8a8_prefill(rows: int, tokens: int, warps: int | None = None) -> LaunchShape:
    """warps: of a block, two row blocks each, chosen when None."""
    pairs, tiles = -(-rows // (16 * W8_BLOCKS)), _tiles(tokens, W8_TOKENS)
    warps = warps or prefill_warps(pairs, tiles)
    grid = (tiles, -(-pairs // warps), 1)
    shared = W8_STAGES * W8_TOKENS * 64
    return LaunchShape("linear_w8a8_prefill", "linear_w8a8_prefill", grid, warps * WARP, shared)
