"""The tables that expert kernels look up, and what the kernel set refuses."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.backends.cuda.expert_tables import Tables
from strata.backends.cuda.experts import _require as require_experts
from strata.backends.cuda.sources import kernel_source
from strata.backends.hybrid.kernel_set import ExpertGroup
from strata.backends.parts import Gating
from strata.device.buffers import Allocation
from strata.errors import UnsupportedError
from strata.store.formats import FORMATS, ExpertLayout


def group_of(ids: np.ndarray, experts: list[int], fmt: str = "w4g64", width: int = 64) -> ExpertGroup:
    layout = ExpertLayout(FORMATS[fmt], FORMATS[fmt], 64, width, 1, False)
    memory = Allocation(1 << 40, 4096 * 64, "device", "slots").whole()
    records = [memory.slice(4096 * expert, 4096) for expert in experts]
    weights = (ids * 100 + np.arange(ids.shape[1])).astype(np.float32)
    return ExpertGroup(layout, Gating(), 64, experts, records, ids, weights, 0, lambda values, what: memory)


@settings(deadline=None)
@given(
    st.integers(1, 6), st.integers(1, 4), st.sets(st.integers(0, 7), min_size=1), st.integers(0, 2**32 - 1)
)
def test_tables_hold_every_pair_once_in_the_order_of_experts(
    rows: int, top_k: int, chosen: set[int], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    ids = np.array([rng.permutation(8)[:top_k] for _ in range(rows)], np.int32)
    experts = sorted(chosen)
    group = group_of(ids, experts)
    tables = Tables.of(group)
    parts = np.split(tables.words, np.cumsum(tables.sizes)[:-1])
    addresses, first_pair, token_of_pair, order, weights, first_of_token = (
        parts[0].view(np.uint64),
        *(part.view(np.int32) for part in parts[1:4]),
        parts[4].view(np.float32),
        parts[5].view(np.int32),
    )
    assert addresses.tolist() == [record.address for record in group.records]
    owners = np.repeat(experts, np.diff(first_pair))
    for row in range(rows):
        mine = order[first_of_token[row] : first_of_token[row + 1]]
        assert (token_of_pair[mine] == row).all()
        assert owners[mine].tolist() == sorted(set(ids[row].tolist()) & set(experts))
        found = weights[first_of_token[row] : first_of_token[row + 1]]
        choices = [ids[row].tolist().index(expert) for expert in owners[mine]]
        assert found.tolist() == group.weights[row, choices].tolist()
    assert tables.pairs == np.isin(ids, experts).sum()
    assert tables.most == max(np.diff(first_pair))


def test_experts_without_kernels_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="on a GPU: 60 elements of a slice"):
        require_experts(group_of(np.zeros((1, 1), np.int32), [0], width=60))


@pytest.mark.parametrize("suffix", ["", "_prefill"])
@pytest.mark.parametrize("file", ["linear", "expert_gate_up", "expert_down"])
def test_every_format_of_the_store_has_kernels(file: str, suffix: str) -> None:
    entries = re.findall(r"^\w+_FORMAT\((\w+), ", kernel_source(file + suffix).text, re.MULTILINE)
    assert sorted(entries) == sorted(FORMATS)
