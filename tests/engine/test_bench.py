"""`strata bench`: which cases run, how rates follow from a clock that ticks as told, and what streams read.

No assertion depends on how fast this machine is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ticking_clock import TickingClock
from tiny_model import VOCAB, TinyStore, gpt_oss_spec, make_backend, mla_spec, moe_spec

from strata.core import Batch, Sequence
from strata.engine.bench import runs
from strata.engine.bench.figures import (
    Case,
    Limits,
    OpTimes,
    OpTotal,
    Result,
    Run,
    Spread,
    head_macs,
    macs_per_token,
    op_figures,
    plan_cases,
)
from strata.engine.bench.ops import OpTimer
from strata.engine.bench.runs import Bench, RandomTokens, limits_probe, tokens_needed
from strata.engine.engine import Engine, EngineOptions
from strata.hardware.bandwidth import ReadBandwidth
from strata.model.decoder import Decoder
from strata.plan.spec import ModelSpec

CHUNK = 16
SPECS = {"moe": moe_spec(), "gpt_oss": gpt_oss_spec(), "mla": mla_spec()}


def make_engine(spec: ModelSpec, timer: OpTimer | None = None, **changes: object) -> Engine:
    backend = make_backend("cpu", 2, "int8")
    decoder = Decoder(spec, TinyStore(spec, fmt="w4g64"), timer.wrap(backend) if timer else backend)
    options = EngineOptions(
        context=128, pages=64, valid_tokens=VOCAB, page_tokens=8, kv_dtype="int8", chunk=CHUNK
    )
    return Engine(decoder, replace(options, **changes))


def test_cases_of_the_command_line() -> None:
    labels = [case.label for case in plan_cases([512, 0], [128], [0, 4096], [1, 4, 16])]
    assert labels == ["pp512", "tg128", "tg128 x 4", "tg128 x 16", "tg128 @ d4096"]
    assert [case.label for case in plan_cases([0], [8, 0], [64], [4])] == ["tg8 @ d64 x 4"]
    assert plan_cases([0], [0], [0], [1]) == []


def test_rates_are_quotients() -> None:
    run = Run(10, 2.0, bytes=6e9, macs=8, before=Limits(5e9, 30.0), after=Limits(7e9, 10.0))
    assert (run.tokens_per_second, run.bytes_per_second, run.macs_per_second) == (5.0, 3e9, 4.0)
    assert (run.bandwidth, run.share) == (6e9, 0.5)
    assert (run.int8_peak, run.peak_share) == (20.0, 0.2)
    blind = replace(run, after=Limits())
    assert (blind.bandwidth, blind.share, blind.int8_peak, blind.peak_share) == (None,) * 4


def test_spread_is_median_and_extremes_of_each_runs_own_figure() -> None:
    """The share is that of each run beside its own probe, not a median speed beside a median probe."""
    runs = tuple(Run(1, s, 1.0, 0, Limits(p), Limits(p)) for s, p in ((1.0, 2.0), (2.0, 10.0), (4.0, 0.5)))
    result = Result(Case("decode", 1), runs)
    assert result.spread(lambda run: run.tokens_per_second) == Spread(0.5, 0.25, 1.0)
    assert result.spread(lambda run: run.share) == Spread(0.5, 0.05, 0.5)
    unknown = Result(result.case, (*runs, replace(runs[0], before=Limits())))
    assert unknown.spread(lambda run: run.share) is None


def test_op_figures_are_medians_over_runs() -> None:
    def run(seconds: float, limits: Limits) -> Run:
        ops = (
            OpTotal("linear", "a", 4, seconds, 80, 16, quantized=True),
            OpTotal("route", "", 2, 9.0, 0, 9),
        )
        return Run(2, 20.0, 80, 0, limits, limits, OpTimes(2, 20.0, ops, native=None))

    known = Limits(40.0, 32.0)
    figures = op_figures(Result(Case("decode", 2), tuple(run(s, known) for s in (4.0, 2.0, 1.0))))
    assert [op.name for op in figures] == ["route", "linear"]  # the most expensive first
    route, linear = figures
    assert (linear.calls_per_step, linear.seconds_per_call, linear.seconds_per_step) == (2, 0.5, 1.0)
    assert (linear.bytes_per_second, linear.share) == (40.0, 1.0)
    assert (linear.macs_per_second, linear.peak_share) == (8.0, 0.25)
    assert route.peak_share is None  # it computes in f32
    half = op_figures(Result(Case("decode", 2), (run(4.0, known), run(2.0, Limits(40.0)))))[1]
    assert (half.share, half.peak_share) == (0.75, None)


def test_macs_are_those_of_the_matrices() -> None:
    """moe_spec counted by hand: attention in two layers, one dense layer, one router, two experts."""
    attention = 32 * (4 + 2 * 2) * 16 + 4 * 16 * 32
    expected = 2 * attention + 3 * 32 * 24 + 8 * 32 + 2 * 3 * 32 * 16
    assert macs_per_token(moe_spec()) == expected
    assert head_macs(moe_spec()) == VOCAB * 32


@pytest.mark.parametrize("name", SPECS)
def test_a_run_by_a_clock_that_ticks_once(name: str) -> None:
    """A run reads the clock twice, so it takes one second: rates are then plain counts."""
    engine = make_engine(SPECS[name])
    probes = iter(range(1, 100))
    bench = Bench(engine, lambda: Limits(float(next(probes)), 7.0), clock=TickingClock())
    prefill = bench.measure(Case("prefill", 40), 2)
    decode = bench.measure(Case("decode", 5, depth=20, streams=3), 2)
    assert [(run.tokens, run.seconds) for run in prefill.runs] == [(40, 1.0)] * 2
    assert [(run.tokens, run.seconds) for run in decode.runs] == [(15, 1.0)] * 2
    assert [(run.before.bandwidth, run.after.bandwidth) for run in (*prefill.runs, *decode.runs)] == [
        *((1, 2), (2, 3)),  # a run's last probe is the next one's first: both stand right beside it
        *((4, 5), (5, 6)),
    ]
    token, head = macs_per_token(SPECS[name]), head_macs(SPECS[name])
    assert prefill.runs[0].macs == 40 * token + head
    assert decode.runs[0].macs == 15 * (token + head)
    assert decode.runs[0].peak_share == decode.runs[0].macs / 7.0
    assert not engine.busy
    engine.check_integrity()


def test_bytes_are_the_engines_account() -> None:
    """Five steps of one stream: the shared weights five times, two experts a step, KV from depth 10 on."""
    engine = make_engine(moe_spec())
    run = Bench(engine, Limits, clock=TickingClock()).measure(Case("decode", 5, depth=9), 1).runs[0]
    decoder, kv = engine.decoder, engine.kv
    tokens = sum(range(11, 16))
    expected = 5 * (decoder.shared_bytes + 2 * decoder.expert_bytes[1])
    assert run.bytes == expected + tokens * kv.page_bytes // kv.page_tokens


def test_every_repetition_starts_at_the_same_depth() -> None:
    engine = make_engine(moe_spec())
    seen: list[list[int]] = []
    run = engine.executor.run
    engine.executor.run = lambda works: seen.append([work.start for work in works]) or run(works)  # type: ignore
    Bench(engine, Limits).measure(Case("decode", 2, depth=20, streams=2), 3)
    assert seen[-6:] == [[21, 21], [22, 22]] * 3


def test_streams_are_fed_different_tokens() -> None:
    """A known pitfall of benchmarks: with one token for all streams, all would share their experts."""
    engine = make_engine(moe_spec())
    batches: list[list[int]] = []
    forward = engine.decoder.forward
    engine.decoder.forward = lambda batch, cache: (  # type: ignore[method-assign]
        batches.append(batch.token_ids.tolist()) or forward(batch, cache)
    )
    Bench(engine, Limits).measure(Case("decode", 20, streams=4), 1)
    assert all(len(set(batch)) > 1 for batch in batches)
    by_stream = list(zip(*batches[-20:], strict=True))
    assert len(set(by_stream)) == 4
    assert {token for stream in by_stream for token in stream} <= set(range(VOCAB))


def test_random_tokens_cover_the_vocabulary() -> None:
    def draw(seed: int) -> list[int]:
        sampler = RandomTokens(5, seed)
        return [sampler.sample(np.zeros(5, np.float32), []) for _ in range(200)]

    assert set(draw(3)) == set(range(5))
    assert draw(3) == draw(3) != draw(4)


@pytest.mark.parametrize(
    "case",
    [
        Case("prefill", 33),
        Case("decode", 1),
        Case("decode", 3, depth=17, streams=5),
        Case("decode", 1, depth=40, streams=8),
    ],
)
def test_the_room_a_case_asks_for_is_enough(case: Case) -> None:
    """Filling many streams takes more steps than the case generates: the first ones go on meanwhile."""
    context = tokens_needed(case, CHUNK)
    pages = case.streams * -(-context // 8)
    engine = make_engine(moe_spec(), context=context, pages=pages)
    rows: list[int] = []
    run = engine.executor.run
    engine.executor.run = lambda works: rows.append(sum(w.count for w in works)) or run(works)  # type: ignore
    Bench(engine, Limits).measure(case, 2)
    if case.kind == "decode":  # every stream takes part in every step
        assert rows[-2 * case.tokens :] == [case.streams] * 2 * case.tokens
    else:
        assert sum(rows) == 2 * case.tokens
    assert engine.pages.free == pages


@pytest.mark.parametrize("name", SPECS)
def test_op_timer_counts_every_op_and_all_bytes(name: str) -> None:
    """The ops' bytes of weights and KV are the engine's own, apart from plain vectors that no op counts."""
    timer = OpTimer()
    engine = make_engine(SPECS[name], timer)
    run = Bench(engine, Limits, timer=timer).measure(Case("decode", 4, depth=3), 1).runs[0]
    assert run.ops is not None and run.ops.steps == 4
    found = {(op.name, op.shape): op for op in run.ops.ops}
    layers, experts = SPECS[name].layers, SPECS[name].experts
    shared = 4 * (layers - 1) if experts is not None and experts.shared_width else 0
    assert sum(op.calls for op in run.ops.ops if op.name == "attention") == 4 * layers
    assert sum(op.calls for op in run.ops.ops if op.name == "experts") == 4 * (layers - 1)
    assert found["add", "32"].calls == 4 * 2 * layers + shared
    assert {op.name for op in run.ops.ops if op.quantized} >= {"linear", "experts"}
    assert not any(op.quantized for op in run.ops.ops if op.name in ("attention", "plain_linear", "route"))
    # The embedding's row is in the ops' bytes and not in the engine's; norms and biases the other way round.
    counted = sum(op.bytes for op in run.ops.ops if op.name != "embedding")
    assert 0.9 * run.bytes < counted <= run.bytes
    assert 0 < run.ops.native < run.ops.seconds
    assert run.ops.rest > 0


def test_op_timer_forgets_what_came_before_the_run() -> None:
    timer = OpTimer()
    bench = Bench(make_engine(moe_spec(), timer), Limits, timer=timer)
    bench.warm_up(30)
    first, second = bench.measure(Case("prefill", 30), 2).runs
    assert first.ops is not None and second.ops is not None
    counts = [{(op.name, op.shape): op.calls for op in run.ops.ops} for run in (first, second) if run.ops]
    assert counts[0] == counts[1]


def test_attention_costs_follow_the_window() -> None:
    """Three rows from token 4 on with a window of 5: 4 + 3 tokens seen, pairs 5 + 5 + 5."""
    timer = OpTimer()
    engine = make_engine(gpt_oss_spec(), timer, kv_dtype="bf16")  # windows of 5, 0 and 5 tokens
    pages, rows = np.zeros(1, np.int32), np.arange(4, dtype=np.int32)
    decoder, cache = engine.decoder, engine.executor.cache
    decoder.forward(Batch(rows, rows, (Sequence(0, 4, 0, pages),), rows[:0]), cache)
    timer.start()
    decoder.forward(Batch(rows[:3], rows[:3] + 4, (Sequence(0, 3, 4, pages),), rows[:0]), cache)
    found = {op.shape: op for op in timer.stop(1, 1.0).ops if op.name == "attention"}
    windowed, full = found["bf16 4/2 x 16, window 5"], found["bf16 4/2 x 16"]
    token_bytes = 2 * 2 * 16 * 2
    assert (windowed.calls, windowed.bytes, windowed.macs) == (2, 2 * 7 * token_bytes, 2 * 15 * 4 * 32)
    assert (full.calls, full.bytes, full.macs) == (1, 7 * token_bytes, (5 + 6 + 7) * 4 * 32)


def test_a_backend_without_a_clock_is_timed_from_outside() -> None:
    timer, spec = OpTimer(time=TickingClock()), moe_spec()
    decoder = Decoder(spec, TinyStore(spec), timer.wrap(make_backend("reference", None, "f32")))
    engine = Engine(decoder, EngineOptions(64, 16, VOCAB, 8, "f32", CHUNK))
    run = Bench(engine, Limits, timer=timer).measure(Case("decode", 4), 1).runs[0]
    assert run.ops is not None and run.ops.native is None
    calls = {
        "embedding": 4,
        "attend": 8,
        "feed_forward": 4,
        "choose_experts": 4,
        "apply_experts": 4,
        "logits": 4,
    }
    assert {op.name: op.calls for op in run.ops.ops} == calls
    assert all(op.seconds == op.calls for op in run.ops.ops)


@pytest.mark.parametrize(
    ("backend", "activations", "expected"),
    [
        ("cpu", "int8", Limits(2e9, 3e9)),
        ("cpu", "f32", Limits(2e9, None)),
        ("reference", "f32", Limits(None, None)),
    ],
)
def test_limits_are_those_of_what_computes(
    backend: Any, activations: Any, expected: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no int8 peak beside arithmetic in f32, and no figure at all of torch's threads."""
    monkeypatch.setattr(runs, "read_bandwidth", lambda cpu, seconds: ReadBandwidth(1e9, 1e9 * cpu.threads, 1))
    monkeypatch.setattr(runs, "int8_peak", lambda cpu: 1.5e9 * cpu.threads)
    made = make_backend(backend, 2, activations)
    assert limits_probe(made)() == expected
    assert limits_probe(OpTimer().wrap(made))() == expected
