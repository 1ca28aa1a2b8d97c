"""`--timeline` and `--record-trace`: what a command writes about the steps while it runs."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from strata.device.emulated import EmulatedDevice
from strata.engine.engine import Engine
from strata.engine.observe import Observer, Sink
from strata.engine.step_timeline import DeviceTimeline, StepTimeline
from strata.errors import UsageError
from strata.interfaces.terminal import note
from strata.plan.plan import Plan


class Files(NamedTuple):
    """What is written beside the answers; None: not asked for."""

    timeline: Path | None = None
    trace: Path | None = None


class Recording:
    """What is written about an engine's steps, from now until `close`, in the engine's thread or after it.

    Raises OSError for what cannot be written, UsageError for one file for both, UnsupportedError for a trace
    of a model without experts. Nothing is written then.
    """

    def __init__(self, engine: Engine, plan: Plan, files: Files) -> None:
        if files.trace and files.timeline and files.trace.resolve() == files.timeline.resolve():
            raise UsageError(f"{files.trace} is named for both timeline and trace", remedy="name two files")
        self._files = files
        self._steps: StepTimeline | DeviceTimeline | None = None
        sinks: list[Sink] = []
        if files.trace:  # first: it is always a new file, so that it can be taken back
            from strata.engine.expert_trace import ExpertTrace  # knows the hybrid backend: 50 ms to import

            sinks.append(ExpertTrace(files.trace, engine.decoder))
        try:
            if files.timeline:
                self._steps = _timeline(engine, plan, files.timeline)
                sinks.append(self._steps)
        except OSError:
            _take_back(sinks, files.trace)
            raise
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


def _take_back(sinks: Sequence[Sink], trace: Path | None) -> None:
    """No empty trace is left behind: it would stop the next try."""
    for sink in sinks:
        sink.close()
    if trace is not None:
        trace.unlink()


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
