"""What the engine knows, for /metrics: steps, memory, experts, and the decisions about them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from strata.engine.engine import Engine
from strata.engine.gauges import expert_counts, regions
from strata.interfaces.server.speculation import speculation_metrics


def engine_figures(engine: Engine) -> Iterable[Metric]:
    """Single numbers, each of which is read whole; several need not be of the same step."""
    yield from _steps(engine)
    yield from _pages(engine)
    yield from _regions(engine)
    yield from _layers(engine)
    yield from _experts(engine)
    speculator = engine.speculator  # which its thread may give up at any time
    if speculator is not None:
        yield from speculation_metrics(speculator)
    yield from node_figures(engine)


def _steps(engine: Engine) -> Iterable[Metric]:
    total = engine.metrics.total
    yield CounterMetricFamily("strata_steps", "Forward passes", engine.metrics.steps)
    yield CounterMetricFamily(
        "strata_preemptions", "Seats that running requests lost to older ones", engine.scheduler.preempted
    )
    yield CounterMetricFamily(
        "strata_logits_read_bytes",
        "Logits taken from the backend: with a device, what its bus carried for the sampler",
        engine.executor.logit_bytes,
    )
    for name, phase in (("prefill", total.prefill), ("decode", total.decode)):
        yield CounterMetricFamily(f"strata_{name}_tokens", f"Tokens computed in {name}", phase.tokens)
        yield CounterMetricFamily(f"strata_{name}_seconds", f"Seconds spent in {name}", phase.seconds)
        yield CounterMetricFamily(
            f"strata_{name}_read_bytes", f"Weights and KV that {name} has to read at least", phase.bytes
        )


def _pages(engine: Engine) -> Iterable[Metric]:
    pages = engine.pages
    yield GaugeMetricFamily("strata_kv_pages_total", "KV pages there are", pages.total)
    yield GaugeMetricFamily("strata_kv_pages_used", "KV pages that requests hold", pages.total - pages.free)
    yield GaugeMetricFamily("strata_kv_pages_kept", "Free KV pages that prompts may share", pages.kept)


def _regions(engine: Engine) -> Iterable[Metric]:
    labels = ["tier", "region"]
    used = GaugeMetricFamily("strata_region_used_bytes", "Memory in use, by part", labels=labels)
    total = GaugeMetricFamily("strata_region_total_bytes", "Memory there is, by part", labels=labels)
    peak = GaugeMetricFamily("strata_region_peak_bytes", "Most that was in use", labels=labels)
    for tier, level, _ in regions(engine):
        for family, value in ((used, level.used), (total, level.total), (peak, level.peak)):
            family.add_metric([tier, level.name], value)
    yield from (used, total, peak)


def _layers(engine: Engine) -> Iterable[Metric]:
    uses = CounterMetricFamily(
        "strata_expert_uses", "Experts that steps touched, each once a step", labels=["layer"]
    )
    read = CounterMetricFamily("strata_expert_read_bytes", "Their weights", labels=["layer"])
    for layer, count in sorted(engine.metrics.expert_uses.copy().items()):
        uses.add_metric([str(layer)], count)
        read.add_metric([str(layer)], count * engine.decoder.expert_bytes[layer])
    yield from (uses, read)


def _experts(engine: Engine) -> Iterable[Metric]:
    """Of a device with its expert cache; without one the host computes all, which `_layers` counts."""
    metrics: Any = getattr(engine.decoder.backend, "metrics", None)
    if metrics is None:
        return
    counts = expert_counts(engine)
    answers = CounterMetricFamily(
        "strata_experts", "Routed experts by how they were answered", labels=["answer"]
    )
    for name, value in (
        ("hit", counts.hit),
        ("late", counts.late),
        ("fetched", counts.fetched),
        ("streamed", counts.streamed),
        ("computed", counts.computed),
    ):
        answers.add_metric([name], value)
    yield answers
    for name, by_layer in (("hits", counts.hits), ("misses", counts.misses)):
        family = CounterMetricFamily(
            f"strata_expert_cache_{name}", f"Of decode: {name} of the device's cache", labels=["layer"]
        )
        for layer, count in enumerate(by_layer):
            family.add_metric([str(layer)], count)
        yield family
    yield from _decisions(metrics.split, metrics.prefetch)


def _decisions(split: Any, prefetch: Any) -> Iterable[Metric]:
    family = CounterMetricFamily(
        "strata_miss_split", "Layers with misses: decided, decided against the model, probed", labels=["what"]
    )
    for name in ("layers", "taken_back", "probes"):
        family.add_metric([name], getattr(split, name))
    yield family
    ratio = GaugeMetricFamily(
        "strata_speed_ratio", "Measured time over predicted time, of host and bus", labels=["lane"]
    )
    ratio.add_metric(["host"], split.host_ratio)
    ratio.add_metric(["bus"], split.bus_ratio)
    yield ratio
    guesses = CounterMetricFamily("strata_prefetch", "Experts fetched by a guess", labels=["what"])
    for name in ("fetched", "needed", "cancelled", "skipped"):
        guesses.add_metric([name], getattr(prefetch, name))
    yield guesses


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
