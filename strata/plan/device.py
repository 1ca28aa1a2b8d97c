"""Device memory, taken in one piece and cut: static weights, expert slots and KV, workspace, reserve."""

from __future__ import annotations

from dataclasses import dataclass

from strata.errors import CapacityError
from strata.plan.footprint import Footprint
from strata.plan.options import PlanOptions
from strata.plan.plan import DevicePlan, Part

MIB = 1 << 20
DRIVER_BYTES = 512 * MIB
"""The driver's own: context, code, page tables; assumed."""
STREAM_EXPERTS = 4
"""Experts in each of the two buffers through which prefill streams layers; assumed."""
STAGED_LAYERS = 2
"""Layers of KV pages on the device while they live in host memory: one in use, one on its way."""


@dataclass(frozen=True)
class DeviceMemory:
    """Device memory before experts and KV are placed. room: bytes for them; fixed: what is there anyway.

    least_slots: without so many expert slots a token cannot be computed here.
    """

    total: int
    fixed: tuple[Part, ...]
    room: int
    least_slots: int


def device_memory(model: Footprint, memory: int, options: PlanOptions) -> DeviceMemory:
    """`memory` bytes of a card, less what every run keeps there.

    Raises CapacityError when that and the least expert slots do not fit, when the card is smaller than
    device.memory, or when the workspace is capped below what a prefill chunk needs.
    """
    total = memory if options.device_memory is None else options.device_memory
    if total > memory:
        raise CapacityError(
            f"device.memory is {total} bytes, the card has {memory}", remedy="lower it, or leave it at auto"
        )
    fixed = (
        Part("driver", DRIVER_BYTES, "assumed"),
        Part("reserve", options.reserve, "stays free"),
        Part("static weights", model.static, "attention, norms, routers, shared experts"),
        Part("head", model.head, "the embedding too" if model.tied else ""),
        Part("workspace", _workspace(model, options), f"{options.chunk} tokens"),
    )
    room = total - sum(part.nbytes for part in fixed)
    slots = _least_slots(model, options)
    if room < slots * model.expert_bytes:
        raise CapacityError(
            f"{total - room + slots * model.expert_bytes} bytes of device memory are needed for driver, "
            f"reserve, static weights, head, workspace and {slots} expert slots, {total} are there",
            remedy="lower device.reserve, engine.prefill_chunk or the bits of convert.shared",
        )
    return DeviceMemory(total, fixed, room, slots)


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


def workspace_bytes(model: Footprint, options: PlanOptions) -> int:
    """Activations of a chunk, logits of every request, and the two buffers that prefill streams through."""
    activations = options.chunk * model.activation_bytes + options.requests * model.vocab * 4
    buffers = 2 * STREAM_EXPERTS * model.expert_bytes
    return -(-(activations + buffers) // MIB) * MIB


def _workspace(model: Footprint, options: PlanOptions) -> int:
    needed = workspace_bytes(model, options)
    if options.workspace is None or options.workspace >= needed:
        return needed if options.workspace is None else options.workspace
    raise CapacityError(
        f"a prefill chunk of {options.chunk} tokens and {options.requests} requests need {needed} bytes of "
        f"workspace, device.workspace allows {options.workspace}",
        remedy="lower engine.prefill_chunk, or raise device.workspace",
    )


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
    return DevicePlan(memory.total, tuple(parts), slots, most, model.expert_bytes, shared)
