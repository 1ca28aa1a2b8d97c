"""`--timeline` and `--record-trace`: what a command writes about the steps while it runs."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

from strata.device.emulated import EmulatedDevice
from strata.engine.engine import Engine
from strata.engine.observe import Observer, Sink
from strata.engine.step_timeline import DeviceTimeline, StepTimeline
from strata.interfaces.terminal import note
from strata.plan.plan import Plan


@contextlib.contextmanager
def recording(
    engine: Engine, plan: Plan, timeline: Path | None = None, trace: Path | None = None
) -> Iterator[None]:
    """Writes the files that are asked for, complete after an error and Ctrl-C as well.

    Raises OSError for what cannot be written, UnsupportedError for a trace of a model without experts, both
    before anything runs.
    """
    sinks: list[Sink] = []
    steps = _timeline(engine, plan, timeline) if timeline else None
    sinks += [steps] if steps else []
    if trace:
        from strata.engine.expert_trace import ExpertTrace  # knows the hybrid backend: 50 ms to import

        sinks.append(ExpertTrace(trace, engine.decoder))
    if not sinks:
        yield
        return
    observer = Observer(engine, plan, sinks)
    observer.open()
    try:
        yield
    finally:
        with uninterrupted():
            observer.close()
        if steps and steps.left_out:
            note(f"note: {timeline} has no ops of the last {steps.left_out} steps: it would grow too large")


def _timeline(engine: Engine, plan: Plan, path: Path) -> StepTimeline | DeviceTimeline:
    device = getattr(engine.decoder.backend, "device", None)
    return DeviceTimeline(path, device) if isinstance(device, EmulatedDevice) else StepTimeline(path, plan)


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
