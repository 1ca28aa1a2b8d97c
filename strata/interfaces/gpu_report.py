"""The graphics card's part of `strata doctor`: what is there, what is missing, and what brings it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from strata.config import format_size
from strata.device.link_speed import LinkSpeed, link_speed
from strata.errors import StrataError
from strata.hardware.gpu_stack import (
    CUPY,
    INSTALL,
    NEWEST_COMPUTE,
    NVRTC,
    OLDEST_COMPUTE,
    OLDEST_DRIVER,
    gpu_stack,
)
from strata.hardware.nvml import Card, link_generation, load_nvml
from strata.hardware.pci import LANE_BYTES

CARDS = "compute capability {}.{} to {}.{} (RTX 30 and 40 series, A100, H100)".format(
    *OLDEST_COMPUTE, *NEWEST_COMPUTE
)
NEVER_RUN = "no kernel has run on a card so far (docs/kernels.md says what was checked instead)"


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
    """Lines for people."""
    packages = ", ".join(
        f"{name} {facts[key] or 'not installed'}" for name, key in ((CUPY, "cupy"), (NVRTC, "nvrtc"))
    )
    if not facts["pci"] and not facts["driver"]:
        yield "no NVIDIA card: models run on the processor, and nothing is missing for that"
        yield f"device.use: cuda would need one of {CARDS},"
        yield f"driver {OLDEST_DRIVER} or newer, and {INSTALL} ({packages})"
        yield "its kernels can be tried without one, slowly, from a checkout with g++: device.use: emulated,"
        yield f"device.kernels: cuda; {NEVER_RUN}"
        return
    yield f"driver {facts['driver'] or 'none'}, {packages}"
    for card in facts["cards"]:
        yield from _card(Card(**{**card, "compute": tuple(card["compute"])}))
    if facts["link"]:
        yield _link(LinkSpeed(**facts["link"]), facts["cards"])
    elif facts["usable"]:
        yield facts["link_problem"] or "link under load: not measured; strata doctor --measure"
    for remedy, group in groupby(facts["missing"], lambda one: one["remedy"]):
        yield f"missing: {'; '.join(one['what'] for one in group)}"
        yield f"  remedy: {remedy}"
    if facts["usable"]:
        yield f"all that device.use: cuda needs is there; {NEVER_RUN}"


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
