"""What the engine counts: tokens, seconds, bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engines import GREEDY, SPECS, make_engine, prompt_of

from strata.core import Request
from strata.engine.engine import Engine
from strata.engine.metrics import step_bytes
from strata.engine.speculative.draft_length import LengthOptions
from strata.engine.speculative.ngram import NgramProposer
from strata.engine.speculative.speculator import Speculator
from strata.interfaces.server.engine_figures import engine_figures
from strata.model.decoder import Decoder
from strata.plan.spec import ModelSpec


def test_figures_of_a_request(engine: Engine) -> None:
    list(engine.generate(Request("a", prompt_of(20), GREEDY)))
    for progress in (engine.metrics.requests["a"], engine.metrics.total):
        assert progress.prefill.tokens == 20 and progress.decode.tokens == 9
        assert progress.prefill.seconds > 0 and progress.decode.tokens_per_second > 0
    assert engine.metrics.steps == 2 + 9


@pytest.mark.parametrize("name", SPECS)
def test_bytes_of_a_decode_step(decoders: dict[str, Decoder], name: str) -> None:
    """Shared weights once, each routed expert's payload, the keys and values that are seen."""
    decoder = decoders[name]
    engine = make_engine(decoder)
    list(engine.generate(Request("a", prompt_of(12), replace(GREEDY, max_tokens=2))))
    spec: ModelSpec = decoder.spec
    experts = 2 * sum(decoder.expert_bytes.values())
    seen = [min(13, spec.window(layer) or 13) for layer in range(spec.layers)]
    per_token = (20 + 8) * 4 if spec.attention.mla else 2 * 2 * 16 * 4
    decode = engine.metrics.requests["a"].decode
    assert decode.tokens == 1
    assert decode.bytes == decoder.shared_bytes + experts + sum(seen) * per_token


def test_a_chunk_reads_the_windows_of_all_its_rows(decoders: dict[str, Decoder]) -> None:
    """20 tokens in chunks of 16 and 4; a window of 5 spans 5 + 4 - 1 tokens of the second chunk."""
    engine = make_engine(decoders["gpt_oss"])
    engine.add(Request("a", prompt_of(20), GREEDY))
    engine.step()
    works = engine.scheduler.schedule()
    engine.executor.run(works)
    assert step_bytes(engine.decoder, engine.kv, works).kv == (8 + 20 + 8) * 2 * 2 * 16 * 4


def test_figures_do_not_grow_with_every_request_seen(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strata.engine.metrics.KEPT_REQUESTS", 3)
    for turn in range(5):
        list(engine.generate(Request(f"r{turn}", [1], replace(GREEDY, max_tokens=1))))
    assert list(engine.metrics.requests) == ["r2", "r3", "r4"]
    assert engine.metrics.total.prefill.tokens == 5


def test_drafts_may_be_given_up_while_figures_are_read(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the engine's thread, between two looks of another one."""
    looks = iter([Speculator(NgramProposer(), LengthOptions(), None)])
    monkeypatch.setattr(Engine, "speculator", property(lambda _: next(looks, None)), raising=False)
    assert "strata_speculative_forwards" in [metric.name for metric in engine_figures(engine)]


def test_acceptance_by_proposer_can_be_told(engine: Engine) -> None:
    """Of 4 tokens 2 were right, one was wrong, and the one behind it was not tested."""
    engine.speculator = Speculator(NgramProposer(), LengthOptions(), None)
    engine.speculator.figures.add(4, 2, True, 3, "ngram")
    found = {metric.name: metric.samples for metric in engine_figures(engine)}
    by = {what: found[f"strata_speculative_proposer_{what}"] for what in ("proposed", "tested", "accepted")}
    assert {what: [sample.value for sample in samples] for what, samples in by.items()} == {
        "proposed": [4],
        "tested": [3],
        "accepted": [2],
    }
