"""What about memory nodes and memory costs speed on a machine, and what to do about it: for `strata doctor`.

Everything is read below `root`, so that tests can put up other machines. What cannot be read is said, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from strata.config.units import format_size
from strata.hardware.dmi import Channels, memory_channels
from strata.hardware.files import ROOT, format_cpu_list, read_count, read_text
from strata.hardware.numa import MemoryNode
from strata.hardware.profile import HardwareProfile

_THP = "sys/kernel/mm/transparent_hugepage"
_STALLING = ("always", "defer+madvise")
_UNEVEN = 1.5


@dataclass(frozen=True)
class Finding:
    """text: what was found, with its numbers. fix: what to do, "" where nothing helps or nothing is wrong."""

    text: str
    fix: str = ""

    def describe(self) -> str:
        """One line."""
        return f"{self.text}: {self.fix}" if self.fix else self.text


def findings(profile: HardwareProfile, root: Path = ROOT) -> list[Finding]:
    """Everything worth saying about this machine, in the order of what it usually costs."""
    several = sum(bool(node.memory) for node in profile.nodes) > 1
    return [
        *_far_device(profile),
        *_channels(memory_channels(root)),
        *(_balancing(root) if several else ()),
        *_cut_nodes(profile),
        *_empty_nodes(profile),
        *_governor(profile, root),
        *_huge_pages(root),
        *_threads(profile, root),
    ]


def _far_device(profile: HardwareProfile) -> Iterator[Finding]:
    device = profile.device
    node = next((node for node in profile.nodes if device and node.index == device.node), None)
    if device is None or node is None or len(profile.nodes) < 2 or (node.cpus and node.usable):
        return
    here = [other.index for other in profile.nodes if other.cpus and other.usable]
    yield Finding(
        f"{device.name} hangs from memory node {node.index}, of whose {node.online} CPUs this process may "
        f"use {len(node.cpus)}; it runs on node {format_cpu_list(here)}: every copy crosses the sockets",
        f"start it with numactl --cpunodebind={node.index} --membind={node.index}, or without numactl",
    )


def _balancing(root: Path) -> Iterator[Finding]:
    if (read_count(root / "proc/sys/kernel/numa_balancing") or 0) > 0:
        yield Finding(
            "NUMA balancing is on: the kernel unmaps pages to see who reads them, and moves them",
            "sysctl kernel.numa_balancing=0 (in /etc/sysctl.d to keep it)",
        )


def _governor(profile: HardwareProfile, root: Path) -> Iterator[Finding]:
    """Of the allowed CPUs' clocks; a virtual machine has no such files."""
    base = root / "sys/devices/system/cpu"
    names = [read_text(base / f"cpu{cpu}/cpufreq/scaling_governor") for cpu in profile.allowed_cpus]
    slow = Counter(name for name in names if name and name != "performance")
    for name, count in sorted(slow.items()):
        yield Finding(
            f"{count} of {len(names)} CPUs have the frequency governor {name}: the clock rises late",
            "cpupower frequency-set -g performance",
        )


def _huge_pages(root: Path) -> Iterator[Finding]:
    enabled = _chosen(read_text(root / _THP / "enabled"))
    defrag = _chosen(read_text(root / _THP / "defrag"))
    if enabled == "never":
        yield Finding(
            "transparent huge pages are off: weights and KV are walked in pages of 4 KiB",
            f"echo madvise > /{_THP}/enabled",
        )
    elif defrag in _STALLING[:1]:
        yield Finding(
            "the kernel compacts memory at every fault that wants a huge page (defrag is always): it stalls",
            f"echo madvise > /{_THP}/defrag",
        )
    elif enabled and defrag == "never":
        yield Finding(
            "the kernel makes no room for huge pages (defrag is never): memory that is cut up has none",
            f"echo madvise > /{_THP}/defrag",
        )


def _chosen(text: str | None) -> str:
    """The word in brackets: "always [madvise] never" -> "madvise"; "" where there is none."""
    return (text or "").partition("[")[2].partition("]")[0]


def _threads(profile: HardwareProfile, root: Path) -> Iterator[Finding]:
    """Second hardware threads: how many there are, and whether this process got pairs of them."""
    cores = sum(len(node.cores) for node in profile.nodes)
    cpus = len(profile.allowed_cpus)
    if cpus > cores:
        yield Finding(
            f"{cpus} hardware threads on {cores} cores: one per core is used, two read no more memory"
        )
    online = sum(node.online for node in profile.nodes)
    if 0 < cpus < online and 2 * cores == cpus:
        yield Finding(
            f"this process was given {cpus} of {online} CPUs, both hardware threads of each core",
            "give it as many cores instead: lscpu -e shows which CPUs share one",
        )


def _empty_nodes(profile: HardwareProfile) -> Iterator[Finding]:
    for node in profile.nodes:
        if not node.memory and node.cpus:
            yield Finding(
                f"memory node {node.index} has {len(node.cpus)} CPUs and no memory: they read from others",
                "put memory modules at this socket, or leave its CPUs out with host.numa",
            )
    sizes = {node.index: node.memory for node in profile.nodes if node.memory and node.online}
    if len(sizes) > 1 and max(sizes.values()) > _UNEVEN * min(sizes.values()):
        listed = ", ".join(f"node {index}: {format_size(size)}" for index, size in sizes.items())
        yield Finding(
            f"memory is spread unevenly ({listed}): the smaller node limits what can lie in equal shares",
            "move memory modules between the sockets",
        )


def _cut_nodes(profile: HardwareProfile) -> Iterator[Finding]:
    if len(profile.nodes) < 2:
        return
    for node in profile.nodes:
        if node.online and not node.cpus:
            yield Finding(_cut(node), "start it without taskset or numactl, or widen the cpuset")
        elif len(node.cpus) < node.online:
            yield Finding(
                _cut(node) + ", and a socket that is cut computes its share more slowly than a whole one",
                "give it whole sockets, or one socket only",
            )
        if not node.usable and node.memory:
            yield Finding(
                f"memory of node {node.index} ({format_size(node.memory)}) is not allowed here",
                "widen cpuset.mems, or start without numactl --membind",
            )


def _cut(node: MemoryNode) -> str:
    return f"this process may use {len(node.cpus)} of the {node.online} CPUs of node {node.index}"


def _channels(found: Channels) -> Iterator[Finding]:
    if found.unknown:
        yield Finding(f"memory channels are not known: {found.unknown}", found.fix)
        return
    if found.empty:
        names = ", ".join(found.empty)
        yield Finding(
            f"{len(found.empty)} of {found.total} memory channels have no module ({names}): "
            f"memory reads at {found.total - len(found.empty)}/{found.total} of its speed at most",
            "put a module into each channel",
        )
    for speed, count in found.slower.items():
        yield Finding(
            f"{count} memory modules run at {speed[0]} MT/s and are made for {speed[1]}",
            "look for the memory speed in the firmware's set-up; several modules per channel lower it",
        )
