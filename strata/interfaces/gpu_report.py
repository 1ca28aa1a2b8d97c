"""The graphics card's part of `strata doctor`: what is there, what is missing, and what brings it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from strata.config import format_size
from strata.device.link_speed import LinkSpeed, link_speed
from strata.errors import StrataError
from strata.hardware.gpu_stack import CUPY, NVRTC, OLDEST_DRIVER, gpu_stack
from strata.hardware.nvml import Card, link_generation, load_nvml
from strata.hardware.pci import LANE_BYTES

NEEDED = f"a card of compute capability 8.0 or more, driver {OLDEST_DRIVER} or newer, {CUPY} and {NVRTC}"


def examine_gpu(*, measure: bool) -> dict[str, Any]:
    """The stack as plain data. "link": copy speeds, measured on request where a card can be used, else None;
    "link_problem": why that failed, or ""."""
    stack = gpu_stack()
    link, problem = None, ""
    if measure and stack.usable:
        try:
            link = measured_link()
        except StrataError as error:
            problem = str(error)
    facts = {**stack.to_json(), "usable": stack.usable}
    return {**facts, "link": link and dataclasses.asdict(link), "link_problem": problem}


def measured_link() -> LinkSpeed:
    """Of the first card, which must be usable."""
    from strata.device.cuda import CudaDevice

    device, library = CudaDevice(), load_nvml()
    try:
        return link_speed(device, lambda: link_generation(library))
    finally:
        device.close()


def describe_gpu(facts: dict[str, Any]) -> Iterator[str]:
    """Lines for people. Without a card there is one."""
    if not facts["pci"] and not facts["driver"]:
        yield f"none; device.use: cuda would need {NEEDED}"
        return
    packages = ", ".join(f"{name} {facts[key] or '-'}" for name, key in ((CUPY, "cupy"), (NVRTC, "nvrtc")))
    yield f"driver {facts['driver'] or 'none'}, {packages}"
    for card in facts["cards"]:
        yield from _card(Card(**{**card, "compute": tuple(card["compute"])}))
    if facts["link"]:
        yield _link(LinkSpeed(**facts["link"]), facts["cards"])
    elif facts["usable"]:
        yield facts["link_problem"] or "link under load: not measured; strata doctor --measure"
    for one in facts["missing"]:
        yield f"missing: {one['what']}"
        yield f"  remedy: {one['remedy']}"
    if facts["usable"]:
        yield "all that device.use: cuda needs is there; no kernel has run on a card so far"


def _card(card: Card) -> Iterator[str]:
    compute = ".".join(map(str, card.compute))
    yield (
        f"{card.name} at {card.pci}, compute capability {compute}, {format_size(card.free)} of "
        f"{format_size(card.memory)} free"
    )
    if card.generation and card.width:
        yield (
            f"PCIe {card.generation}.0 x{card.width} at most, now {card.now_generation}.0 x{card.now_width} "
            "(an idle card lowers its generation)"
        )


def _link(speed: LinkSpeed, cards: list[dict[str, Any]]) -> str:
    ways = f"in at {speed.to_device / 1e9:.1f} GB/s, out at {speed.to_host / 1e9:.1f}"
    text = f"link under load: {ways} (measured)"
    width = cards[0]["now_width"] if cards else 0
    if speed.generation in LANE_BYTES and width:
        share = speed.to_device / (LANE_BYTES[speed.generation] * width)
        text += f", {share:.0%} of PCIe {speed.generation}.0 x{width}"
    return text
