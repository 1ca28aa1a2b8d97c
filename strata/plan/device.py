"""Device memory, taken in one piece and cut: static weights, expert slots and KV, workspace, reserve."""

from __future__ import annotations

from dataclasses import dataclass

from strata.errors import CapacityError
from strata.plan.activations import PIECES_BYTES, logit_row_elements
from strata.plan.footprint import Footprint
from strata.plan.options import PlanOptions
from strata.plan.plan import DevicePlan, Part
from strata.plan.speeds import Speeds
from strata.plan.stream import StreamRing, stream_ring

MIB = 1 << 20
DRIVER_BYTES = 512 * MIB
"""The driver's own: context, code, page tables; assumed."""
STAGED_LAYERS = 2
"""Layers of KV pages on the device while they live in host memory: one in use, one on its way."""


@dataclass(frozen=True)
class DeviceMemory:
    """Device memory before experts and KV are placed. room: bytes for them; fixed: what is there anyway.

    least_slots: without so many expert slots a token cannot be computed here.
    stream: the ring in the workspace.
    """

    total: int
    fixed: tuple[Part, ...]
    room: int
    least_slots: int
    stream: StreamRing


def device_memory(model: Footprint, memory: int, options: PlanOptions, speeds: Speeds) -> DeviceMemory:
    """`memory` bytes of a card, less what every run keeps there. speeds: of the card and its bus.

    Raises CapacityError when that and the least expert slots do not fit, when the card is smaller than
    device.memory, or when the workspace is capped below what a prefill chunk needs.
    """
    total = memory if options.device_memory is None else options.device_memory
    if total > memory:
        raise CapacityError(
            f"device.memory is {total} bytes, the card has {memory}", remedy="lower it, or leave it at auto"
        )
    ring = _ring(model, options, speeds)
    fixed = (
        Part("driver", DRIVER_BYTES, "assumed"),
        Part("reserve", options.reserve, "stays free"),
        Part("static weights", model.static, "attention, norms, routers, shared experts"),
        Part("head", model.head, "the embedding too" if model.tied else ""),
        Part("workspace", _workspace(model, options, ring), _workspace_note(model, options, ring)),
    )
    room = total - sum(part.nbytes for part in fixed)
    slots = _least_slots(model, options)
    if room < slots * model.expert_bytes:
        work = "engine.prefill_chunk" if options.workspace is None else "device.workspace"
        raise CapacityError(
            f"{total - room + slots * model.expert_bytes} bytes of device memory are needed for driver, "
            f"reserve, static weights, head, workspace and {slots} expert slots, {total} are there",
            remedy=f"lower device.reserve, {work} or the bits of convert.shared",
        )
    return DeviceMemory(total, fixed, room, slots, ring)


def _least_slots(model: Footprint, options: PlanOptions) -> int:
    """The experts of one token; exactly those asked for, when some were."""
    if options.slots is None:
        return min(model.top_k, model.expert_count)
    if not min(model.top_k, model.expert_count) <= options.slots <= model.expert_count:
        raise CapacityError(
            f"experts.slots is {options.slots}; a token takes {model.top_k} in each layer, the model has "
            f"{model.expert_count}",
            remedy=f"choose {model.top_k} to {model.expert_count}, or auto",
        )
    return options.slots


def workspace_bytes(model: Footprint, options: PlanOptions, ring: StreamRing) -> int:
    """Activations and logits of a step, and the ring that prefill streams through."""
    return -(-(_activations(model, options) + ring.places * model.expert_bytes) // MIB) * MIB


def _activations(model: Footprint, options: PlanOptions) -> int:
    """Of the largest step: a chunk of a prompt beside a token of everybody else, with everybody's logits."""
    rows = (options.chunk + options.logit_rows) * model.activation_bytes
    logits = options.logit_rows * 4 * logit_row_elements(model.hidden, model.vocab)
    return rows + logits + model.scratch_bytes + PIECES_BYTES


def _ring(model: Footprint, options: PlanOptions, speeds: Speeds) -> StreamRing:
    """As long as it should be, or as a capped workspace lets it be."""
    room = None if options.workspace is None else options.workspace - _activations(model, options)
    return stream_ring(model, speeds, options, room)


def _workspace(model: Footprint, options: PlanOptions, ring: StreamRing) -> int:
    needed = workspace_bytes(model, options, ring)
    if options.workspace is None or options.workspace >= needed:
        return needed if options.workspace is None else options.workspace
    raise CapacityError(
        f"a prefill chunk of {options.chunk} tokens beside {options.running} requests needs {needed} bytes "
        f"of workspace, device.workspace allows {options.workspace}",
        remedy="lower engine.prefill_chunk, or raise device.workspace",
    )


def _workspace_note(model: Footprint, options: PlanOptions, ring: StreamRing) -> str:
    streamed = f", {ring.buffers} x {ring.experts} experts on their way" if model.moe_layers else ""
    return f"{options.chunk} tokens{streamed}"


def staging_bytes(model: Footprint, context: int, requests: int) -> int:
    """KV pages of two layers of every request, as long as each may get."""
    return STAGED_LAYERS * model.pages(context, requests) * model.page_tokens * model.attention.new_bytes


def cut(model: Footprint, memory: DeviceMemory, options: PlanOptions, kv: Part, movable: int) -> DevicePlan:
    """Expert slots get what `kv` leaves. movable: bytes of `kv` that slots may have while KV is short."""
    most = model.expert_count if options.slots is None else options.slots
    slots = min(most, (memory.room - kv.nbytes) // max(1, model.expert_bytes))
    share = f"{slots} of {model.expert_count}"
    parts = [*memory.fixed, kv, Part("expert slots", slots * model.expert_bytes, share)]
    parts.append(Part("unused", memory.total - sum(part.nbytes for part in parts)))
    shared = memory.room - kv.nbytes + movable
    return DevicePlan(memory.total, tuple(parts), slots, most, model.expert_bytes, shared, memory.stream)
