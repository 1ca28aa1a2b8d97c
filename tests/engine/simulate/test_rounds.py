"""Field report A rebuilt: no figure of its results goes in, and every sentence follows from the numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from strata.engine.simulate import rounds, rounds_words
from strata.engine.simulate.rounds import PROFILE, SETUPS, THEIRS, Round, bits, field_model, rebuild
from strata.engine.simulate.rounds_words import demand, explain, hits_needed, rate_at
from strata.hardware.profile import HardwareProfile
from strata.hardware.profile_file import load_profile


@pytest.fixture(scope="module")
def machine() -> HardwareProfile:
    return load_profile(PROFILE)


@pytest.fixture(scope="module")
def short() -> Iterator[None]:
    """Shorter answers of fewer requests: what is looked at here is bookkeeping."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (rounds, rounds_words):
            patch.setattr(module, "ASSUMED", dataclasses.replace(rounds.ASSUMED, answer=8))
            patch.setattr(module, "STATED", dataclasses.replace(rounds.STATED, cap=5))
        yield


@pytest.fixture(scope="module")
def found(machine: HardwareProfile, short: None) -> list[Round]:
    return rebuild(machine)


def test_the_model_has_the_stated_size() -> None:
    """250 GB in BF16; 62.5 GB in INT4 without scales; 7.2 GB of experts per token."""
    bf16, int4 = (field_model(setup) for setup in SETUPS[:2])
    assert (bf16.static + bf16.expert_total) / 1e9 == pytest.approx(250, rel=0.001)
    assert (int4.static + int4.expert_total) / 1e9 == pytest.approx(62.5 * 4.25 / 4, rel=0.01)
    assert bits("w4g64") == 4.25 and bits("w4g128") == 4.125
    per_token = bf16.top_k * bf16.moe_layers * bf16.expert_bytes
    assert per_token / 1e9 == pytest.approx(2 * 115 / 64 * 2, rel=0.001)


def test_results_do_not_depend_on_theirs(
    machine: HardwareProfile, found: list[Round], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Double every figure that the report measured: ours stay as they are."""
    doubled = tuple(
        dataclasses.replace(entry, rate=2 * entry.rate, peak=2 * entry.peak, busy=entry.busy / 2)
        for entry in THEIRS
    )
    monkeypatch.setattr(rounds, "THEIRS", doubled)
    again = rebuild(machine)
    assert [entry.theirs.rate for entry in again] == [80, 144, 216]
    for before, after in zip(found, again, strict=True):
        assert [one.served for one in before.found] == [one.served for one in after.found]


def test_the_rounds_on_the_machine(found: list[Round]) -> None:
    """INT4 and a cache beat BF16 without one; no round uses more memory than there is."""
    full = [entry.found[-1] for entry in found]
    assert full[0].served.rate < full[1].served.rate
    assert all(one.peak < 24 * 2**30 for entry in found for one in entry.found)
    assert found[0].found[0].served.hit_rate < 0.05 < found[1].found[0].served.hit_rate
    assert full[1].requests == full[2].requests == rounds.STATED.cap


def test_what_a_token_needs_is_a_sum_on_paper(found: list[Round]) -> None:
    """7.2 GB per token, 288 GB/s at 40 tokens/s, 24 times 12 GB/s."""
    entry = found[0]
    need = demand(entry.model, entry.found[0].speeds, 1, 40)
    assert need.per_token / 1e9 == pytest.approx(7.19, abs=0.01)
    assert (need.per_second / 1e9, need.bus) == (pytest.approx(287.5, abs=0.5), pytest.approx(24, abs=0.1))


def test_the_hit_rate_that_is_told_gives_the_rate(found: list[Round]) -> None:
    entry = found[1]
    one = entry.found[0]
    needed = hits_needed(entry, one, 60)
    assert needed is not None and rate_at(entry, one, needed) == pytest.approx(60, rel=0.01)
    assert hits_needed(entry, one, 1e6) is None
    assert rate_at(entry, one, 0.2) < rate_at(entry, one, 0.9)


def test_sentences_change_with_the_numbers(machine: HardwareProfile, found: list[Round]) -> None:
    words = explain(found, machine)
    assert "slower than theirs" in words[0][0] and "24.0 times what the bus" in " ".join(words[0])
    assert "accepted" not in words[1] and len(words[2]) >= 4
    slow = [dataclasses.replace(entry, theirs=dataclasses.replace(entry.theirs, rate=1.0)) for entry in found]
    other = explain(slow, machine)
    assert "faster than theirs" in other[0][0] and "which bus and memory can carry" in " ".join(other[0])
    same = [
        dataclasses.replace(entry, theirs=dataclasses.replace(entry.theirs, rate=entry.found[0].served.rate))
        for entry in found
    ]
    assert "as fast as theirs" in explain(same, machine)[1][0]
