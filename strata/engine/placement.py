"""Threads and memory of a run on the machine's memory nodes: put there, and looked at afterwards."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.hardware.cpu import topology
from strata.hardware.files import format_cpu_list
from strata.hardware.numa import memory_nodes
from strata.hardware.numa_calls import OUTER_POLICY, NumaCalls, Policy
from strata.hardware.page_check import PageCheck, PlacedRange, check_pages
from strata.hardware.placement import interleave
from strata.memory.heat import Heat
from strata.memory.host_arena import System
from strata.memory.node_copies import NodeCopies
from strata.memory.node_experts import NodeExperts
from strata.plan.plan import Plan
from strata.store.formats import ExpertLayout
from strata.store.reader import Store

_FIRST_LOOKS = (1, 16)
_LOOK_EVERY = 1024
"""Steps between two looks: at 256 pages per range one takes about 0.2 ms (two ranges, 2 cores, KVM)."""
_OWN_CHOICE = (Policy.DEFAULT, Policy.LOCAL, Policy.BIND)


class NumaSystem:
    """What placing asks of the machine. Tests give one that has other nodes."""

    def __init__(self) -> None:
        self.calls = NumaCalls()
        self.arenas = System()
        self.outer = OUTER_POLICY

    def stay_on(self, cpus: Sequence[int]) -> None:
        """Keep the calling thread, and threads that it starts, on these CPUs."""
        os.sched_setaffinity(0, cpus)

    def prefer(self, node: int) -> None:
        """Take the calling thread's new pages from a node while it has some."""
        self.calls.set_policy((node,), Policy.PREFERRED)

    def interleave(self, nodes: Sequence[int]) -> None:
        """Take them from these nodes in turn: libnuma's way, or the kernel's own where it is missing."""
        if interleave(nodes):
            self.calls.set_policy(nodes, Policy.INTERLEAVE)

    def free(self) -> dict[int, int]:
        """Bytes that every node has left."""
        return {node.index: node.free for node in memory_nodes(topology())}


class Placement:
    """What a run has placed, and what was found when it was looked at.

    nodes: () = nothing is bound. problem: why memory lies where the kernel puts it although it was to be
    bound. experts: with slices or copies on every node, if any. checks: the latest, one per range; moved:
    pages brought home so far. A run with nothing to check costs nothing: nobody watches it.
    """

    def __init__(
        self,
        nodes: tuple[int, ...],
        system: NumaSystem,
        experts: NodeExperts | NodeCopies | None = None,
        problem: str = "",
    ) -> None:
        self.nodes = nodes
        self.system = system
        self.experts = experts
        self.problem = problem
        self.checks: tuple[PageCheck, ...] = ()
        self.moved = 0
        self._others: list[PlacedRange] = []
        self._steps = 0

    def know(self, name: str, memory: NDArray[np.uint8] | None, nodes: tuple[int, ...]) -> None:
        """Memory that was bound elsewhere, u8, and should lie on `nodes`; None: there is none."""
        if memory is not None and memory.nbytes and nodes and not self.problem:
            self._others.append(PlacedRange(name, memory.ctypes.data, memory.nbytes, nodes))

    def ranges(self) -> list[PlacedRange]:
        """Memory that should lie on certain nodes."""
        return [*(self.experts.ranges() if self.experts is not None else ()), *self._others]

    def check(self, *, move: bool = False) -> list[PageCheck]:
        """Ask the kernel where sampled pages lie; move: bring misplaced ones home."""
        found = [check_pages(entry, self.system.calls, move=move) for entry in self.ranges()]
        self.checks = tuple(found)
        self.moved += sum(check.moved for check in found)
        return found

    def watch(self, observers: list[Callable[[Any], None]]) -> None:
        """Look after the first of an engine's steps, when pages have been touched, and now and then
        afterwards."""
        if self.ranges():
            observers.append(self._after_step)

    def _after_step(self, _: object) -> None:
        self._steps += 1
        if self._steps not in _FIRST_LOOKS and self._steps % _LOOK_EVERY:
            return
        for check in self.check(move=True):
            if check.wrong:
                warnings.warn(f"memory nodes: {check.describe()}", RuntimeWarning, stacklevel=2)

    def describe(self) -> str:
        """A line for the start: which nodes, and what was found there; "" where nothing is bound."""
        if not self.nodes:
            return self.problem
        text = f"memory node{'s' * (len(self.nodes) > 1)} {', '.join(map(str, self.nodes))}"
        if self.experts is not None:
            text += f", {self.experts.placed} experts there so far"
        return "; ".join(filter(None, (text, self.problem, *(c.describe() for c in self.checks))))


def settle(plan: Plan, system: NumaSystem) -> str:
    """The calling thread to the device's node (the first one), and the policy for its new pages.

    With a device, KV pages, staging and what is page-locked belong to its node. Without, all threads read
    them, and the shared weights: they are spread. A policy that the process was started with is obeyed: then
    nothing is asked, and the reason is returned; else "", or why the kernel refused.
    """
    if not plan.nodes:
        return ""
    mode, nodes = system.outer
    if mode not in _OWN_CHOICE:
        asked = f"numactl asked for {mode.name.lower()} on nodes {format_cpu_list(nodes)}"
        return f"{asked}: memory is left to that"
    try:
        if plan.bind:
            system.stay_on(_home_cpus(plan))
        if plan.device is not None or len(plan.nodes) == 1:
            system.prefer(plan.nodes[0])
        else:
            system.interleave(plan.nodes)
    except OSError as error:
        return f"nodes {format_cpu_list(plan.nodes)} are wanted, but the kernel refused: {error.strerror}"
    return ""


def _home_cpus(plan: Plan) -> tuple[int, ...]:
    return next(node.cpus for node in plan.threads if node.node == plan.nodes[0])


def place(
    plan: Plan, store: Store, system: NumaSystem | None = None, *, slices: bool, heat: Heat | None = None
) -> Placement:
    """Settle the calling thread, and make room for expert slices on every node where the plan says so.

    slices: whether the backend computes them by node. heat: which experts are hot. CapacityError when a node
    has no room for what it is to hold.
    """
    system = system or NumaSystem()
    problem = settle(plan, system)
    if problem:
        warnings.warn(problem, RuntimeWarning, stacklevel=3)
    if problem or not slices or not plan.teams or plan.host.disk_bytes or not store.manifest.layers:
        return Placement(plan.nodes, system, problem=problem)
    layouts = {layer: record.layout() for layer, record in store.manifest.layers.items()}
    experts = _experts(plan, store, layouts, system, heat)
    return Placement(plan.nodes, system, experts)


def _experts(
    plan: Plan, store: Store, layouts: Mapping[int, ExpertLayout], system: NumaSystem, heat: Heat | None
) -> NodeExperts | NodeCopies:
    """Slices, copies of all, or copies of the hottest."""
    count, free = store.manifest.expert_count, system.free()
    if plan.host.spread == "partition":
        return NodeExperts(layouts, count, plan.nodes, store.expert, free=free, system=system.arenas)
    hot = None
    if plan.host.spread == "interleave":
        hot = heat.warm_order(plan.host.copies) if heat is not None else []
    return NodeCopies(layouts, count, plan.nodes, store.expert, free=free, system=system.arenas, hot=hot)
