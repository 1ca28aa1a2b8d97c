"""Figures for Prometheus (GET /metrics). Every server has a registry of its own."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from strata.engine.engine import Engine
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
        pages, total = engine.pages, engine.metrics.total
        yield GaugeMetricFamily("strata_kv_pages_total", "KV pages there are", pages.total)
        yield GaugeMetricFamily(
            "strata_kv_pages_used", "KV pages that requests hold", pages.total - pages.free
        )
        yield GaugeMetricFamily("strata_kv_pages_kept", "Free KV pages that prompts may share", pages.kept)
        yield CounterMetricFamily("strata_steps", "Forward passes", engine.metrics.steps)
        yield from node_figures(engine)
        for name, phase in (("prefill", total.prefill), ("decode", total.decode)):
            yield CounterMetricFamily(f"strata_{name}_tokens", f"Tokens computed in {name}", phase.tokens)
            yield CounterMetricFamily(f"strata_{name}_seconds", f"Seconds spent in {name}", phase.seconds)
            yield CounterMetricFamily(
                f"strata_{name}_read_bytes", f"Weights and KV that {name} has to read at least", phase.bytes
            )


def node_figures(engine: Engine) -> Iterable[Metric]:
    """Of the latest look at where pages lie; nothing where nothing is bound to memory nodes."""
    placement = engine.placement
    if placement is None or not placement.ranges():
        return
    sampled = GaugeMetricFamily("strata_numa_pages_sampled", "Touched pages looked at", labels=["range"])
    wrong = GaugeMetricFamily("strata_numa_pages_misplaced", "Of those, on other nodes", labels=["range"])
    for check in placement.checks:
        sampled.add_metric([check.name], check.sampled - check.absent)
        wrong.add_metric([check.name], check.wrong)
    yield from (sampled, wrong)
    yield CounterMetricFamily("strata_numa_pages_moved", "Pages brought to their nodes", placement.moved)
