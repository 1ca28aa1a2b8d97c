"""Attention of a batch as launches: each sequence's new tokens go into its pages, then its rows attend."""

from __future__ import annotations

from collections.abc import Iterator

from strata.backends.cuda import launch_shapes
from strata.backends.cuda.kernels import NULL
from strata.backends.cuda.launches import Launcher, or_null, row_range
from strata.backends.hybrid.arrays import Matrix
from strata.backends.hybrid.kernel_set import KvPlaces
from strata.backends.parts import AttentionCall
from strata.core import Sequence as Tokens
from strata.device.base import Buffer, Launch
from strata.errors import UnsupportedError
from strata.memory.regions import Arena

HEAD_DIMS, PAGE_DTYPES = (64, 128), ("int8", "bf16")
"""What csrc/cuda/attention_decode.cu has entries for."""


def attention_launches(
    launcher: Launcher,
    q: Matrix,
    k: Matrix,
    v: Matrix,
    places: KvPlaces,
    call: AttentionCall,
    sinks: Matrix | None,
    out: Matrix,
    scratch: Arena,
) -> Iterator[Launch]:
    """Two launches per sequence and one for all."""
    spec = places.cache.spec
    _require(spec.key_dim, spec.dtype, spec.page_tokens)
    batch, dim = places.batch, spec.key_dim
    longest = max(s.start + s.count for s in batch.sequences)
    groups = spec.kv_heads * -(-call.heads // spec.kv_heads // launch_shapes.ATTENTION_QUERIES)
    splits = launch_shapes.attention_splits(longest, groups * q.rows)
    columns = call.heads * splits * (dim + 2)
    partial = Matrix(scratch.take(q.rows * columns * 4, "partial attention"), q.rows, columns)
    first_page = 0
    for sequence, blocks in zip(batch.sequences, places.blocks(), strict=True):
        table = places.table.slice(8 * first_page, 8 * len(blocks))
        yield _append(launcher, k, v, places, sequence, list(blocks), table)
        yield _attend(launcher, q, places, call, sequence, list(blocks), table, partial, splits)
        first_page += len(blocks)
    shape = launch_shapes.attention_combine(call.heads, q.rows, dim)
    arguments = (partial.buffer, or_null(sinks), out.buffer, dim, splits)
    reads = (partial.buffer, *(() if sinks is None else (sinks.buffer,)))
    yield launcher.make(shape, arguments, reads, (out.buffer,))


def _append(
    launcher: Launcher,
    k: Matrix,
    v: Matrix,
    places: KvPlaces,
    sequence: Tokens,
    blocks: list[Buffer],
    table: Buffer,
) -> Launch:
    spec, rows = places.cache.spec, (sequence.first_row, sequence.count)
    keys, values = row_range(k, *rows), row_range(v, *rows)
    size = spec.page_tokens
    written = blocks[sequence.start // size : -(-(sequence.start + sequence.count) // size)]
    shape = launch_shapes.heads_of_rows("append_kv", 2 * spec.kv_heads, sequence.count, spec.key_dim)
    geometry = (spec.kv_heads, spec.key_dim, size, places.offset, int(spec.dtype == "int8"), sequence.start)
    arguments = (keys, values, table, NULL, NULL, *geometry)
    return launcher.make(shape, arguments, (keys, values, table, *written), tuple(written))


def _attend(
    launcher: Launcher,
    q: Matrix,
    places: KvPlaces,
    call: AttentionCall,
    sequence: Tokens,
    blocks: list[Buffer],
    table: Buffer,
    partial: Matrix,
    splits: int,
) -> Launch:
    spec, rows = places.cache.spec, (sequence.first_row, sequence.count)
    queries, target = row_range(q, *rows), row_range(partial, *rows)
    shape = launch_shapes.attention_decode(
        spec.dtype, spec.key_dim, call.heads, spec.kv_heads, sequence.count, splits
    )
    geometry = (
        call.heads,
        spec.kv_heads,
        spec.page_tokens,
        places.offset,
        call.window,
        splits,
        sequence.start,
    )
    arguments = (queries, table, NULL, NULL, target, *geometry, float(call.scale))
    seen = sequence.count * (sequence.start + sequence.count)
    macs = seen * call.heads * (spec.key_dim + spec.value_dim)
    return launcher.make(shape, arguments, (queries, table, *blocks), (target,), macs)


def _require(dim: int, dtype: str, page_tokens: int) -> None:
    if dim in HEAD_DIMS and dtype in PAGE_DTYPES and page_tokens % launch_shapes.KV_TOKENS == 0:
        return
    raise UnsupportedError(
        f"attention on a GPU with heads of {dim}, {dtype} pages of {page_tokens} tokens",
        remedy=f"heads of {HEAD_DIMS}, {PAGE_DTYPES} pages of a multiple of {launch_shapes.KV_TOKENS} tokens",
    )
