"""GET /health: whether tokens come, not only whether the process lives."""

from __future__ import annotations

import time
from typing import Any

from strata.interfaces.server.service import Service
from strata.interfaces.server.worker import State


def health(service: Service) -> dict[str, Any]:
    """The figures; `status` is "ok" only if a request would be answered."""
    thread = service.thread
    busy = bool(thread.open)
    idle = time.monotonic() - thread.last_progress if busy else None
    loading = thread.state is State.LOADING
    return {
        "status": _status(service, idle),
        "model": thread.model.name if thread.model is not None else None,
        "loading": {"stage": thread.stage[0], "done": thread.stage[1]} if loading else None,
        "requests_running": thread.running,
        "requests_waiting": thread.waiting,
        "seconds_since_progress": None if idle is None else round(idle, 3),
    }


def _status(service: Service, idle: float | None) -> str:
    """idle: seconds without a step although requests are there; None: there are none."""
    if service.thread.state is not State.READY:
        return str(service.thread.state.value)
    if service.draining:
        return "draining"
    return "degraded" if idle is not None and idle > service.config.server.stall_seconds else "ok"
