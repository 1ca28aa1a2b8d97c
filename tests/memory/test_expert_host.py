"""Memory as a cache of the disk: reads that are late, fail or are given up; every record is the right one."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from late_reader import LateReader, record_of
from numpy.typing import NDArray

from strata.core import ExpertId
from strata.errors import CapacityError, StoreError
from strata.memory.expert_host import MOST_BUFFERS, MOST_PREFETCHES, HostExperts
from strata.memory.experts import ExpertSpace
from strata.memory.heat import Heat
from strata.memory.policies import POLICIES

SPACE = ExpertSpace((0, 12, 12))
BYTES = {1: 64, 2: 96}  # layers may differ


def make_host(
    places: int, reader: LateReader, policy: str = "lru", heat: Heat | None = None, spare: int = 0
) -> HostExperts:
    """Its guesses are trusted from the start."""
    memory = np.zeros(places * max(BYTES.values()) + spare, np.uint8)
    host = HostExperts(SPACE, BYTES, memory, reader, POLICIES[policy], heat)
    host.foresight.trust = [1.0] * len(host.foresight.trust)
    return host


def check(layer: int, group: dict[int, NDArray[np.uint8]]) -> None:
    for index, record in group.items():
        assert np.array_equal(record, record_of(ExpertId(layer, index), BYTES[layer]))
        assert not record.flags.writeable


def drain(host: HostExperts) -> None:
    """Everything that was begun ends; nothing stays behind."""
    while not host.idle:
        host.collect(1.0)
    host.check_integrity()


def one_step(host: HostExperts, chance: random.Random) -> None:
    """Ask for some experts of a layer as decode or a prompt does, and perhaps leave early."""
    layer = chance.choice([1, 2])
    wanted = chance.sample(range(12), chance.randint(1, 12))
    ordered = chance.random() < 0.4
    leave_after = chance.choice([None, None, None, 0, 1, 3])
    came: list[int] = []
    with host.bring(layer, wanted, passing=chance.random() < 0.3, ordered=ordered) as arriving:
        if chance.random() < 0.5:
            host.expect(3 - layer, chance.sample(range(12), 4))
        for group in arriving:
            check(layer, group)
            came += group
            if leave_after is not None and len(came) > leave_after:
                break
            check(layer, group)
        else:
            assert sorted(came) == sorted(wanted)
    if ordered:
        assert came == wanted[: len(came)]


@settings(max_examples=50, deadline=None)
@given(
    places=st.integers(1, 30), seed=st.integers(0, 2**32), policy=st.sampled_from(sorted(POLICIES)),
    failing=st.sampled_from([0.0, 0.0, 0.1, 0.5]),
)  # fmt: skip
def test_case_42_every_record_is_right_and_nothing_is_lost(
    places: int, seed: int, policy: str, failing: float
) -> None:
    """Reads race with evictions, guesses and steps that end early: no place has two writers, no record is
    another's, nothing waits for ever."""
    chance = random.Random(seed)
    reader = LateReader(seed + 1, fails=lambda _: chance.random() < failing)
    host = make_host(places, reader, policy)
    for _ in range(30):
        try:
            one_step(host, chance)
        except StoreError as error:
            assert failing and "cannot be read" in str(error)
        host.check_integrity()
    drain(host)
    assert len(host._buffers) == min(MOST_BUFFERS, max(1, places // 4))
    reader.fails = lambda _: False
    for layer in (1, 2):  # what failed before can be read now
        with host.bring(layer, range(12)) as arriving:
            assert sorted(index for group in arriving for index in group) == list(range(12))


def test_what_is_missing_is_asked_for_at_once_and_what_is_there_comes_first() -> None:
    reader = LateReader(1)
    host = make_host(16, reader)
    with host.bring(1, [3, 5]) as arriving:
        list(arriving)
    with host.bring(1, [1, 3, 5, 7]) as arriving:
        assert set(reader.submitted[2:]) == {ExpertId(1, 1), ExpertId(1, 7)}
        assert set(next(arriving)) == {3, 5}


def test_all_present_costs_no_read() -> None:
    reader = LateReader(1)
    host = make_host(40, reader)
    for _ in range(3):
        for layer in (1, 2):
            with host.bring(layer, range(12)) as arriving:
                list(arriving)
    assert len(reader.submitted) == 24


def test_case_41_a_prompt_displaces_nothing() -> None:
    """A chunk that touches every expert leaves what decoding has brought where it is, and reads each missing
    one once."""
    reader = LateReader(2)
    host = make_host(10, reader)
    hot = list(range(host.cache.slots))
    with host.bring(1, hot) as arriving:
        list(arriving)
    reader.submitted.clear()
    for layer in (1, 2):
        with host.bring(layer, range(12), passing=True, ordered=True) as arriving:
            assert [index for group in arriving for index in group] == list(range(12))
    missing = [ExpertId(1, index) for index in range(12) if index not in hot]
    assert sorted(reader.submitted) == sorted([*missing, *(ExpertId(2, index) for index in range(12))])
    assert all(host.cache.slot_of(ExpertId(1, index)) is not None for index in hot)


def test_a_guess_that_is_right_is_read_once() -> None:
    reader = LateReader(3)
    host = make_host(16, reader)
    host.expect(2, [4, 5])
    with host.bring(2, [4, 5, 6]) as arriving:
        assert sorted(index for group in arriving for index in group) == [4, 5, 6]
    assert sorted(reader.submitted) == [ExpertId(2, 4), ExpertId(2, 5), ExpertId(2, 6)]
    assert host.statistics.guessed == host.statistics.right == 2


def test_needed_experts_hurry_guesses_along() -> None:
    reader = LateReader(3)
    host = make_host(16, reader)
    reader.finished = lambda _: []  # type: ignore[method-assign]  # a slow disk
    host.expect(2, [4, 5])
    assert not reader.urgent
    with host.bring(2, [4]):
        assert [reader.submitted[ticket] for ticket in reader.urgent] == [ExpertId(2, 4)]


def test_wrong_guesses_that_have_not_begun_are_given_up() -> None:
    reader = LateReader(3)
    host = make_host(16, reader)
    reader.finished = lambda _: []  # type: ignore[method-assign]  # a slow disk
    host.expect(2, [4, 5, 6])
    host.bring(2, [6]).close()
    assert host.statistics.dropped == 2
    assert [expert for expert, _ in reader.under_way().values()] == [ExpertId(2, 6)]


def test_guesses_are_bounded() -> None:
    reader = LateReader(3)
    host = make_host(30, reader)
    host.expect(1, range(12))
    host.expect(2, range(12))
    assert len(reader.submitted) == MOST_PREFETCHES


def test_less_than_one_record_is_refused_with_both_numbers() -> None:
    with pytest.raises(CapacityError, match=r"90 bytes .* has 96"):
        make_host(0, LateReader(1), spare=90)


def test_two_layers_at_once_with_one_place_is_an_error_and_no_hang() -> None:
    host = make_host(1, LateReader(1))
    with host.bring(1, [0]) as first, host.bring(2, [0]) as second:
        next(first)
        with pytest.raises(CapacityError, match="waits for 1 experts"):
            next(second)
    drain(host)


def test_heat_is_read_in_the_background_hottest_first() -> None:
    heat = Heat("model", SPACE)
    for step in range(20):
        heat.add(1, [0, 1] if step % 2 else [0, 2])
    reader = LateReader(4)
    host = make_host(3, reader, heat=heat)
    assert reader.submitted == [ExpertId(1, 0), ExpertId(1, 1)]  # two slots, one buffer
    assert not reader.urgent
    drain(host)
    with host.bring(1, [0]) as arriving:
        check(1, next(arriving))
    assert len(reader.submitted) == 2


def test_use_becomes_heat_but_prompts_do_not() -> None:
    heat = Heat("model", SPACE)
    host = make_host(8, LateReader(5), heat=heat)
    host.bring(1, [3]).close()
    host.bring(1, [4], passing=True).close()
    assert heat.warm_order(9) == [ExpertId(1, 3)]
