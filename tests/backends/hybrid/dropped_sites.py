"""A device that leaves out every wait made at one place in the code."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import strata
from strata.device.base import Event, Stream
from strata.device.emulated import EmulatedDevice

ROOT = Path(strata.__file__).parent
# Who may wait: a call is known by its lines in these files, from the device outwards.
WAITING = (
    *sorted(ROOT.glob("backends/hybrid/*.py")),
    *(ROOT / f"memory/{n}.py" for n in ("transfers", "staging")),
)
_NAMES = {str(path): str(path.relative_to(ROOT)) for path in WAITING}
Site = tuple[tuple[str, int], ...]


class SiteDroppingDevice:
    """Everything goes to the device beneath, but wait, sync and query called at the dropped site do nothing
    (such a query says yes). sites: how often each place waited."""

    def __init__(self, device: EmulatedDevice, dropped: Site | None = None) -> None:
        self._device = device
        self._dropped = dropped
        self.sites: Counter[Site] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def wait(self, stream: Stream, event: Event) -> None:
        if self._keeps():
            self._device.wait(stream, event)

    def sync(self, target: Stream | Event | None = None) -> None:
        if self._keeps():
            self._device.sync(target)

    def query(self, target: Stream | Event) -> bool:
        return self._device.query(target) if self._keeps() else True

    def _keeps(self) -> bool:
        site = _site()
        self.sites[site] += 1
        return site != self._dropped


def _site() -> Site:
    """The call's lines in strata/memory and the first one in the hybrid backend, innermost first."""
    lines: list[tuple[str, int]] = []
    frame = sys._getframe(3)
    while frame is not None and (name := _NAMES.get(frame.f_code.co_filename)) is not None:
        lines.append((name, frame.f_lineno))
        if name.startswith("backends"):
            break
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(lines)


def calls_in_source() -> set[tuple[str, int]]:
    """Lines of every wait, sync and query of a device, and of every wait and drain of a queue."""
    found = set()
    for path in WAITING:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = ast.unparse(node.func.value)
                device = owner.endswith("device") and node.func.attr in ("wait", "sync", "query")
                queue = owner.endswith("queue") and node.func.attr in ("wait", "finish", "drain")
                if device or queue:
                    found.add((str(path.relative_to(ROOT)), node.lineno))
    return found
