"""Which memory nodes a run uses: of what was asked, what this process may use; and what that leaves out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from strata.hardware.cpu import CpuChoice, CpuTopology, NumaNode, choose_cpus
from strata.hardware.files import format_cpu_list
from strata.hardware.numa import MemoryNode
from strata.hardware.profile import HardwareProfile
from strata.plan.options import PlanOptions


@dataclass(frozen=True)
class NodeChoice:
    """hardware: with nothing to use on nodes that were not asked for. threads: CPUs by node, the device's
    node first. nodes: those that threads and memory are bound to, in that order; () = none are.
    """

    hardware: HardwareProfile
    threads: dict[int, tuple[int, ...]]
    nodes: tuple[int, ...]
    bind: bool
    warnings: tuple[str, ...]

    @property
    def counts(self) -> dict[int, int]:
        """Threads of each node."""
        return {node: len(cpus) for node, cpus in self.threads.items()}


def choose_nodes(hardware: HardwareProfile, options: PlanOptions) -> NodeChoice:
    """What the options make of the machine.

    Never an error: a list that names nothing usable leaves threads and memory unbound, with one warning.
    """
    warnings: list[str] = []
    used, numa = hardware, options.numa
    if options.nodes is not None and numa:
        used = _only(hardware, options.nodes)
        lost = set(options.nodes) - {node.index for node in used.nodes if node.cpus and node.usable}
        if len(lost) == len(set(options.nodes)):
            used, numa = hardware, False
            warnings.append(_nothing_left(hardware, options.nodes))
        elif lost:
            warnings.append(_left_out(hardware, lost))
    chosen = choose_cpus(options.threads, machine=_topology(used))
    threads = _by_node(used, chosen)
    homes = _homes(used, threads) if numa else ()
    several = len(homes) > 1
    warnings += [*chosen.warnings, *(_far_device(used, homes) if numa else ())]
    one_asked = bool(options.nodes) and numa and len(hardware.nodes) > 1
    bound = homes if several or one_asked else ()
    return NodeChoice(used, threads, bound, (chosen.bind and numa) or bool(bound), tuple(warnings))


def _topology(hardware: HardwareProfile) -> CpuTopology:
    nodes = tuple(NumaNode(node.index, node.cpus) for node in hardware.nodes)
    cores = tuple(sorted(cpu for node in hardware.nodes for cpu in node.cores))
    return CpuTopology(hardware.allowed_cpus, cores, nodes, hardware.quota)


def _only(hardware: HardwareProfile, nodes: tuple[int, ...]) -> HardwareProfile:
    """The machine without the CPUs and the memory of other nodes."""

    def keep(node: MemoryNode) -> MemoryNode:
        if node.index in nodes:
            return node
        return dataclasses.replace(node, cpus=(), cores=(), usable=False)

    return dataclasses.replace(hardware, nodes=tuple(keep(node) for node in hardware.nodes))


def _by_node(hardware: HardwareProfile, chosen: CpuChoice) -> dict[int, tuple[int, ...]]:
    """Threads of each node, the device's node first: the calling thread is the first of all."""
    device = hardware.device
    first = device.node if device else None
    ordered = sorted(hardware.nodes, key=lambda node: node.index != first)
    return {node.index: tuple(cpu for cpu in chosen.cpus if cpu in node.cpus) for node in ordered}


def _homes(hardware: HardwareProfile, threads: dict[int, tuple[int, ...]]) -> tuple[int, ...]:
    """Nodes with threads and memory."""
    memory = {node.index for node in hardware.nodes if node.usable and node.memory}
    return tuple(node for node, cpus in threads.items() if cpus and node in memory)


def _nothing_left(hardware: HardwareProfile, asked: tuple[int, ...]) -> str:
    there = format_cpu_list(node.index for node in hardware.nodes if node.cpus and node.usable)
    return (
        f"host.numa names nodes {format_cpu_list(asked)}, this process may use {there or 'none'} "
        f"(CPUs {format_cpu_list(hardware.allowed_cpus)}): threads and memory are not bound"
    )


def _left_out(hardware: HardwareProfile, lost: set[int]) -> str:
    there = format_cpu_list(node.index for node in hardware.nodes if node.cpus and node.usable)
    return f"host.numa names nodes {format_cpu_list(lost)}, this process may use {there}: those are left out"


def _far_device(hardware: HardwareProfile, homes: tuple[int, ...]) -> Iterator[str]:
    """The device's node is not among those that may be used: numactl, taskset or a cpuset took it away."""
    device = hardware.device
    node = next((n for n in hardware.nodes if device and n.index == device.node), None)
    if device is None or node is None or node.index in homes or not homes:
        return
    plural = "s" * (len(homes) > 1)
    yield (
        f"{device.name} hangs from memory node {node.index}, this process runs on node{plural} "
        f"{format_cpu_list(homes)} (CPUs {format_cpu_list(hardware.allowed_cpus)}, {len(node.cpus)} of node "
        f"{node.index}): every copy crosses the sockets. Give it that node's CPUs and memory: numactl "
        f"--cpunodebind={node.index} --membind={node.index}, or none at all"
    )
