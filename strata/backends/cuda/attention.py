"""Attention of a batch as launches: new tokens go into their pages, then prompts and single rows attend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from strata.backends.base import KvSpec
from strata.backends.cuda import launch_shapes
from strata.backends.cuda.attention_tiles import BatchTables, Tiles, batch_tables
from strata.backends.cuda.kernels import NULL
from strata.backends.cuda.launches import Launcher, Operand, or_null
from strata.backends.hybrid.arrays import Matrix
from strata.backends.hybrid.kernel_set import KvPlaces, Projections
from strata.backends.parts import AttentionCall
from strata.core import Batch
from strata.device.base import Buffer, Launch
from strata.errors import UnsupportedError
from strata.memory.regions import Arena
from strata.plan.activations import SPLIT_BLOCKS

HEAD_DIMS, WIDE_DIMS, LATENT_DIMS = (16, 32, 48, 64, 80, 96, 128), (192, 256), (576, 512)
"""Elements of heads that csrc/cuda has kernels for; of keys and values of latent attention."""
WITH_TICKETS = ("attention_decode", "attention_decode_dims")
"""Files whose kernels can join what splits leave. Of wide heads they have no register left for that."""
GROUPED_DIMS = (64, 96, 128, 192, 256)
"""The same where heads have several scales."""
PAGE_DTYPES = ("int8", "int8g128", "int8g64", "int8g32", "bf16")
"""Not f32: tensor cores would round what they read to 16 bits, which is what bf16 pages hold. Not int8t,
whose clipped codes are there for comparison only."""


@dataclass(frozen=True)
class _Call:
    """One layer's attention of one batch, as all of its launches see it."""

    launcher: Launcher
    q: Matrix
    places: KvPlaces
    call: AttentionCall
    tables: BatchTables
    blocks: list[Sequence[Buffer]]

    @property
    def spec(self) -> KvSpec:
        """Of the pages."""
        return self.places.cache.spec

    @property
    def wide(self) -> bool:
        """Whether csrc/cuda/attention_wide.cuh computes it."""
        return _wide(self.spec)

    @property
    def groups(self) -> int:
        """Groups of query heads that blocks of single rows take."""
        of_group = launch_shapes.WIDE_ROWS if self.wide else launch_shapes.ATTENTION_QUERIES
        return self.spec.kv_heads * -(-self.call.heads // self.spec.kv_heads // of_group)

    def wide_shape(self, tiles: Tiles, splits: int) -> launch_shapes.LaunchShape:
        """Of the kernel for wide heads."""
        spec = self.spec
        heads = (self.call.heads, spec.kv_heads)
        if spec.group:
            return launch_shapes.attention_grouped(spec.key_dim, *heads, tiles.count, splits)
        return launch_shapes.attention_wide(
            spec.dtype, spec.key_dim, spec.value_in_key, *heads, tiles.count, splits
        )

    def geometry(self) -> tuple[int, ...]:
        """Arguments that all kernels of attention take."""
        spec, window = self.spec, self.call.window
        return self.call.heads, spec.kv_heads, spec.page_tokens, self.places.offset, window

    def seen(self, tiles: Tiles) -> tuple[Buffer, ...]:
        """Pages of the tiles' sequences."""
        return tuple(chain.from_iterable(self.blocks[i] for i in tiles.sequences))

    def macs(self, tiles: Tiles) -> int:
        """Products of the tiles' rows with what they see, at most."""
        chosen = [self.places.batch.sequences[i] for i in tiles.sequences]
        seen = sum(s.count * (s.start + s.count) for s in chosen)
        return seen * self.call.heads * (self.spec.key_dim + self.spec.value_dim)


class CudaAttention:
    """Makes the launches. The tables of a batch serve all its layers."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._tables: tuple[Batch, BatchTables] | None = None

    def launches(
        self,
        q: Matrix,
        k: Matrix,
        v: Matrix | None,
        places: KvPlaces,
        call: AttentionCall,
        sinks: Matrix | None,
        out: Matrix,
        scratch: Arena,
    ) -> Iterator[Launch]:
        """One that appends, one or two for all prompts, one or two for all single rows."""
        whole = self._whole(q, places, call)
        yield _append(whole, k, v)
        yield from _attend(whole, sinks, out, scratch)

    def of_projections(
        self,
        projections: Projections,
        places: KvPlaces,
        call: AttentionCall,
        sinks: Matrix | None,
        out: Matrix,
        scratch: Arena,
    ) -> Iterator[Launch]:
        """The same, the first of which prepares heads as well."""
        rows, columns = projections.qkv.rows, call.heads * places.cache.spec.key_dim
        q = Matrix(scratch.take(rows * columns * 4, "queries"), rows, columns)
        whole = self._whole(q, places, call)
        yield _prepare(whole, projections)
        yield from _attend(whole, sinks, out, scratch)

    def _whole(self, q: Matrix, places: KvPlaces, call: AttentionCall) -> _Call:
        per_kv_head = call.heads // places.cache.spec.kv_heads
        require_attention(places.cache.spec, per_kv_head)
        blocks = places.blocks()
        tables = self._of_batch(places, blocks, per_kv_head)
        return _Call(self._launcher, q, places, call, tables, blocks)

    def _of_batch(self, places: KvPlaces, blocks: list[Sequence[Buffer]], per_kv_head: int) -> BatchTables:
        if self._tables is None or self._tables[0] is not places.batch:
            wide = _wide(places.cache.spec)
            rows = launch_shapes.WIDE_ROWS if wide else launch_shapes.PREFILL_ROWS
            most = max(1, rows // per_kv_head)
            pages = [len(of_sequence) for of_sequence in blocks]
            self._tables = places.batch, batch_tables(places.batch, pages, most, places.pinned)
        return self._tables[1]


def _attend(whole: _Call, sinks: Matrix | None, out: Matrix, scratch: Arena) -> Iterator[Launch]:
    """What follows when keys and values are in their pages."""
    if whole.tables.prompts is not None:
        yield from _prefill(whole, whole.tables.prompts, sinks, out, scratch)
    if whole.tables.singles is not None:
        yield from _decode(whole, whole.tables.singles, sinks, out, scratch)


def _written(whole: _Call) -> list[Buffer]:
    """Blocks of the pages that the batch's new tokens lie in."""
    size, found = whole.spec.page_tokens, list[Buffer]()
    for sequence, blocks in zip(whole.places.batch.sequences, whole.blocks, strict=True):
        end = sequence.start + sequence.count
        found += blocks[sequence.start // size : -(-end // size)]
    return found


def _prepare(whole: _Call, projections: Projections) -> Launch:
    """Norms, clips and turns heads; queries go to `whole.q`, keys and values into their pages."""
    spec, places, tables, attention = whole.spec, whole.places, whole.tables, projections.spec
    qkv, written = projections.qkv, _written(whole)
    heads = attention.heads + 2 * spec.kv_heads
    shape = launch_shapes.heads_of_rows("prepare_qkv", heads, qkv.rows, spec.key_dim)
    turns = tuple(t.buffer for t in projections.tables) if projections.tables else (NULL, NULL)
    where = (places.table, tables.first_page, tables.positions)
    rotary = 2 * projections.tables[0].cols if projections.tables else 0
    numbers = (attention.heads, spec.kv_heads, spec.key_dim, rotary, int(attention.rope.interleaved))
    layout = (spec.page_tokens, places.offset, _code_group(spec), 0)
    norms = (projections.q_norm, projections.k_norm)
    pointers = (qkv.buffer, NULL, or_null(norms[0]), or_null(norms[1]), *turns, *where, whole.q.buffer)
    arguments = (*pointers, *numbers, *layout, projections.eps, float(attention.clip_qkv or 0.0))
    read = (*_if_there(norms[0]), *_if_there(norms[1]), *(t.buffer for t in projections.tables or ()))
    reads = (qkv.buffer, *read, *where, *written)
    return whole.launcher.make(shape, arguments, reads, (whole.q.buffer, *written))


def _append(whole: _Call, k: Matrix, v: Matrix | None) -> Launch:
    spec, places, tables = whole.spec, whole.places, whole.tables
    written = _written(whole)
    heads = (1 if v is None else 2) * spec.kv_heads
    shape = launch_shapes.heads_of_rows("append_kv", heads, k.rows, spec.key_dim)
    where = (places.table, tables.first_page, tables.positions)
    numbers = (spec.kv_heads, spec.key_dim, spec.page_tokens, places.offset, _code_group(spec), 0)
    arguments = (k.buffer, or_null(v), *where, *numbers)
    reads = (k.buffer, *_if_there(v), *where, *written)
    return whole.launcher.make(shape, arguments, reads, tuple(written))


def _prefill(
    whole: _Call, tiles: Tiles, sinks: Matrix | None, out: Matrix, scratch: Arena
) -> Iterator[Launch]:
    spec, heads, rows = whole.spec, whole.call.heads, whole.tables.prompt_rows
    sequence = whole.places.batch.sequences[tiles.sequences[0]]
    longest, blocks = sequence.start + sequence.count, tiles.count * spec.kv_heads
    if rows is None or whole.wide:
        splits = 1
    else:  # with no more scratch than single rows may take
        most = 2 * -(-SPLIT_BLOCKS // whole.groups) // rows.count
        splits = max(1, min(most, launch_shapes.prefill_splits(longest, blocks)))
    if splits == 1 or rows is None:
        yield _by_tiles(whole, tiles, 1, None, sinks, out)
        return
    partial = scratch.take(rows.count * heads * splits * (spec.value_dim + 2) * 4, "partial attention")
    yield _by_tiles(whole, tiles, splits, partial, None, out)
    yield _join(whole, rows, splits, partial, sinks, out)


def _by_tiles(
    whole: _Call, tiles: Tiles, splits: int, partial: Buffer | None, sinks: Matrix | None, out: Matrix
) -> Launch:
    """partial: as _by_rows."""
    spec = whole.spec
    arguments: tuple[Operand, ...] = (splits, float(whole.call.scale))
    if whole.wide:
        shape = whole.wide_shape(tiles, splits)
        arguments = (*arguments, *_group_argument(spec))
    else:
        shape = launch_shapes.attention_prefill(spec.dtype, spec.key_dim, spec.kv_heads, tiles.count, splits)
        first_row = whole.places.batch.sequences[tiles.sequences[0]].first_row
        arguments = (splits, first_row, float(whole.call.scale))
    return _attending(whole, tiles, shape, arguments, _Results(out, partial), sinks)


def _decode(
    whole: _Call, tiles: Tiles, sinks: Matrix | None, out: Matrix, scratch: Arena
) -> Iterator[Launch]:
    heads, dim = whole.call.heads, whole.spec.value_dim
    sequences = [whole.places.batch.sequences[i] for i in tiles.sequences]
    longest = max(s.start + s.count for s in sequences)
    splits = launch_shapes.attention_splits(longest, whole.groups * tiles.count)
    if splits == 1:
        yield _by_rows(whole, tiles, 1, _Results(out), sinks)
        return
    partial = scratch.take(tiles.count * heads * splits * (dim + 2) * 4, "partial attention")
    tickets = None if whole.wide else whole.launcher.tickets_for(whole.groups * tiles.count)
    if tickets is not None:
        yield _by_rows(whole, tiles, splits, _Results(out, partial, tickets), sinks)
        return
    yield _by_rows(whole, tiles, splits, _Results(out, partial), None)
    yield _join(whole, tiles, splits, partial, sinks, out)


def _join(
    whole: _Call, tiles: Tiles, splits: int, partial: Buffer, sinks: Matrix | None, out: Matrix
) -> Launch:
    """tiles: of one row each, in the order of what is partial."""
    heads, dim = whole.call.heads, whole.spec.value_dim
    shape = launch_shapes.attention_combine(heads, tiles.count, dim)
    reads = (partial, tiles.table, *_if_there(sinks), out.buffer)
    joined = (partial, tiles.table, or_null(sinks), out.buffer, dim, splits)
    return whole.launcher.make(shape, joined, reads, (out.buffer,))


def _by_rows(whole: _Call, tiles: Tiles, splits: int, results: _Results, sinks: Matrix | None) -> Launch:
    spec, scale, heads = whole.spec, float(whole.call.scale), whole.call.heads
    arguments: tuple[Operand, ...] = (splits, scale)
    if whole.wide:
        shape = whole.wide_shape(tiles, splits)
        arguments = (*arguments, *_group_argument(spec))
    else:
        geometry = (spec.dtype, spec.key_dim, heads, spec.kv_heads)
        shape = launch_shapes.attention_decode(*geometry, tiles.count, splits)
    return _attending(whole, tiles, shape, arguments, results, sinks)


@dataclass(frozen=True)
class _Results:
    """Where results go. partial: where splits leave their part; None: one split finishes the results.
    tickets: with which the last of the splits joins them; None: another kernel does."""

    out: Matrix
    partial: Buffer | None = None
    tickets: Buffer | None = None

    @property
    def finished(self) -> bool:
        """Whether `out` is written."""
        return self.partial is None or self.tickets is not None

    @property
    def written(self) -> tuple[Buffer, ...]:
        """What the kernel writes."""
        out = (self.out.buffer,) if self.finished else ()
        return (*out, *(buffer for buffer in (self.partial, self.tickets) if buffer is not None))

    @property
    def kept(self) -> tuple[Buffer, ...]:
        """What of that it does not write whole: rows of others stay."""
        out = (self.out.buffer,) if self.finished else ()
        return out if self.tickets is None else (*out, self.tickets)


def _attending(
    whole: _Call,
    tiles: Tiles,
    shape: launch_shapes.LaunchShape,
    last: tuple[Operand, ...],
    results: _Results,
    sinks: Matrix | None,
) -> Launch:
    """last: arguments behind those that all kernels of attention share."""
    inputs = (whole.q.buffer, whole.places.table, tiles.table)
    outputs: list[Operand] = [
        NULL if results.partial is None else results.partial,
        results.out.buffer if results.finished else NULL,
    ]
    if shape.file in WITH_TICKETS:
        outputs.append(NULL if results.tickets is None else results.tickets)
    arguments: tuple[Operand, ...] = (*inputs, or_null(sinks), *outputs, *whole.geometry(), *last)
    reads = (*inputs, *_if_there(sinks), *whole.seen(tiles), *results.kept)
    return whole.launcher.make(shape, arguments, reads, results.written, whole.macs(tiles))


def _if_there(matrix: Matrix | None) -> tuple[Buffer, ...]:
    return () if matrix is None else (matrix.buffer,)


def _wide(spec: KvSpec) -> bool:
    """Whether csrc/cuda/attention_wide.cuh computes attention over these pages."""
    return bool(spec.group) or spec.key_dim not in HEAD_DIMS


def _code_group(spec: KvSpec) -> int:
    """Elements that share an int8 scale, as csrc/cuda/prepare_heads.cu asks; 0: bf16."""
    return (spec.group or spec.key_dim) if spec.storage == "int8" else 0


def _group_argument(spec: KvSpec) -> tuple[int, ...]:
    """What attention_grouped takes more than attention_wide."""
    return (spec.group,) if spec.group else ()


def require_attention(spec: KvSpec, per_kv_head: int) -> None:
    """UnsupportedError when there is no kernel for these pages, whose heads so many query heads share."""
    tokens = launch_shapes.KV_TOKENS
    if spec.dtype not in PAGE_DTYPES or spec.page_tokens % tokens:
        raise UnsupportedError(
            f"attention on a GPU over {spec.dtype} pages of {spec.page_tokens} tokens",
            remedy=f"kv.dtype {' or '.join(PAGE_DTYPES)}, and kv.page_tokens a multiple of {tokens}",
        )
    if spec.value_in_key:
        known = (spec.key_dim, spec.value_dim) == LATENT_DIMS
    else:
        known = spec.key_dim in HEAD_DIMS + WIDE_DIMS and per_kv_head <= launch_shapes.PREFILL_ROWS
    if spec.group and (spec.value_in_key or spec.key_dim not in GROUPED_DIMS):
        raise UnsupportedError(
            f"attention on a GPU over {spec.dtype} pages of keys with {spec.key_dim} elements",
            remedy="kv.dtype int8 or bf16; groups go with heads of "
            f"{', '.join(map(str, GROUPED_DIMS))} elements, and not with latent attention",
        )
    if not known:
        kind = "latent keys" if spec.value_in_key else "heads"
        raise UnsupportedError(
            f"attention on a GPU with {kind} of {spec.key_dim} elements that {per_kv_head} query heads share",
            remedy="run this model with device.use: none",
        )
