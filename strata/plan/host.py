"""Host memory: what every run needs, the KV pool, and as many experts as fit, spread over the nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from strata.errors import CapacityError
from strata.hardware.numa import MemoryNode
from strata.hardware.profile import HardwareProfile
from strata.plan.footprint import Footprint
from strata.plan.options import PlanOptions
from strata.plan.plan import HostPlan, Part, SpreadBytes
from strata.plan.speeds import Spread, speeds_of

PROCESS_BYTES = 1 << 30
"""The interpreter, buffers, the system's own; assumed (`strata run` itself takes about 0.3 GiB)."""
PROCESS_SHARE = 4
"""On small machines that is a quarter of what is free: a plan must not refuse what would run."""
SPREADS: tuple[Spread, ...] = ("partition", "interleave", "replicate")


@dataclass(frozen=True)
class HostMemory:
    """Host memory before experts and KV are placed. room: bytes for them; fixed: what is there anyway."""

    total: int
    fixed: tuple[Part, ...]
    room: int


def host_memory(
    model: Footprint, hardware: HardwareProfile, options: PlanOptions, *, on_device: bool
) -> HostMemory:
    """What is free now, less what every run keeps there. CapacityError when that alone does not fit.

    With a device the host keeps the embedding, whose rows are looked up; without, all that tokens share.
    """
    total = min(hardware.available, hardware.memory)
    if options.host_memory is not None:
        if options.host_memory > hardware.memory:
            raise CapacityError(
                f"host.memory is {options.host_memory} bytes, this process may use {hardware.memory}",
                remedy="lower host.memory, or leave it at auto",
            )
        total = options.host_memory
    shared = model.static + model.embedding + (0 if model.tied else model.head)
    own = Part("shared weights", shared)
    if on_device:
        own = Part("embedding", 0 if model.tied else model.embedding)
    fixed: tuple[Part, ...] = (Part("process", min(PROCESS_BYTES, total // PROCESS_SHARE)), own)
    if options.draft is not None:
        fixed = (*fixed, Part("draft weights", options.draft.total, options.draft.name))
    room = total - sum(part.nbytes for part in fixed)
    if room < model.page_bytes:
        raise CapacityError(
            f"{total - room + model.page_bytes} bytes of host memory are needed for the process, {own.name} "
            f"and one KV page, {total} are free",
            remedy="free memory, raise the control group's limit, or choose a smaller convert.shared format",
        )
    return HostMemory(total, fixed, room)


def plan_host(
    model: Footprint,
    hardware: HardwareProfile,
    options: PlanOptions,
    memory: HostMemory,
    kv_bytes: int,
    threads: Mapping[int, int],
    draft_bytes: int = 0,
) -> HostPlan:
    """Experts into what `kv_bytes` of KV, and the draft's, leave; what does not fit stays on disk.

    threads: by node.

    Raises CapacityError when the asked spread does not fit and another one does, or cannot work from disk.
    """
    room = memory.room - kv_bytes - draft_bytes
    rooms = _node_rooms(hardware, memory, kv_bytes + draft_bytes)
    spreads = tuple(_spread(model, rooms, room, spread) for spread in SPREADS)
    even = options.numa and _even(hardware, threads)
    spread = _choose(model, rooms, room, spreads, options.spread, even)
    copies = len(rooms) if spread == "replicate" else 1
    held = min(model.expert_count, _capacity(rooms, room, spread) // max(1, model.expert_bytes))
    whole = held == model.expert_count
    one = model.expert_total if whole else min(held * model.expert_bytes, model.expert_total)
    nbytes = one * copies
    parts = [*memory.fixed, Part("experts", nbytes, f"{held} of {model.expert_count}")]
    copies = _copies(model, rooms, room - nbytes, options) if whole and spread == "interleave" else 0
    if copies:
        parts.append(Part("copies", copies * model.expert_bytes * len(rooms), f"{copies} on every node"))
    parts += [Part("KV pages", kv_bytes)] if kv_bytes else []
    parts += [Part("draft KV", draft_bytes)] if draft_bytes else []
    parts.append(Part("free", memory.total - sum(part.nbytes for part in parts)))
    return HostPlan(memory.total, tuple(parts), held, model.expert_total - one, spread, spreads, copies)


def _homes(hardware: HardwareProfile) -> tuple[MemoryNode, ...]:
    """Nodes that hold experts: with memory and processors of their own."""
    found = tuple(node for node in hardware.nodes if node.usable and node.cores and node.memory)
    return found or hardware.nodes[:1]


def _node_rooms(hardware: HardwareProfile, memory: HostMemory, kv_bytes: int) -> tuple[int, ...]:
    """Bytes for experts on each home node; the process, the KV pool and staging are at the device's node."""
    homes = _homes(hardware)
    wanted = hardware.device.node if hardware.device else homes[0].index
    first = wanted if wanted in {node.index for node in homes} else homes[0].index
    others = kv_bytes + sum(part.nbytes for part in memory.fixed)
    if len(homes) == 1:
        return (max(0, memory.room - kv_bytes),)
    return tuple(max(0, node.memory - (others if node.index == first else 0)) for node in homes)


def _capacity(rooms: tuple[int, ...], room: int, spread: Spread) -> int:
    """Bytes of experts that fit when spread so. room: of all nodes together, which a limit may make less."""
    if spread == "replicate":
        return min(min(rooms), room // len(rooms))
    return max(0, min(room, sum(rooms) if spread == "interleave" else min(rooms) * len(rooms)))


def _spread(model: Footprint, rooms: tuple[int, ...], room: int, spread: Spread) -> SpreadBytes:
    share = model.expert_total if spread == "replicate" else -(-model.expert_total // len(rooms))
    problem = ""
    if spread == "partition" and not _sliced(model, rooms):
        problem = f"experts have {model.slices} slices"
    elif _capacity(rooms, room, spread) < model.expert_total:
        problem = "does not fit"
    return SpreadBytes(spread, (share,) * len(rooms), problem)


def _sliced(model: Footprint, rooms: tuple[int, ...]) -> bool:
    """Whether every node can hold slices of its own of every expert."""
    return model.slices % len(rooms) == 0


def _copies(model: Footprint, rooms: tuple[int, ...], free: int, options: PlanOptions) -> int:
    """Experts that every node gets a copy of beside the interleaved ones. CapacityError for too many."""
    if len(rooms) < 2 or not options.numa or not options.copies:
        return 0
    least = min(rooms) - -(-model.expert_total // len(rooms))
    if options.copies > min(least, free // len(rooms)):
        raise CapacityError(
            f"host.copies is {options.copies} bytes on each of {len(rooms)} nodes, "
            f"{max(0, min(least, free // len(rooms)))} are free beside the experts",
            remedy="lower host.copies",
        )
    return min(model.expert_count, options.copies // max(1, model.expert_bytes))


def _even(hardware: HardwareProfile, threads: Mapping[int, int]) -> bool:
    """Whether nodes that work on equal shares are faster than threads that read everywhere.

    A node whose threads are few (a cpuset cut it) would keep the others waiting.
    """
    apart, mixed = (speeds_of(hardware, threads, spread) for spread in ("partition", "interleave"))
    nodes = sum(bool(count) for count in threads.values())
    return nodes == len(_homes(hardware)) and apart.host_read >= mixed.host_read


def _choose(
    model: Footprint,
    rooms: tuple[int, ...],
    room: int,
    spreads: tuple[SpreadBytes, ...],
    asked: Spread | None,
    even: bool,
) -> Spread:
    """What was asked; else slices at every node where they are, fit and are the faster way, else interleaved
    pages. What memory cannot hold whole passes through one cache, whose pages are interleaved."""
    fitting = [entry.spread for entry in spreads if not entry.problem]
    if asked is None:
        return "partition" if "partition" in fitting and even else "interleave"
    if asked in fitting or not (fitting or asked == "replicate"):
        return asked
    if asked == "partition" and not _sliced(model, rooms):
        raise CapacityError(
            f"host.numa partition needs a multiple of {len(rooms)} slices of every expert, there are "
            f"{model.slices}",
            remedy="choose host.numa interleave, or convert.slices where the experts' width allows it",
        )
    share = next(entry.nbytes[0] for entry in spreads if entry.spread == asked)
    raise CapacityError(
        f"host.numa {asked} needs {share} bytes on each of {len(rooms)} nodes, {min(rooms)} are free on the "
        f"fullest and {room} in all",
        remedy=f"host.numa {fitting[0]} fits" if fitting else "host.numa partition, with the rest on disk",
    )
