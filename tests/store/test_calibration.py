"""STATS files: what was written is read, whatever is damaged or hostile is refused by name."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tiny_model import mla_spec, moe_spec
from whole_model import write_stats

from strata.core import ExpertId
from strata.errors import FileFormatError, StoreError, StrataError, UsageError, WeightValueError
from strata.plan.spec import ModelSpec
from strata.store.calibration import CalibrationStats, DataFile, StatsInfo, model_fingerprint
from strata.store.calibration_inputs import expert_input, linear_inputs, pooled_input
from strata.store.calibration_writer import MemberStats, StatsWriter


def info_of(spec: ModelSpec, *, moments: bool = True, min_tokens: int = 3) -> StatsInfo:
    data = (DataFile("text.txt", 10, "00", 8),)
    return StatsInfo(spec, "f" * 16, 8, 4, min_tokens, moments, data, "strata test")


def random_member(random: np.random.Generator, cols: int, moments: bool, tokens: int) -> MemberStats:
    x = random.standard_normal((tokens + 2, cols)).astype(np.float32)
    size = np.abs(x)
    vectors = np.stack([size.max(axis=0), size.min(axis=0), size.mean(axis=0), (x * x).mean(axis=0)])
    full = (x.T @ x) / np.float32(len(x))
    return MemberStats(tokens, vectors, np.tril(full) + np.tril(full, -1).T if moments else None)


def random_members(info: StatsInfo, seed: int) -> dict[tuple[str, int], MemberStats]:
    random = np.random.default_rng(seed)
    return {
        (entry.name, member): random_member(random, entry.cols, info.moments, int(random.integers(0, 9)))
        for entry in linear_inputs(info.spec)
        for member in range(entry.members)
    }


def save(path: Path, info: StatsInfo, members: dict[tuple[str, int], MemberStats]) -> CalibrationStats:
    def flat() -> Iterator[tuple[str, int, MemberStats]]:
        for (name, member), stats in members.items():
            yield name, member, stats

    write_stats(path, info, flat())
    return CalibrationStats(path)


@settings(max_examples=20)
@given(st.sampled_from([moe_spec(), mla_spec(), mla_spec(0)]), st.booleans(), st.integers(0, 1 << 30))
def test_what_was_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, spec: ModelSpec, moments: bool, seed: int
) -> None:
    path = tmp_path_factory.mktemp("stats") / "model.stats"
    info = info_of(spec, moments=moments)
    members = random_members(info, seed)
    stats = save(path, info, members)
    assert stats.info == info
    for (name, member), wanted in members.items():
        found = stats.linear(name, member)
        assert (found.tokens, found.own_tokens, found.shared) == (wanted.tokens, wanted.tokens, False)
        vectors = np.stack([found.absmax, found.p999, found.mean_abs, found.mean_square])
        assert np.array_equal(vectors, wanted.vectors)
        assert (found.moments is None) == (wanted.moments is None)
        if wanted.moments is not None:
            assert np.array_equal(found.moments, wanted.moments)
            assert stats.linear(name, member, moments=False).moments is None


def test_experts_that_saw_few_rows_get_their_layers_statistics(tmp_path: Path) -> None:
    info = info_of(moe_spec(), min_tokens=5)
    members = random_members(info, 0)
    for member in range(8):
        for part in ("gate_up", "down"):
            key = expert_input(1, part), member
            members[key] = dataclasses.replace(members[key], tokens=4 if member == 6 else 5)
    stats = save(tmp_path / "s", info, members)
    assert stats.starved == {ExpertId(1, 6): 4}
    for part in ("gate_up", "down"):
        own, shared = stats.expert(ExpertId(1, 5), part), stats.expert(ExpertId(1, 6), part)
        pooled = members[pooled_input(1, part), 0]
        assert not own.shared and np.array_equal(own.moments, members[expert_input(1, part), 5].moments)
        assert shared.shared and (shared.own_tokens, shared.tokens) == (4, pooled.tokens)
        assert np.array_equal(shared.moments, pooled.moments)


def test_matrices_that_read_the_same_share_an_entry(tmp_path: Path) -> None:
    stats = save(tmp_path / "s", info_of(mla_spec()), random_members(info_of(mla_spec()), 1))
    for one, other in (
        ("layers.0.attn.q_a.weight", "layers.0.attn.kv_a.weight"),
        ("layers.1.experts.gate_up.pooled", "layers.1.shared_expert.gate_up.weight"),
    ):
        assert np.array_equal(stats.linear(one).absmax, stats.linear(other).absmax)
    assert stats.members("layers.0.attn.v_b.weight") == 4 and stats.has("head.weight")
    assert not stats.has("embed.weight")
    with pytest.raises(StoreError, match=r"no statistics of 'embed\.weight'"):
        stats.linear("embed.weight")
    with pytest.raises(StoreError, match="has 4 members, asked for 4"):
        stats.linear("layers.0.attn.v_b.weight", 4)


def test_other_tools_can_read_it(tmp_path: Path) -> None:
    members = random_members(info_of(moe_spec()), 2)
    save(tmp_path / "s", info_of(moe_spec()), members)
    with safe_open(tmp_path / "s", "np") as file:
        assert json.loads(file.metadata()["stats"])["tokens"] == 8
        counts = [members["layers.1.experts.down", member].tokens for member in range(8)]
        assert file.get_tensor("layers.1.experts.down.tokens").tolist() == counts


def test_statistics_of_another_model_are_refused(tmp_path: Path) -> None:
    spec = moe_spec()
    stats = save(tmp_path / "s", info_of(spec), random_members(info_of(spec), 0))
    stats.check_model(dataclasses.replace(spec, name="a copy"), "f" * 16)
    with pytest.raises(UsageError, match="fingerprint 0000"):
        stats.check_model(spec, "0000")
    with pytest.raises(UsageError, match="is of tiny"):
        stats.check_model(moe_spec(3), "f" * 16)


def test_the_fingerprint_is_of_the_weights_and_not_of_the_name() -> None:
    spec = moe_spec()

    def plain(name: str) -> np.ndarray:
        return np.full(3, len(name), np.float32)

    first = model_fingerprint(spec, plain)
    assert first == model_fingerprint(dataclasses.replace(spec, name="x"), plain)
    assert first != model_fingerprint(spec, lambda name: plain(name) + ("router" in name))
    assert first != model_fingerprint(dataclasses.replace(spec, norm_eps=1e-6), plain)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_is_refused_when_written(tmp_path: Path, value: float) -> None:
    members = random_members(info_of(moe_spec()), 0)
    stats = members["head.weight", 0]
    stats.vectors[3, 7] = value
    with pytest.raises(WeightValueError, match=r"head\.weight, member 0: NaN or Inf"):
        StatsWriter(tmp_path / "s", info_of(moe_spec())).write("head.weight", 0, stats)


def read_all(path: Path) -> None:
    stats = CalibrationStats(path)
    for entry in linear_inputs(stats.info.spec):
        for member in range(entry.members):
            stats.linear(entry.name, member)
    assert stats.starved is not None


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "s"
    save(path, info_of(moe_spec()), random_members(info_of(moe_spec()), 3))
    read_all(path)
    return path.read_bytes()


@settings(max_examples=150)
@given(data=st.data())
def test_damage_is_an_error_of_ours(
    tmp_path_factory: pytest.TempPathFactory, whole: bytes, data: st.DataObject
) -> None:
    """One byte changed, or the end cut off: never numbers that nobody measured."""
    path = tmp_path_factory.mktemp("damage") / "s"
    if data.draw(st.booleans()):
        path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    else:
        at = data.draw(st.one_of(st.integers(0, 4000), st.integers(0, len(whole) - 1)))
        changed = bytearray(whole)
        changed[at] ^= data.draw(st.integers(1, 255))
        path.write_bytes(bytes(changed))
    try:
        read_all(path)
    except StrataError:
        return
    info = CalibrationStats(path).info
    assert info != info_of(moe_spec()), "a changed byte was believed"


def test_a_hostile_file_with_right_checksums_is_refused(tmp_path: Path) -> None:
    members = random_members(info_of(moe_spec()), 0)
    members["head.weight", 0].vectors[1] = members["head.weight", 0].vectors[0] + 1
    save(tmp_path / "s", info_of(moe_spec()), members)
    with pytest.raises(StoreError, match="no possible statistics"):
        read_all(tmp_path / "s")


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": -1},
        {"tokens": "8"},
        {"moments": 1},
        {"spec": {}},
        {"data": 3},
        {"window": 1 << 60},
        {"x": 1},
    ],
)
def test_impossible_metadata_is_refused(change: dict[str, object]) -> None:
    text = json.loads(info_of(moe_spec()).to_json())
    with pytest.raises(FileFormatError, match="somewhere"):
        StatsInfo.from_json(json.dumps({**text, **change}), "somewhere")


def test_too_many_layers_are_refused_before_they_are_listed() -> None:
    text = json.loads(info_of(moe_spec()).to_json())
    text["spec"]["layers"], text["spec"]["moe_layers"] = 1 << 26, []
    with pytest.raises(FileFormatError, match="at most 10000"):
        StatsInfo.from_json(json.dumps(text), "somewhere")
