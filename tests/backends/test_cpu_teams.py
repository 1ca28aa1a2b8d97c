"""Experts computed by the threads of the node that holds their slices: the same bits as by all threads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from packed import random_bank

from strata.backends.base import ExpertBank, Gating
from strata.backends.cpu import CpuBackend
from strata.backends.isa import NAMES, extension
from strata.hardware.cpu import CpuChoice
from strata.store.formats import FORMATS, ExpertLayout

EXPERTS, TOP_K = 6, 2
GATING = Gating("swiglu_clamped", 1.702, 7.0)
ISAS = [name for name in NAMES if extension().features()[name]]


def layout(**changes: object) -> ExpertLayout:
    base = ExpertLayout(FORMATS["w4g64"], FORMATS["w4g64"], hidden=136, width=512, slices=4, biases=True)
    return replace(base, **changes)  # type: ignore[arg-type]


def backend(nodes: tuple[int, ...], **options: object) -> CpuBackend:
    """As many unbound threads as there are nodes told, all of CPU 0."""
    chosen = CpuChoice((0,) * len(nodes), bind=False, teams=nodes)
    return CpuBackend(chosen=chosen, **options)  # type: ignore[arg-type]


def in_pieces(bank: ExpertBank) -> ExpertBank:
    """The same experts with every slice in memory of its own."""

    def placed(index: int) -> tuple[np.ndarray, ...]:
        record, size, count = bank.record(index), bank.layout.slice_bytes, bank.layout.slices
        pieces = [record[i * size : (i + 1) * size].copy() for i in range(count)]
        return (*pieces, record[count * size :].copy())

    def refuse(index: int) -> np.ndarray:
        raise AssertionError(f"expert {index} was read from the file, not from its nodes")

    return replace(bank, record=refuse, placed=placed)


def copied(bank: ExpertBank, copies: int) -> ExpertBank:
    """The same experts once for every node, but expert 3, which all read in one place."""

    def placed(index: int) -> tuple[np.ndarray, ...]:
        record = bank.record(index)
        return record if index == 3 else tuple(record.copy() for _ in range(copies))  # type: ignore[return-value]

    return replace(bank, placed=placed, copies=copies)


def batch(tokens: int, hidden: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(tokens)
    ids = np.array([rng.permutation(EXPERTS)[:TOP_K] for _ in range(tokens)], np.int32)
    return rng.standard_normal((tokens, hidden), np.float32), ids, rng.random((tokens, TOP_K), np.float32)


# 1 and 3 tokens: every node computes its slices of down, too; 60: down is shared out by columns.
@pytest.mark.parametrize("tokens", [1, 3, 60])
@pytest.mark.parametrize("nodes", [(0, 1), (0, 0, 1, 1), (0, 1, 1), (0, 1, 2, 3)], ids=str)
@pytest.mark.parametrize("isa", ISAS)
def test_same_bits_whichever_node_computes(isa: str, nodes: tuple[int, ...], tokens: int) -> None:
    bank, (x, ids, weights) = random_bank(layout(), EXPERTS), batch(tokens, 136)
    for activations in ("int8", "f32"):
        alone = backend((0,), isa_name=isa, activations=activations)
        wanted = alone.experts(x, ids, weights, bank, GATING)
        shared = backend(nodes, isa_name=isa, activations=activations)
        for placed in (bank, in_pieces(bank), copied(bank, max(nodes) + 1)):
            assert shared.experts(x, ids, weights, placed, GATING).tobytes() == wanted.tobytes()


@pytest.mark.parametrize("changes", [{"slices": 1}, {"slices": 2, "width": 128}, {"biases": False}], ids=str)
def test_slices_that_cannot_be_dealt_are_computed_by_all(changes: dict[str, object]) -> None:
    bank, (x, ids, weights) = random_bank(layout(**changes), EXPERTS), batch(2, 136)
    wanted = backend((0,)).experts(x, ids, weights, bank, GATING)
    for nodes in ((0, 1, 2), (0, 1, 2, 3)):
        assert backend(nodes).experts(x, ids, weights, bank, GATING).tobytes() == wanted.tobytes()


def test_threads_of_a_node_stand_together() -> None:
    for nodes, text in (((0, 1, 0), "node 0 after node 1"), ((1, 1), "node 1 after node -1")):
        with pytest.raises(ValueError, match=text):
            backend(nodes)
    with pytest.raises(ValueError, match="1 nodes for 2 threads"):
        extension().Cpu([0, 0], "avx2", False, nodes=[0])


def test_pieces_of_a_wrong_size_are_refused() -> None:
    bank, (x, ids, weights) = random_bank(layout(), EXPERTS), batch(1, 136)
    whole = in_pieces(bank).placed
    assert whole is not None
    for spoil, text in (
        (lambda pieces: pieces[1:], "pieces of an expert's record are 4"),
        (lambda pieces: (pieces[0][1:], *pieces[1:]), "bytes of an expert's slice are"),
        (lambda pieces: (*pieces[:-1], pieces[-1][1:]), "bytes after an expert's slices are"),
    ):
        with pytest.raises(ValueError, match=text):
            placed = replace(bank, placed=lambda index, spoil=spoil: spoil(whole(index)))
            backend((0, 1)).experts(x, ids, weights, placed, GATING)


def test_every_node_reads_its_own_copy() -> None:
    """What the second node's threads compute comes from the second copy: zeros there are missed in y."""
    bank, (x, ids, weights) = random_bank(layout(slices=1, biases=False), EXPERTS), batch(1, 136)

    def placed(index: int) -> tuple[np.ndarray, ...]:
        return bank.record(index), np.zeros_like(bank.record(index))

    broken = replace(bank, placed=placed, copies=2)
    whole = backend((0,)).experts(x, ids, weights, bank, GATING)
    alone = backend((0, 0)).experts(x, ids, weights, broken, GATING)
    assert alone.tobytes() == whole.tobytes()  # no second node: nobody reads the second copy
    shared = backend((0, 1)).experts(x, ids, weights, broken, GATING)
    assert not np.array_equal(shared, whole)
