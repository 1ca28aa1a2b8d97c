"""Figures for Prometheus (GET /metrics). Every server has a registry of its own."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from strata.interfaces.server.engine_figures import engine_figures
from strata.interfaces.server.worker import EngineThread, State

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Seconds: from a small model on an idle machine to a prompt of 100,000 tokens.
_FIRST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)


class ServerMetrics:
    """Counted in the event loop; what the engine knows is read from it when somebody asks."""

    def __init__(self, thread: EngineThread) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "strata_requests", "HTTP requests answered", ["path", "status"], registry=registry
        )
        self.answers = Counter("strata_answers", "Answers by how they ended", ["outcome"], registry=registry)
        self.prompt_tokens = Counter("strata_prompt_tokens", "Prompt tokens accepted", registry=registry)
        self.shared_tokens = Counter(
            "strata_prefix_hit_tokens", "Prompt tokens found in the KV cache", registry=registry
        )
        self.completion_tokens = Counter("strata_completion_tokens", "Tokens given out", registry=registry)
        self.first_token = Histogram(
            "strata_time_to_first_token_seconds", "From the request to its first token", buckets=_FIRST,
            registry=registry,
        )  # fmt: skip
        self.between_tokens = Histogram(
            "strata_inter_token_seconds", "Between two tokens of an answer", buckets=_BETWEEN,
            registry=registry,
        )  # fmt: skip
        registry.register(_EngineFigures(thread))

    def text(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self.registry)


class _EngineFigures(Collector):
    """Single numbers of the engine; each is read whole, several need not be of the same step."""

    def __init__(self, thread: EngineThread) -> None:
        self._thread = thread

    def collect(self) -> Iterable[Metric]:
        """The figures now; of the engine only once there is one."""
        thread = self._thread
        yield GaugeMetricFamily(
            "strata_ready", "1: requests are answered", float(thread.state is State.READY)
        )
        yield GaugeMetricFamily("strata_requests_running", "Requests that take part in steps", thread.running)
        yield GaugeMetricFamily(
            "strata_requests_waiting", "Requests that wait for their turn", thread.waiting
        )
        engine = thread.engine
        if engine is None:
            return
        yield from engine_figures(engine)
