"""An engine's steps as a timeline: steps on the host's lane, layers, and ops by the socket that ran them.

On the CPU path the lanes are `host`, `layers`, one `socket N` for each memory node with threads, and `disk`.
A socket's span ends with the last of its threads, so that one that waits for the other shows as a gap.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

from strata.device.emulated import EmulatedDevice
from strata.device.timeline import DISK, HOST, Timeline, socket_lane
from strata.engine.engine import StepDone
from strata.engine.observe import OpCall
from strata.engine.scheduler import Work
from strata.plan.plan import Plan
from strata.store.expert_reader import ReadTotals

LAYERS, STEPS = "layers", "steps"
MAX_CALLS = 200_000
"""Ops that are kept (some 350 steps of 48 layers, 40 MB of file); later steps have no ops."""


class StepTimeline:
    """A sink of `Observer` that writes `path` when it is closed. left_out: steps whose ops were not kept."""

    def __init__(self, path: Path, plan: Plan, reads: Callable[[], ReadTotals] | None = None) -> None:
        """Writes an empty timeline at once, see `_begin`.

        reads: what came from the disk so far, for a model larger than memory.
        """
        self.timeline = Timeline()
        self.left_out = 0
        self._path = path
        self._lanes = [socket_lane(node.node) for node in plan.threads]
        self._origin = time.perf_counter()
        self._steps = self._calls = 0
        self._reads = reads
        self._read = reads() if reads else None
        _begin(self.timeline, path)

    def add(self, step: StepDone, calls: Sequence[OpCall]) -> None:
        """A step, with what is inside it."""
        self._steps += 1
        details = {"step": self._steps, "requests": len(step.works), "tokens": _tokens(step.works)}
        self._span(HOST, _name(step.works), step.begin, step.end, **details)
        self._span(HOST, "sample", step.computed, step.end)
        self._disk(step)
        if self._calls + len(calls) > MAX_CALLS:
            self.left_out += 1
            return
        self._calls += len(calls)
        for layer, inside in groupby(calls, key=lambda call: call.layer):
            found = list(inside)
            if layer >= 0:
                self._span(LAYERS, f"layer {layer}", found[0].begin, found[-1].end)
            for call in found:
                self._call(call)

    def close(self) -> None:
        """Write the file."""
        self.timeline.write(self._path)

    def _disk(self, step: StepDone) -> None:
        """As long as reads ran in this step, drawn from its begin: when exactly they ran is not known."""
        if self._reads is None or self._read is None:
            return
        before, self._read = self._read, self._reads()
        busy = min(self._read.busy_seconds - before.busy_seconds, step.end - step.begin)
        count, nbytes = self._read.reads - before.reads, self._read.nbytes - before.nbytes
        if count:
            self._span(DISK, f"{count} experts", step.begin, step.begin + busy, bytes=nbytes)

    def _call(self, call: OpCall) -> None:
        details = {"shape": call.shape, "layer": call.layer, "bytes": call.bytes, "macs": call.macs}
        shared = {key: value for key, value in details.items() if value not in ("", 0) or key == "layer"}
        for lane, end in zip(self._lanes, call.node_end, strict=True):
            if end:
                self._span(lane, call.op, call.begin, end, **shared)
        if not any(call.node_end):  # too small for threads: the calling one did it alone
            self._span(self._lanes[0], call.op, call.begin, call.end, **shared)

    def _span(self, lane: str, name: str, begin: float, end: float, **details: object) -> None:
        self.timeline.add(lane, name, max(0.0, begin - self._origin), max(0.0, end - self._origin), **details)


class DeviceTimeline:
    """The same for an engine on an emulated device: its lanes and the host's, in its virtual time."""

    def __init__(self, path: Path, device: EmulatedDevice) -> None:
        """Writes an empty timeline at once, see `_begin`."""
        self.timeline = Timeline()
        self.left_out = 0
        self._path, self._device = path, device
        self._now = device.now()
        _begin(self.timeline, path)
        device.watch(self.timeline)

    def add(self, step: StepDone, calls: Sequence[OpCall]) -> None:
        """A step; the device has drawn what is inside it."""
        begin, self._now = self._now, self._device.now()
        self.timeline.add(STEPS, _name(step.works), begin, self._now)
        if self.left_out or len(self.timeline) > MAX_CALLS:
            self.left_out += 1
            self._device.watch(None)

    def close(self) -> None:
        """Write the file."""
        self._device.watch(None)
        self.timeline.write(self._path)


def _begin(timeline: Timeline, path: Path) -> None:
    """What cannot be written must show now, not after an hour. Who reads a pipe would take this for all."""
    if not path.is_fifo():
        timeline.write(path)


def _tokens(works: Sequence[Work]) -> int:
    return sum(work.count for work in works)


def _name(works: Sequence[Work]) -> str:
    """ "decode 4", "prefill 512" or "prefill 512, decode 3": tokens of each."""
    prefill = _tokens([work for work in works if work.is_prefill])
    decode = _tokens(works) - prefill
    parts = [f"{name} {count}" for name, count in (("prefill", prefill), ("decode", decode)) if count]
    return ", ".join(parts)
