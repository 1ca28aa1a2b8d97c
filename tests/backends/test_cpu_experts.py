"""Dense FFN and routed experts of the CPU backend against `reference`, on every instruction set."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from packed import interleaved_matrix, random_bank, random_matrix

from strata.backends.base import ExpertBank, Gating
from strata.backends.cpu import CpuBackend
from strata.backends.isa import NAMES, extension
from strata.backends.reference import ReferenceBackend
from strata.store.formats import FORMATS, ExpertLayout

ISAS = [name for name in NAMES if extension().features()[name]]
GATINGS = (Gating("silu"), Gating("gelu_tanh"), Gating("swiglu_clamped", 1.702, 7.0))
REFERENCE = ReferenceBackend(torch.float64)
EXPERTS, TOP_K = 6, 2


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def layout(fmt: str = "w4g64", **changes: object) -> ExpertLayout:
    base = ExpertLayout(FORMATS[fmt], FORMATS[fmt], hidden=128, width=128, slices=1, biases=False)
    return replace(base, **changes)  # type: ignore[arg-type]


def batch(tokens: int, hidden: int, seed: int = 3) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x, ids and weights; expert 4 never gets a token."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, hidden), dtype=np.float32)
    choices = np.array([e for e in range(EXPERTS) if e != 4])
    ids = np.array([rng.permutation(choices)[:TOP_K] for _ in range(tokens)], np.int32).reshape(tokens, TOP_K)
    return x, ids, rng.random((tokens, TOP_K), dtype=np.float32)


def want(bank: ExpertBank, tokens: int, gating: Gating) -> np.ndarray:
    x, ids, weights = batch(tokens, bank.layout.hidden)
    return REFERENCE.experts(torch.from_numpy(x).double(), ids, weights, bank, gating).numpy()


def relative(got: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(got - wanted) / max(np.linalg.norm(wanted), 1e-30))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_experts_of_every_format(isa: str, fmt: str, tokens: int) -> None:
    bank = random_bank(layout(fmt), EXPERTS)
    x, ids, weights = batch(tokens, 128)
    exact = CpuBackend(threads=2, activations="f32", isa_name=isa).experts(x, ids, weights, bank, GATINGS[0])
    assert relative(exact, want(bank, tokens, GATINGS[0])) < 1e-5
    fast = CpuBackend(threads=2, isa_name=isa).experts(x, ids, weights, bank, GATINGS[0])
    assert relative(fast, want(bank, tokens, GATINGS[0])) < 0.02  # two roundings to int8, 0.5 % each


@pytest.mark.parametrize("gating", GATINGS, ids=lambda gating: gating.kind)
@pytest.mark.parametrize(
    "shape",
    [
        layout("mxfp4", biases=True),
        layout("bf16", biases=True, width=100),
        layout(slices=2, width=256, biases=True),
        layout("w4g32m", hidden=200, width=37),
        layout("w8g32", slices=4, width=256, hidden=72),
        layout("w4g128", down_format=FORMATS["w8"]),
    ],
    ids=str,
)
def test_gatings_biases_slices_and_odd_widths(isa: str, shape: ExpertLayout, gating: Gating) -> None:
    bank = random_bank(shape, EXPERTS)
    for tokens in (1, 9):
        x, ids, weights = batch(tokens, shape.hidden)
        for activations, bound in (("f32", 1e-5), ("int8", 0.03)):
            backend = CpuBackend(threads=2, activations=activations, isa_name=isa)
            got = backend.experts(x, ids, weights, bank, gating)
            assert relative(got, want(bank, tokens, gating)) < bound


def test_records_are_asked_for_once_and_when_needed() -> None:
    backend, asked = CpuBackend(threads=2), []
    bank = random_bank(layout(), EXPERTS)
    watched = replace(bank, record=lambda index: asked.append(index) or bank.record(index))
    x, ids, weights = batch(0, 128)
    assert backend.experts(x, ids, weights, watched, GATINGS[0]).shape == (0, 128)
    assert asked == []
    x, ids, weights = batch(12, 128)
    backend.experts(x, ids, weights, replace(watched), GATINGS[0])  # another bank, so another table
    asked.clear()
    for _ in range(2):
        backend.experts(x, ids, weights, watched, GATINGS[0])
    assert sorted(asked) == sorted(set(ids.flatten().tolist()))


def test_what_cannot_be_read_is_asked_for_again() -> None:
    """An error of the store reaches the caller, and the next step may have more luck."""
    backend, bank = CpuBackend(threads=1), random_bank(layout(), EXPERTS)
    failing = [True]

    def record(index: int) -> np.ndarray:
        if failing and index == 2:
            failing.pop()
            raise OSError("the disk is gone")
        return bank.record(index)

    x, ids, weights = batch(1, 128)
    ids[:] = [[1, 2]]
    watched = replace(bank, record=record)
    with pytest.raises(OSError, match="the disk is gone"):
        backend.experts(x, ids, weights, watched, GATINGS[0])
    again = backend.experts(x, ids, weights, watched, GATINGS[0])
    assert np.array_equal(again, backend.experts(x, ids, weights, bank, GATINGS[0]))


def test_a_table_lives_as_long_as_its_bank() -> None:
    backend, bank = CpuBackend(threads=1), random_bank(layout(), EXPERTS)
    record = bank.record(1)
    held = sys.getrefcount(record)
    x, ids, weights = batch(1, 128)
    ids[:] = [[1, 2]]
    backend.experts(x, ids, weights, bank, GATINGS[0])
    assert sys.getrefcount(record) > held
    del bank
    assert sys.getrefcount(record) < held


@pytest.mark.parametrize("backend", [CpuBackend(threads=2), ReferenceBackend()], ids=lambda b: b.name)
def test_a_subset_of_the_experts(backend: CpuBackend | ReferenceBackend) -> None:
    """Two halves computed in two places add up to the whole; only their own experts are read."""
    bank = random_bank(layout(), EXPERTS)
    x, ids, weights = batch(9, 128)
    rows = x if backend.name == "cpu" else torch.from_numpy(x)
    whole = backend.experts(rows, ids, weights, bank, GATINGS[0])
    asked: list[int] = []
    watched = replace(bank, record=lambda index: asked.append(index) or bank.record(index))
    parts = [
        backend.experts(rows, ids, weights, watched, GATINGS[0], active) for active in ([1, 3, 4], [0, 2, 5])
    ]
    assert sorted(asked) == [0, 1, 2, 3, 4, 5]
    np.testing.assert_allclose(parts[0] + parts[1], whole, rtol=1e-5, atol=1e-5)
    nothing = backend.experts(rows, ids, weights, watched, GATINGS[0], [])
    assert not np.asarray(nothing).any()


# Down has 8 or 5 row blocks: two threads share 5 of each of few experts unevenly, so they split all together.
@pytest.mark.parametrize("hidden", [128, 72])
@pytest.mark.parametrize("activations", ["int8", "f32"])
def test_same_bits_alone_in_a_batch_with_other_threads_and_isa(activations: str, hidden: int) -> None:
    bank = random_bank(layout(hidden=hidden, slices=2, width=256, biases=True), EXPERTS)
    x, ids, weights = batch(50, hidden)
    backends = [CpuBackend(threads=n, activations=activations, isa_name=i) for n in (1, 2) for i in ISAS]
    wanted = backends[0].experts(x, ids, weights, bank, GATINGS[2])
    for backend in backends:
        assert np.array_equal(backend.experts(x, ids, weights, bank, GATINGS[2]), wanted)
        for row in (0, 31):
            part = slice(row, row + 1)
            alone = backend.experts(x[part], ids[part], weights[part], bank, GATINGS[2])
            assert np.array_equal(alone[0], wanted[row])


@pytest.mark.parametrize(("hidden", "width"), [(128, 256), (100, 37), (72, 8)])
def test_dense_ffn(isa: str, hidden: int, width: int) -> None:
    gate_up, down = interleaved_matrix("w4g64", hidden, width), random_matrix("w4g64", hidden, width)
    wide = ReferenceBackend(torch.float64)
    for tokens in (0, 1, 5, 140):
        x = np.random.default_rng(1).standard_normal((tokens, hidden), dtype=np.float32)
        for activations, bound in (("f32", 1e-5), ("int8", 0.02)):
            backend = CpuBackend(threads=2, activations=activations, isa_name=isa)
            got = backend.ffn(x, backend.weight(gate_up), backend.weight(down), width, GATINGS[0])
            if tokens == 0:
                assert got.shape == (0, hidden)
                continue
            theirs = wide.ffn(
                torch.from_numpy(x).double(), wide.weight(gate_up), wide.weight(down), width, GATINGS[0]
            )
            assert relative(got, theirs.numpy()) < bound


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "swiglu_clamped"])
def test_gate_far_from_zero(isa: str, kind: str) -> None:
    """Large gates neither overflow nor lose the limit."""
    bank = random_bank(layout("f16"), EXPERTS)
    x, ids, weights = batch(4, 128)
    gating = Gating(kind)  # type: ignore[arg-type]
    scaled = (x * 1000).astype(np.float32)
    got = CpuBackend(threads=1, isa_name=isa).experts(scaled, ids, weights, bank, gating)
    theirs = REFERENCE.experts(torch.from_numpy(scaled).double(), ids, weights, bank, gating).numpy()
    # Sums near 10^4 are rounded to 10^-3 before the clamp, which lets only gates near zero through.
    assert relative(got, theirs) < 1e-4


def test_wrong_shapes_name_both_numbers() -> None:
    backend, bank = CpuBackend(threads=1), random_bank(layout(), EXPERTS)
    x, ids, weights = batch(3, 128)
    with pytest.raises(ValueError, match=r"columns of x are 64.*128"):
        backend.experts(x[:, :64], ids, weights, bank, GATINGS[0])
    with pytest.raises(ValueError, match=r"rows of ids are 2.*3"):
        backend.experts(x, ids[:2], weights, bank, GATINGS[0])
    with pytest.raises(ValueError, match=r"routing weights are 4.*6"):
        backend.experts(x, ids, weights[:2], bank, GATINGS[0])
    cut = replace(bank, record=lambda index: bank.record(index)[:-1])
    with pytest.raises(ValueError, match="bytes of an expert's record are"):
        backend.experts(x, ids, weights, cut, GATINGS[0])
