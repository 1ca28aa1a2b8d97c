"""What a device must be able to compute: one method per op, each answering with launches.

This is the border between "when and on which bytes" (the hybrid backend) and "how" (a set of kernels). A set
for CUDA implements the same methods over compiled kernels; `host_kernels` does it without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from strata import core
from strata.backends.base import KvSpec
from strata.backends.hybrid.arrays import DeviceRoutes, DraftTables, Matrix, PackedOnDevice
from strata.backends.parts import AttentionCall, Gating
from strata.core import Batch
from strata.device.base import Buffer, Launch, Work
from strata.memory.regions import Arena
from strata.plan.spec import AttentionSpec, RouterSpec
from strata.store.formats import ExpertLayout

Launches = Iterable[Launch]


class HeadColumns(NamedTuple):
    """Elements `[first, first + size)` of each head of a matrix whose heads have `head` elements."""

    head: int
    first: int


class KvBlocks(Protocol):
    """KV pages as attention needs them, wherever they live between two layers."""

    spec: KvSpec

    def blocks(self, layer: int, sequence: core.Sequence) -> Sequence[Buffer]:
        """The layer's block of every page that holds a token of the sequence, in order, in device memory."""
        ...

    def offset(self, layer: int) -> int:
        """Bytes from where the pass's table says that a page begins to its block of this layer."""
        ...

    def begin_layer(self, layer: int) -> None:
        """Attention of the layer comes next."""
        ...

    def end_layer(self, layer: int) -> None:
        """Attention of the layer was launched."""
        ...


@dataclass(frozen=True)
class KvPlaces:
    """Where attention finds the pages of one layer. csrc/cpu/kv_cache.h says how a block is laid out.

    table: u64, in pinned memory that kernels may read: where the batch's pages begin, sequence after
    sequence; the layer's block of a page begins `offset` bytes behind that. pinned: see ExpertGroup; 40 bytes
    per row and five tables are counted for attention.
    """

    layer: int
    batch: Batch
    cache: KvBlocks
    table: Buffer
    pinned: Callable[[NDArray[Any], str], Buffer]

    @property
    def offset(self) -> int:
        """Bytes from where the table says that a page begins to its block of this layer."""
        return self.cache.offset(self.layer)

    def blocks(self) -> list[Sequence[Buffer]]:
        """Of each sequence, in order: what a launch must name (where the device checks nothing, need not)."""
        return [self.cache.blocks(self.layer, sequence) for sequence in self.batch.sequences]


@dataclass(frozen=True)
class ExpertGroup:
    """Experts that one call computes, ascending, and where their records lie on the device.

    ids i32 and weights f32 `[rows, top_k]`: the routes once more, in host memory, to make tables from. count:
    experts of the layer. pairs: how many (row, choice) pairs of the routes name one of these experts.
    pinned(values, what): a copy of a table in pinned memory, which kernels may read until the pass ends. They
    read it over the bus: what many blocks read belongs into scratch first, by a kernel, because a copy would
    wait behind the experts that are crossing.
    """

    layout: ExpertLayout
    gating: Gating
    count: int
    experts: Sequence[int]
    records: Sequence[Buffer]
    ids: NDArray[np.int32]
    weights: NDArray[np.float32]
    pairs: int
    pinned: Callable[[NDArray[Any], str], Buffer]


class SumInto(NamedTuple):
    """Where a group's sum goes: target = scale * (sum + rest), or += with `add`. rest: f32 of the target's
    shape or None, such as the shared expert's output."""

    target: Matrix
    add: bool
    scale: float = 1.0
    rest: Matrix | None = None


@dataclass(frozen=True)
class Projections:
    """Queries, keys and values as one product leaves them, qkv `[rows, (heads + 2 kv_heads) * head_dim]`,
    and what happens to them before attention: see Backend.prepare_heads. tables: cos and sin."""

    qkv: Matrix
    spec: AttentionSpec
    q_norm: Matrix | None
    k_norm: Matrix | None
    tables: tuple[Matrix, Matrix] | None
    eps: float


class NormOf(NamedTuple):
    """An RMSNorm before a product: f32 [1, columns]."""

    weight: Matrix
    eps: float


class RouterOnDevice(NamedTuple):
    """A router's weights, see `parts.Router`, and where its choice goes."""

    spec: RouterSpec
    norm: NormOf
    matrix: Matrix
    bias: Matrix | None
    select_bias: Matrix | None
    routes: DeviceRoutes


