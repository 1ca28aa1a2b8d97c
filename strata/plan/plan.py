"""Plan: what was decided. A frozen value that is printed, obeyed by a run, and never rewritten."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from strata.core import KvDtype
from strata.plan.cost import Lane, Misses
from strata.plan.options import Tier
from strata.plan.speeds import Spread
from strata.plan.stream import StreamRing


@dataclass(frozen=True)
class Part:
    """A piece of a tier's memory, in bytes. note: one phrase for people."""

    name: str
    nbytes: int
    note: str = ""


@dataclass(frozen=True)
class NodeThreads:
    """The threads of one memory node, one per entry of `cpus`."""

    node: int
    cpus: tuple[int, ...]


@dataclass(frozen=True)
class SpreadBytes:
    """Bytes that one way of spreading the experts over the nodes puts on each. problem: why not, or ""."""

    spread: Spread
    nbytes: tuple[int, ...]
    problem: str = ""


@dataclass(frozen=True)
class DevicePlan:
    """Device memory. parts add up to `total` exactly, with the KV cache as full as it can get.

    slots: experts that fit then. While the cache is not full there are more, up to most_slots: the border
    between the two moves at run time. shared: bytes that slots and KV pages have together. stream: the ring
    for experts of prompts, which is in the workspace.
    """

    total: int
    parts: tuple[Part, ...]
    slots: int
    most_slots: int
    slot_bytes: int
    shared: int
    stream: StreamRing

    def slots_beside(self, kv_bytes: int) -> int:
        """Expert slots while KV pages take `kv_bytes` of `shared` (0 for pages in host memory)."""
        return min(self.most_slots, max(0, self.shared - kv_bytes) // max(1, self.slot_bytes))


@dataclass(frozen=True)
class HostPlan:
    """Host memory. parts add up to `total` exactly. in_memory: experts that stay in memory; disk_bytes: of
    those that do not. spread: how they lie over the nodes, one of `spreads`. copies: of the experts in memory
    the hottest ones, of which every node has a copy beside."""

    total: int
    parts: tuple[Part, ...]
    in_memory: int
    disk_bytes: int
    spread: Spread
    spreads: tuple[SpreadBytes, ...]
    copies: int = 0


@dataclass(frozen=True)
class KvPlan:
    """The KV cache. nbytes: its ceiling: all `pages`; context: tokens of each of `requests` requests."""

    tier: Tier
    dtype: KvDtype
    context: int
    requests: int
    page_tokens: int
    pages: int
    nbytes: int


@dataclass(frozen=True)
class DraftPlan:
    """The model that proposes tokens, at the host. nbytes: of all `pages` of its KV cache. context: tokens of
    a request that it can read, 0 where its KV cache does not fit.

    cpus: one per thread of its own, on the home node (the device's, else the first): a small model is slower
    across sockets. The experts' threads that stand there are idle while it proposes. (): the model's threads,
    where nothing is placed on nodes.
    """

    model: str
    weights: int
    context: int
    page_tokens: int
    pages: int
    nbytes: int
    cpus: tuple[int, ...] = ()


@dataclass(frozen=True)
class Prediction:
    """A predicted speed. tokens_per_second: with published routing; floor: with uniform routing.

    requests at `depth` tokens of context each; for prefill, `depth` is the prompt's length. busy: the share
    of the time that each lane works; bottleneck: the lane that works longest. hit_rate: on the device.
    """

    name: Literal["decode", "prefill"]
    requests: int
    depth: int
    tokens_per_second: float
    floor: float
    bottleneck: Lane
    busy: Mapping[Lane, float]
    hit_rate: float


@dataclass(frozen=True)
class Advice:
    """A change and what it is predicted to gain: factors of decode and prefill speed (1.1: 10 % faster)."""

    change: str
    decode: float
    prefill: float


@dataclass(frozen=True)
class Plan:
    """Everything a run needs to know before it starts.

    experts: routed ones of the whole model. device None: the host computes all. misses: where experts are
    computed that are not on the device.
    threads: by node, the device's first; bind False: on no particular CPUs. nodes: memory nodes that weights,
    KV and threads are placed on, in the same order; () = wherever the kernel puts them (one node, or numa
    off). chunk: prompt tokens per step, running: requests. routing: where the hit rates come from. notes: for
    the user; warnings: those on what was asked for and is not given.
    """

    model: str
    machine: str
    experts: int
    device: DevicePlan | None
    host: HostPlan
    kv: KvPlan
    misses: Misses
    chunk: int
    running: int
    threads: tuple[NodeThreads, ...]
    bind: bool
    predictions: tuple[Prediction, ...]
    routing: str
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    advice: tuple[Advice, ...] = ()
    nodes: tuple[int, ...] = ()
    draft: DraftPlan | None = None

    @property
    def teams(self) -> tuple[int, ...]:
        """For each thread the number of its node in `nodes`, where each reads slices or copies of its own."""
        if not self.nodes or (self.host.spread == "interleave" and not self.host.copies):
            return ()
        return tuple(self.nodes.index(node.node) for node in self.threads for _ in node.cpus)

    @property
    def cpus(self) -> tuple[int, ...]:
        """One CPU per thread."""
        return tuple(cpu for node in self.threads for cpu in node.cpus)

    def to_json(self) -> dict[str, Any]:
        """Plain data: bytes, tokens, tokens per second."""
        return dataclasses.asdict(self)
