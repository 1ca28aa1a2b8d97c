"""heat.json: a hint that helps, and never an error."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata.core import ExpertId
from strata.memory.experts import ExpertSpace
from strata.memory.heat import HALF_LIFE_STEPS, HEAT, Heat
from strata.memory.policies import LfuPolicy

SPACE = ExpertSpace((3, 0, 4))


def warm() -> Heat:
    heat = Heat("m", SPACE)
    for step in range(10):
        heat.add(0, [0, step % 2 + 1])
        heat.add(2, [3])
    return heat


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    heat = warm()
    assert heat.save(tmp_path) == ""
    loaded = Heat.load(tmp_path, "m", SPACE)
    assert loaded.reason == ""
    for layer in range(3):
        np.testing.assert_allclose(loaded.heat.shares(layer), heat.shares(layer), atol=1e-3)
    assert [path.name for path in tmp_path.iterdir()] == [HEAT], "no temporary file is left"


def test_the_hottest_come_last() -> None:
    order = warm().warm_order(10)
    assert set(order[-2:]) == {ExpertId(0, 0), ExpertId(2, 3)}
    assert set(order[:-2]) == {ExpertId(0, 1), ExpertId(0, 2)}, "never used: not warmed"
    assert set(warm().warm_order(2)) == {ExpertId(0, 0), ExpertId(2, 3)}
    assert warm().warm_order(0) == []


def test_old_uses_fade() -> None:
    heat = Heat("m", ExpertSpace((2,)))
    heat.add(0, [0])
    heat.add(0, [0])
    before = heat.shares(0)[0]
    for _ in range(100):
        heat.add(0, [1])
    assert before == pytest.approx(1.0, abs=0.01)
    keep = 0.5 ** (1 / HALF_LIFE_STEPS)
    assert heat.shares(0)[0] == pytest.approx(2 / 102, rel=0.01)
    assert heat._uses[0][0] == pytest.approx((1 + keep) * keep**100)


def test_a_policy_is_seeded() -> None:
    policy = LfuPolicy(SPACE, 4)
    warm().seed(policy)
    for index in range(3):
        policy.on_insert(ExpertId(0, index))
    first = policy.victim(lambda expert: True)
    assert first in (ExpertId(0, 1), ExpertId(0, 2))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"kind": "strata-heat"}',
        b'{"kind": "strata-heat", "version": 99, "model": "m", "layers": []}',
        b'{"kind": "strata-heat", "version": 1, "model": "m"}',
        b'{"kind": "strata-heat", "version": 1, "model": "m", "layers": 3}',
        b'{"kind": "strata-heat", "version": 1, "model": "m", "layers": []}',
        b'{"kind": "strata-heat", "version": 1, "model": "m", "layers": [1, 2, 3]}',
    ],
)
def test_damage_is_a_cold_start(tmp_path: Path, content: bytes) -> None:
    (tmp_path / HEAT).write_bytes(content)
    loaded = Heat.load(tmp_path, "m", SPACE)
    assert loaded.reason
    assert loaded.heat.warm_order(10) == []


@pytest.mark.parametrize("value", [-1, 1e300, "1", None, True, [1], 11, float("nan"), float("inf")])
def test_odd_counts_are_a_cold_start(tmp_path: Path, value: object) -> None:
    """11 uses in 10 steps cannot be; NaN would poison every ranking."""
    warm().save(tmp_path)
    data = json.loads((tmp_path / HEAT).read_text())
    data["layers"][2]["uses"][1] = value
    (tmp_path / HEAT).write_text(json.dumps(data))
    loaded = Heat.load(tmp_path, "m", SPACE)
    assert "ignored" in loaded.reason
    assert not any(loaded.heat.shares(layer).any() for layer in range(3)), "no half-read heat"


@given(content=st.binary(max_size=200))
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_a_cold_start(tmp_path: Path, content: bytes) -> None:
    (tmp_path / HEAT).write_bytes(content)
    assert Heat.load(tmp_path, "m", SPACE).reason


def test_another_model_or_shape_is_a_cold_start(tmp_path: Path) -> None:
    warm().save(tmp_path)
    assert "another model" in Heat.load(tmp_path, "other", SPACE).reason
    assert "layer 2 has 4 experts, the model 5" in Heat.load(tmp_path, "m", ExpertSpace((3, 0, 5))).reason
    assert "3 layers, the model has 1" in Heat.load(tmp_path, "m", ExpertSpace((3,))).reason


def test_absence_and_a_fifo_are_a_cold_start(tmp_path: Path) -> None:
    assert "no " in Heat.load(tmp_path, "m", SPACE).reason
    os.mkfifo(tmp_path / HEAT)
    assert "not a regular file" in Heat.load(tmp_path, "m", SPACE).reason


def test_a_store_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    assert "was not written" in warm().save(tmp_path / "absent")


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warm().save(tmp_path)
    before = (tmp_path / HEAT).read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert "No space left" in warm().save(tmp_path)
    assert (tmp_path / HEAT).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [HEAT]