class KernelSet(Protocol):
    """Launches of every op. Rules for all methods:

    Each launch names exactly the ranges that it reads and writes, and work_of's Work or a better one. `out`
    is written whole; what a method calls "in place" is read and written. scratch: memory that the launches of
    one call may use between them; the caller gives back what is taken. Arguments have been checked. Results
    may differ from the CPU's by rounding, but not from run to run, nor by what other rows share the batch.
    """

    def use_tickets(self, tickets: Buffer) -> None:
        """Device memory of this set: u32 that are 0 before and after each of its launches, by which blocks
        count how many of them are done. Before the first launch."""
        ...

    def rms_norm(self, x: Matrix, weight: Matrix, eps: float, out: Matrix) -> Launches:
        """As Backend.rms_norm: groups of weight.cols elements."""
        ...

    def add(self, residual: Matrix, branch: Matrix, scale: float) -> Launches:
        """residual += scale * branch, in place. branch may lie in pinned memory."""
        ...

    def scale_by_sigmoid(self, x: Matrix, gate: Matrix) -> Launches:
        """x *= sigmoid(gate [rows, 1]), in place."""
        ...

    def linear(
        self,
        x: Matrix,
        weight: PackedOnDevice,
        bias: Matrix | None,
        out: Matrix,
        scratch: Arena,
        norm: NormOf | None = None,
    ) -> Launches:
        """As Backend.linear, of x or of what the norm makes of it."""
        ...

    def add_linear(
        self,
        residual: Matrix,
        x: Matrix,
        weight: PackedOnDevice,
        bias: Matrix | None,
        scale: float,
        scratch: Arena,
    ) -> Launches:
        """residual += scale * linear(x), in place."""
        ...

    def plain_linear(self, x: Matrix, matrix: Matrix, bias: Matrix | None, out: Matrix) -> Launches:
        """As Backend.plain_linear."""
        ...

    def head_linear(
        self, x: Matrix, weight: PackedOnDevice, heads: int, out: Matrix, scratch: Arena
    ) -> Launches:
        """As Backend.head_linear."""
        ...

    def take_rows(self, x: Matrix, rows: Matrix, out: Matrix) -> Launches:
        """out[i] = x[rows[i]]; rows is i32 [1, n]."""
        ...

    def copy_heads(
        self, x: Matrix, source: HeadColumns, out: Matrix, target: HeadColumns, heads: int, size: int
    ) -> Launches:
        """`size` elements of each head from `source` of x to `target` of out; the rest of out stays."""
        ...

    def prepare_heads(
        self,
        x: Matrix,
        heads: int,
        tables: tuple[Matrix, Matrix] | None,
        spec: AttentionSpec,
        norm: Matrix | None,
        eps: float,
    ) -> Launches:
        """As Backend.prepare_heads, in place. tables: cos, sin [rows, rotary_dim / 2]; None: no rotation."""
        ...

    def attention(
        self,
        q: Matrix,
        k: Matrix,
        v: Matrix | None,
        places: KvPlaces,
        call: AttentionCall,
        sinks: Matrix | None,
        out: Matrix,
        scratch: Arena,
    ) -> Launches:
        """As Backend.attention. `call.sinks` is the backend's own handle: use `sinks`."""
        ...

    def attention_of(
        self,
        projections: Projections,
        places: KvPlaces,
        call: AttentionCall,
        sinks: Matrix | None,
        out: Matrix,
        scratch: Arena,
    ) -> Launches:
        """prepare_heads of queries and keys (values are only clipped), then attention; see
        `attention_steps` for a set that does one after the other."""
        ...

    def route(
        self, logits: Matrix, spec: RouterSpec, select_bias: Matrix | None, routes: DeviceRoutes
    ) -> Launches:
        """As Backend.route; ids of a row best first, ties to the lowest index."""
        ...

    def norm_and_route(
        self,
        x: Matrix,
        hidden: Matrix | None,
        router: RouterOnDevice,
        scratch: Arena,
    ) -> Launches:
        """The router's choice for its norm of x, which becomes `hidden` where that is wanted.

        See `route_steps` for a set that does one after the other."""
        ...

    def head_topk(
        self, logits: Matrix, columns: int, values: Matrix, ids: Matrix, scratch: Arena
    ) -> Launches:
        """The values.cols best of the first `columns` of each row, best first, equal ones to the lowest id:
        values f32, ids i32. NaN counts as the largest f32; where a row has fewer above -3e38, ids are -1."""
        ...

    def verify_draft(
        self, values: Matrix, ids: Matrix, drafts: DraftTables, accepted: Matrix, tokens: Matrix
    ) -> Launches:
        """What `Backend.verify_drafts` says of each sequence, out of what head_topk found; -1: undecided."""
        ...

    def ffn(
        self,
        x: Matrix,
        gate_up: PackedOnDevice,
        down: PackedOnDevice,
        gating: Gating,
        out: Matrix,
        scratch: Arena,
    ) -> Launches:
        """As Backend.ffn."""
        ...

    def add_ffn(
        self,
        residual: Matrix,
        x: Matrix,
        gate_up: PackedOnDevice,
        down: PackedOnDevice,
        gating: Gating,
        scale: float,
        scratch: Arena,
        norm: NormOf | None = None,
    ) -> Launches:
        """residual += scale * ffn(x), in place; norm: as for `linear`."""
        ...

    def experts(
        self, x: Matrix, routes: DeviceRoutes, group: ExpertGroup, into: SumInto, scratch: Arena
    ) -> Launches:
        """The sum over the group's experts, ascending, of weight * expert(x)."""
        ...


def work_of(reads: Iterable[Buffer], writes: Iterable[Buffer], macs: int = 0) -> Work:
    """Every range is moved once: what a kernel does at least."""
    return Work(sum(buffer.nbytes for buffer in (*reads, *writes)), macs)
