"""Figures of speculative decoding for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from strata.engine.speculative.speculator import Speculator


def speculation_metrics(speculator: Speculator) -> Iterable[Metric]:
    """Counted since the engine started; lengths and acceptance by position as labels."""
    found = speculator.figures
    for name, text, value in (
        ("forwards", "Passes of single requests that decode", found.forwards),
        ("tokens", "Tokens that these brought", found.tokens),
        ("proposed_tokens", "Tokens of all drafts", found.proposed),
        ("accepted_tokens", "Of them, those that became part of a text", found.accepted),
        ("verify_seconds", "Decoding steps, without what proposes", found.verify_seconds),
        ("drafted_seconds", "Of them, steps with a draft", found.drafted_seconds),
        ("draft_seconds", "What proposes", found.draft_seconds),
    ):
        yield CounterMetricFamily(f"strata_speculative_{name}", text, value)
    for name, text, counts in (
        ("proposed", "Tokens of all drafts, by proposer", found.proposed_by),
        ("tested", "Of them, those that were compared with what was sampled", found.tested_by),
        ("accepted", "Of them, those that became part of a text", found.accepted_by),
    ):
        by = CounterMetricFamily(f"strata_speculative_proposer_{name}", text, labels=["proposer"])
        for proposer, count in counts.copy().items():
            by.add_metric([proposer], count)
        yield by
    yield GaugeMetricFamily(
        "strata_speculative_recent_length", "Mean draft length of the latest passes", found.mean_length
    )
    yield _by("length", "strata_speculative_passes", "Passes by draft length", found.lengths)
    yield _by("position", "strata_speculative_tested", "Tested tokens by place in the draft", found.tested_at)
    yield _by("position", "strata_speculative_hits", "Accepted ones of these", found.accepted_at)


def _by(label: str, name: str, text: str, values: list[int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for index, value in enumerate(list(values)):
        family.add_metric([str(index)], value)
    return family
