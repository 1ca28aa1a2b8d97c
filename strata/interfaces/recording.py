"""`--timeline` and `--record-trace`: what a command writes about the steps while it runs."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from strata.device.emulated import EmulatedDevice
from strata.engine.engine import Engine
from strata.engine.observe import Observer, Sink
from strata.engine.step_timeline import DeviceTimeline, StepTimeline
from strata.interfaces.terminal import note
from strata.plan.plan import Plan


class Files(NamedTuple):
    """What is written beside the answers; None: not asked for."""

    timeline: Path | None = None
    trace: Path | None = None


class Recording:
    """What is written about an engine's steps, from now until `close`, in the engine's thread or after it.

    Raises OSError for what cannot be written, UnsupportedError for a trace of a model without experts.
    """

    def __init__(self, engine: Engine, plan: Plan, files: Files) -> None:
        self._files = files
        self._steps = _timeline(engine, plan, files.timeline) if files.timeline else None
        sinks: list[Sink] = [self._steps] if self._steps else []
        if files.trace:
            from strata.engine.expert_trace import ExpertTrace  # knows the hybrid backend: 50 ms to import

            sinks.append(ExpertTrace(files.trace, engine.decoder))
        self._observer = Observer(engine, plan, sinks) if sinks else None
        if self._observer:
            self._observer.open()

    def close(self) -> None:
        """The files are whole afterwards. Ctrl-C waits for it."""
        if self._observer is None:
            return
        with uninterrupted():
            self._observer.close()
        if self._steps and self._steps.left_out:
            file, count = self._files.timeline, self._steps.left_out
            note(f"note: {file} has no ops of the last {count} steps: it would grow too large")


@contextlib.contextmanager
def recording(engine: Engine, plan: Plan, files: Files) -> Iterator[None]:
    """A `Recording` of the block, closed after an error and Ctrl-C as well."""
    with contextlib.closing(Recording(engine, plan, files)):
        yield


def _timeline(engine: Engine, plan: Plan, path: Path) -> StepTimeline | DeviceTimeline:
    device = getattr(engine.decoder.backend, "device", None)
    if isinstance(device, EmulatedDevice):
        return DeviceTimeline(path, device)
    tier = engine.decoder.tier
    return StepTimeline(path, plan, tier.reads if tier else None)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits while a file is written."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
