"""This machine as a HardwareProfile, from the system's files; speeds that were not measured are marked so."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from strata.config.units import format_size
from strata.hardware.cgroup import MemoryLimit, memory_limit
from strata.hardware.cpu import CpuTopology, topology
from strata.hardware.files import ROOT, format_cpu_list
from strata.hardware.gpus import BY_PCI_ID
from strata.hardware.host_memory import available_bytes
from strata.hardware.numa import MemoryNode, memory_nodes
from strata.hardware.nvml import Card
from strata.hardware.pci import LANE_BYTES, Link, PciDevice, graphics_cards
from strata.hardware.profile import DeviceProfile, HardwareProfile, Processor, Rate

LINK_SHARE = 12 / 15.75
"""Of a link's nominal speed; field report A: ~12 GB/s over PCIe 3.0 x16. Assumed to hold for other links."""
NODE_READ = Rate(20e9, "assumed")
"""Of one memory node before it is measured: two channels of DDR4-2400 deliver about that much."""
UNKNOWN_READ, UNKNOWN_MACS = 300e9, 20e12
"""Of a card that tells neither clocks nor cores: a small one's."""
CORE_MACS = {"avx512": Rate(154e9, "assumed"), "avx2": Rate(110e9, "assumed")}
"""Of one core before it is measured: half of what the products of 512 tokens gave on two cloud cores."""


def probe(
    processor: str, isa: str, root: Path = ROOT, allowed: Sequence[int] | None = None
) -> HardwareProfile:
    """The machine below `root`. processor, isa: what cpuid says, which no file does.

    allowed: CPUs of this process (None: asked from the system).
    """
    machine = topology(root, allowed)
    nodes = memory_nodes(machine, root)
    limit = memory_limit(root)
    cards = graphics_cards(root)
    device, warnings = _device(cards, nodes)
    return HardwareProfile(
        name="this machine",
        processor=Processor(processor, isa, CORE_MACS.get(isa, CORE_MACS["avx2"])),
        nodes=nodes,
        node_read=tuple(NODE_READ for _ in nodes),
        available=available_bytes(root),
        memory_limit=None if limit is None else limit.bytes,
        quota=machine.quota,
        device=device,
        warnings=(*_limit_warnings(limit), *_node_warnings(machine, nodes), *warnings),
    )


def card_profile(card: Card, machine: HardwareProfile) -> DeviceProfile:
    """A card whose datasheet is not known, from what its driver says; rates are assumed.

    Memory that moves twice per clock, two 16-bit multiply-adds per core and clock (GeForce cards; the
    A100 and its successors have more).
    """
    link = Link(card.generation, card.width) if card.generation in LANE_BYTES and card.width else Link(3, 16)
    copies = Rate(LINK_SHARE * link.bandwidth, "assumed")
    read = 2 * card.memory_hz * card.bus_bits / 8 or UNKNOWN_READ
    macs = 2 * card.cores * card.core_hz or UNKNOWN_MACS
    node, rates = machine.nodes[0].index, (Rate(read, "assumed"), Rate(macs, "assumed"))
    return DeviceProfile(card.name, card.memory, node, link, *rates, copies, copies)


def _limit_warnings(limit: MemoryLimit | None) -> list[str]:
    if limit is None:
        return []
    return [f"memory is limited to {format_size(limit.bytes)} ({limit.bytes} bytes) by {limit.path}"]


def _node_warnings(machine: CpuTopology, nodes: tuple[MemoryNode, ...]) -> list[str]:
    found = [f"node {node.index} tells no memory size" for node in nodes if node.usable and not node.memory]
    idle = [node for node in nodes if node.usable and not node.cpus and node.memory]
    for node in idle:
        found.append(
            f"node {node.index} has memory but no CPU that this process may use (allowed: "
            f"{format_cpu_list(machine.allowed)}): its memory is read from other nodes"
        )
    shut = [node for node in nodes if not node.usable and node.cpus]
    for node in shut:
        found.append(f"node {node.index} has CPUs but its memory is not allowed here (cpuset.mems)")
    return found


def _device(
    cards: tuple[PciDevice, ...], nodes: tuple[MemoryNode, ...]
) -> tuple[DeviceProfile | None, list[str]]:
    """The first card with a datasheet."""
    known = [card for card in cards if card.device in BY_PCI_ID]
    warnings = [
        f"the card {card.address} (PCI id 10de:{card.device or '?'}) is not known here: it stays idle"
        for card in cards
        if card not in known
    ]
    warnings += [f"a second card, {card.address}, stays idle: one is used" for card in known[1:]]
    if not known:
        return None, warnings
    warnings += _link_warnings(known[0])
    node = _device_node(known[0], nodes)
    if node is None:
        node = nodes[0].index
        warnings.append(f"{known[0].address} tells no memory node: node {node} is assumed")
    return _profile(known[0], node), warnings


def _link_warnings(card: PciDevice) -> list[str]:
    if card.link is None:
        return [f"{card.address} tells no link speed: PCIe 3.0 x16 is assumed"]
    lanes = card.link.width
    slow = f"{card.address} has {lanes} PCIe lanes of 16: copies take {16 / lanes:g} times as long"
    return [slow] if lanes < 16 else []


def _device_node(card: PciDevice, nodes: tuple[MemoryNode, ...]) -> int | None:
    known = [node.index for node in nodes]
    return known[0] if len(known) == 1 else card.node if card.node in known else None


def _profile(card: PciDevice, node: int) -> DeviceProfile:
    sheet = BY_PCI_ID[card.device]
    link = card.link or Link(3, 16)
    copies = Rate(LINK_SHARE * link.bandwidth, "assumed")
    read, macs = Rate(sheet.read, "datasheet"), Rate(sheet.macs, "datasheet")
    return DeviceProfile(sheet.name, sheet.memory, node, card.link, read, macs, copies, copies)
