"""Grids, blocks and shared memory of every kernel: what a launch needs beside its arguments."""

from __future__ import annotations

from dataclasses import dataclass

WARP = 32
MAX_SHARED = 99 << 10
"""Bytes of shared memory that one block may ask for on sm_86."""


@dataclass(frozen=True)
class LaunchShape:
    """file: the `.cu` file; entry: the kernel in it; block: threads."""

    file: str
    entry: str
    grid: tuple[int, int, int]
    block: int
    shared_bytes: int


def rms_norm(rows: int, columns: int) -> LaunchShape:
    """One block per row; columns a multiple of 4."""
    block = min(256, max(WARP, columns // 4 // WARP * WARP))
    return LaunchShape("norm", "rms_norm", (rows, 1, 1), block, columns * 4 + block // WARP * 4)


TILE_TOKENS, TILE_WARPS = 8, 4
"""Tokens of one tensor-core tile; warps of a block that multiplies packed weights (csrc/cuda/tile.cuh)."""


def partial_sums_bytes(tiles: int) -> int:
    """Shared memory of `PartialSums` in tile.cuh."""
    return TILE_WARPS * 16 * (tiles * TILE_TOKENS + 4) * 4


def row_blocks_per_block(row_blocks: int, tokens: int) -> int:
    """1, 2 or 4. More save reads of activations, but the blocks must still fill 82 SMs twice."""
    wanted = 1 if tokens <= 4 else 2 if tokens <= 8 else 4
    while wanted > 1 and row_blocks < wanted * 164:
        wanted //= 2
    return wanted


def linear(
    fmt: str, rows: int, tokens: int, per_block: int | None = None, normed: bool = False
) -> LaunchShape:
    """per_block: row blocks of one block, chosen when None. normed: the rows' norm is part of it."""
    row_blocks, tiles = -(-rows // 16), 1 if tokens <= TILE_TOKENS else 2
    per_block = per_block or row_blocks_per_block(row_blocks, tokens)
    grid = (-(-row_blocks // per_block), -(-tokens // (tiles * TILE_TOKENS)), 1)
    entry = f"linear_{fmt}_{tiles}"
    squares = tiles * TILE_TOKENS * TILE_WARPS * 4 if normed else 0
    return LaunchShape("linear", entry, grid, TILE_WARPS * WARP, partial_sums_bytes(tiles) + squares)


def expert_gate_up(fmt: str, blocks: int, experts: int, most_tokens: int) -> LaunchShape:
    """blocks: row blocks of gate_up, all slices; most_tokens: of one expert."""
    return _expert_shape("expert_gate_up", fmt, blocks, experts, most_tokens)


def expert_down(fmt: str, blocks: int, experts: int, most_tokens: int) -> LaunchShape:
    """blocks: row blocks of down, that is of the hidden dimension."""
    return _expert_shape("expert_down", fmt, blocks, experts, most_tokens)


def _expert_shape(file: str, fmt: str, blocks: int, experts: int, most_tokens: int) -> LaunchShape:
    tiles = 1 if most_tokens <= TILE_TOKENS else 2
    grid = (blocks, experts, -(-most_tokens // (tiles * TILE_TOKENS)))
    return LaunchShape(file, f"{file}_{fmt}_{tiles}", grid, TILE_WARPS * WARP, partial_sums_bytes(tiles))


GATING_KINDS = {"silu": 0, "gelu_tanh": 1, "swiglu_clamped": 2}
"""What csrc/cuda/activation.cuh calls the kinds of `Gating`."""


def combine_experts(columns: int, tokens: int) -> LaunchShape:
    """One thread per four columns."""
    return LaunchShape("combine", "combine_experts", (-(-columns // 4 // 128), tokens, 1), 128, 0)


ATTENTION_WARPS, ATTENTION_QUERIES, KV_TOKENS = 4, 8, 16
"""csrc/cuda/attention_decode.cu: warps of a block, query heads of a block, tokens of a warp's turn."""


def attention_splits(longest: int, blocks: int) -> int:
    """Splits of the KV length: enough blocks for 82 SMs with four each, at least four turns per warp."""
    useful = -(-longest // (4 * ATTENTION_WARPS * KV_TOKENS))
    return max(1, min(useful, -(-4 * 82 // blocks)))


def attention_decode(dtype: str, dim: int, heads: int, kv_heads: int, tiles: int, splits: int) -> LaunchShape:
    """dtype: of the pages, int8 or bf16; tiles: rows that take part."""
    groups = kv_heads * -(-heads // kv_heads // ATTENTION_QUERIES)
    floats = max(ATTENTION_WARPS * ATTENTION_QUERIES * (dim + 4 + 2), ATTENTION_QUERIES * splits)
    file, entry = _by_head("attention_decode", dtype, dim)
    return LaunchShape(file, entry, (splits, groups, tiles), ATTENTION_WARPS * WARP, floats * 4)


PREFILL_ROWS, PREFILL_STAGES, STAGE_CHUNKS = 64, 3, 2
"""csrc/cuda/attention_prefill.cuh: rows (token, query head) of a tile; stages; 16 tokens each in a stage."""


def prefill_splits(longest: int, blocks: int) -> int:
    """Splits of the KV length of few tiles: towards two blocks for each of 82 SMs, of 128 tokens at least."""
    return max(1, min(longest // 128, 2 * 82 // blocks))


def attention_prefill(dtype: str, dim: int, kv_heads: int, tiles: int, splits: int) -> LaunchShape:
    """One block per tile, KV head and split."""
    chunk = KV_TOKENS * dim + 64 if dtype == "int8" else KV_TOKENS * dim * 2
    shared = PREFILL_STAGES * STAGE_CHUNKS * 2 * chunk
    file, entry = _by_head("attention_prefill", dtype, dim)
    return LaunchShape(file, entry, (tiles, kv_heads, splits), 4 * WARP, shared)


WIDE_ROWS = 16
"""csrc/cuda/attention_wide.cuh: rows (token, query head) of a tile, and query heads of a group."""
WIDE_WARPS = {192: 6, 256: 8, 576: 8}
"""Warps that divide a key of so many elements."""


def attention_wide(
    dtype: str, key_dim: int, latent: bool, heads: int, kv_heads: int, tiles: int, splits: int
) -> LaunchShape:
    """latent: values are the beginning of keys."""
    warps = WIDE_WARPS[key_dim]
    groups = kv_heads * -(-heads // kv_heads // WIDE_ROWS)
    file = "attention_latent" if latent else "attention_wide"
    shared = 2 * (2 * warps + 2) * WARP * 16
    return LaunchShape(file, f"{file}_{dtype}_{key_dim}", (splits, groups, tiles), warps * WARP, shared)


GROUPED_ELEMENTS = 32
"""csrc/cuda/attention_grouped.cu: elements of a warp, which are of one group."""


def attention_grouped(dim: int, heads: int, kv_heads: int, tiles: int, splits: int) -> LaunchShape:
    """Of int8 pages with several scales per token and head."""
    warps = dim // GROUPED_ELEMENTS
    groups = kv_heads * -(-heads // kv_heads // WIDE_ROWS)
    shared = 2 * (2 * warps + 2) * WARP * 16
    entry = f"attention_grouped_{dim}"
    return LaunchShape("attention_grouped", entry, (splits, groups, tiles), warps * WARP, shared)


COMMON_HEADS = (64, 128)
"""Elements of the heads that most models have; the kernels of others are compiled for those who need them."""


def _by_head(kernel: str, dtype: str, dim: int) -> tuple[str, str]:
    """File and entry."""
    return kernel if dim in COMMON_HEADS else f"{kernel}_dims", f"{kernel}_{dtype}_{dim}"


def attention_combine(heads: int, tiles: int, dim: int) -> LaunchShape:
    """One block per head and row."""
    return LaunchShape(
        "attention_combine", "attention_combine", (heads, tiles, 1), min(128, -(-dim // WARP) * WARP), 0
    )


HEAD_WARPS = 4
"""csrc/cuda/prepare_heads.cu: heads of a block."""


def heads_of_rows(entry: str, heads: int, rows: int, dim: int) -> LaunchShape:
    """entry: prepare_qkv (heads: those of q, k and v), prepare_heads, append_kv (of k and v)."""
    grid = (-(-heads // HEAD_WARPS), rows, 1)
    return LaunchShape("prepare_heads", entry, grid, HEAD_WARPS * WARP, HEAD_WARPS * dim * 4)


ROUTER_SCORES = {"softmax": 0, "sigmoid": 1, "softmax_topk": 2}
"""What csrc/cuda/router.cu calls RouterSpec's scores."""


def route(rows: int, experts: int, top_k: int, groups: int) -> LaunchShape:
    """One warp per row."""
    return LaunchShape("router", "route", (rows, 1, 1), WARP, (2 * experts + top_k + 2 * groups) * 4)


ROUTER_ROWS, ROUTER_WARPS = 8, 4
"""csrc/cuda/norm_route.cu: rows of a tile; warps of a block, each of which takes an expert."""


def norm_route(rows: int, experts: int, top_k: int, groups: int) -> LaunchShape:
    """One warp per expert and eight rows."""
    grid = (-(-experts // ROUTER_WARPS), -(-rows // ROUTER_ROWS), 1)
    shared = ROUTER_WARPS * (2 * experts + top_k + 2 * groups) * 4
    return LaunchShape("norm_route", "norm_route", grid, ROUTER_WARPS * WARP, shared)


VALUE_KINDS = {"int4": 0, "e2m1": 1, "int8": 2, "bf16": 3, "f16": 4}
"""What csrc/cuda/embedding.cu calls ValueKind."""


def embedding(tokens: int) -> LaunchShape:
    """One block per token."""
    return LaunchShape("embedding", "embedding", (tokens, 1, 1), 128, 0)


ELEMENTS = 256
"""Threads of a block of the kernels that treat elements alike."""


def elements(entry: str, columns: int, rows: int) -> LaunchShape:
    """One thread per element: add, scale_by_sigmoid, take_rows, copy_heads, gate, each in its own file."""
    return LaunchShape(entry, entry, (-(-columns // ELEMENTS), rows, 1), ELEMENTS, 0)


def plain_linear(outputs: int, rows: int) -> LaunchShape:
    """Four outputs and eight rows per block."""
    return LaunchShape("plain_linear", "plain_linear", (-(-outputs // 4), -(-rows // 8), 1), 4 * WARP, 0)


TOPK_SPAN = 4096
"""Logits that one block of head_topk looks at."""


def head_topk(rows: int, columns: int, span: int = TOPK_SPAN) -> LaunchShape:
    """Eight warps; a candidate of 12 bytes for each beside the span."""
    return LaunchShape("head_topk", "head_topk", (-(-columns // span), rows, 1), 256, span * 4 + 8 * 12)


def verify_draft(sequences: int) -> LaunchShape:
    """One warp per sequence."""
    return LaunchShape("verify_draft", "verify_draft", (-(-sequences // 4), 1, 1), 4 * WARP, 0)
