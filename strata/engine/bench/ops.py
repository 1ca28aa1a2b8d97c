"""Times the ops of a backend while the decoder runs as always: real order, arguments and caches.

A backend of compiled code has a clock of its own, which sees the ops inside of the fused ones and disturbs
nothing. Others are timed from outside, op by op as the decoder calls them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from strata.backends.base import Backend
from strata.backends.composed import ComposedOps
from strata.engine.bench.figures import OpTimes, OpTotal

_OPS = ("embedding", "attend", "feed_forward", "choose_experts", "apply_experts", "logits")


@dataclass
class OpTimer:
    """Collects the ops between `start` and `stop`. clock: a `strata._C.Cpu` that keeps the time itself."""

    time: Callable[[], float] = time.perf_counter
    clock: Any = None
    outside: dict[str, OpTotal] = field(default_factory=dict)
    native: float = 0.0

    def wrap(self, backend: Backend) -> Backend:
        """The same backend, to be timed."""
        self.clock = getattr(backend, "cpu", None)
        if self.clock is not None:
            return backend
        timed: Any = _TimedBackend(backend, self)
        return timed  # type: ignore[no-any-return]

    def start(self) -> None:
        """Forget everything so far."""
        self.outside = {}
        if self.clock is not None:
            self.clock.start_clock()
            self.native = self.clock.native_seconds

    def stop(self, steps: int, seconds: float) -> OpTimes:
        """The ops since `start`, which took `seconds` of wall time with all that is between them."""
        if self.clock is None:
            return OpTimes(steps, seconds, tuple(self.outside.values()), None)
        native = self.clock.native_seconds - self.native
        return OpTimes(steps, seconds, tuple(OpTotal(*found) for found in self.clock.stop_clock()), native)

    def note(self, name: str, seconds: float) -> None:
        """Count one call."""
        found = self.outside.get(name, OpTotal(name, "", 0, 0.0, 0, 0))
        self.outside[name] = OpTotal(name, "", found.calls + 1, found.seconds + seconds, 0, 0)


class _TimedBackend:
    """Stands before a backend; what it does not know passes through."""

    def __init__(self, backend: Backend, timer: OpTimer) -> None:
        self._backend = backend
        for name in _OPS:
            setattr(self, name, _timed(name, getattr(backend, name), timer))
        timed: Any = self
        self.run_layers = partial(ComposedOps.run_layers, timed)
        self.forward = partial(ComposedOps.forward, timed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


def _timed(name: str, op: Callable[..., Any], timer: OpTimer) -> Callable[..., Any]:
    def timed(*args: Any, **named: Any) -> Any:
        begin = timer.time()
        result = op(*args, **named)
        timer.note(name, timer.time() - begin)
        return result

    return timed
