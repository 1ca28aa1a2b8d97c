"""Expert slices on several nodes: every byte of a record arrives, and each node gets its slices only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_host_arena import NONE_FREE, FakeSystem

from strata.core import ExpertId
from strata.errors import CapacityError
from strata.memory.node_copies import NodeCopies
from strata.memory.node_experts import NodeExperts, node_bytes
from strata.store.formats import FORMATS, ExpertLayout

EXPERTS = 3


def layout(slices: int = 2, *, biases: bool = True, hidden: int = 96) -> ExpertLayout:
    return ExpertLayout(FORMATS["w4g64"], FORMATS["w8"], hidden, 64 * slices, slices, biases)


class Files:
    """Records of random bytes; reads: those that were asked for."""

    def __init__(self, layouts: dict[int, ExpertLayout]) -> None:
        rng = np.random.default_rng(1)
        self.records = {
            ExpertId(layer, index): rng.integers(0, 256, found.record_bytes, np.uint8)
            for layer, found in layouts.items()
            for index in range(EXPERTS)
        }
        self.reads: list[ExpertId] = []

    def __call__(self, expert: ExpertId) -> np.ndarray:
        self.reads.append(expert)
        return self.records[expert]


class Nodes(FakeSystem):
    """Notes what is bound to what."""

    def __init__(self) -> None:
        super().__init__(dict(NONE_FREE), transparent=False)
        self.bound: list[tuple[int, int, tuple[int, ...], bool]] = []

    def bind(self, address: int, nbytes: int, nodes: Sequence[int], *, strict: bool = False) -> None:
        self.bound.append((address, nbytes, tuple(nodes), strict))


def on_nodes(layouts: dict[int, ExpertLayout], nodes: Sequence[int], **options: object) -> NodeExperts:
    return NodeExperts(layouts, EXPERTS, nodes, Files(layouts), system=Nodes(), **options)  # type: ignore[arg-type]


@given(st.sampled_from([(2, 2), (4, 2), (4, 4), (6, 3), (2, 1)]), st.booleans(), st.permutations([0, 1, 2]))
def test_a_record_in_pieces_is_the_record(shape: tuple[int, int], biases: bool, order: Sequence[int]) -> None:
    slices, count = shape
    layouts = {2: layout(slices, biases=biases), 5: layout(slices, hidden=128)}
    files = Files(layouts)
    nodes = range(10, 10 + count)
    experts = NodeExperts(layouts, EXPERTS, nodes, files, system=Nodes())
    for layer in (5, 2, 5):
        for index in order:
            pieces = experts.pieces(ExpertId(layer, index))
            assert [len(piece) for piece in pieces[:-1]] == [layouts[layer].slice_bytes] * slices
            assert b"".join(p.tobytes() for p in pieces) == files.records[ExpertId(layer, index)].tobytes()
    assert len(files.reads) == 2 * EXPERTS == experts.placed  # once each
    for layer in (2, 5):  # later ones have not written over earlier ones
        for index in order:
            found = b"".join(p.tobytes() for p in experts.pieces(ExpertId(layer, index)))
            assert found == files.records[ExpertId(layer, index)].tobytes()


def test_each_node_holds_its_slices_and_nothing_else() -> None:
    layouts = {0: layout(4)}
    experts = on_nodes(layouts, (1, 0))
    system_ranges = {found.nodes[0]: found for found in experts.ranges()}
    for index in range(EXPERTS):
        pieces = experts.pieces(ExpertId(0, index))
        for piece, node in zip(pieces, (1, 1, 0, 0, 1), strict=True):  # biases are with the first node
            inside = system_ranges[node]
            assert inside.address <= piece.ctypes.data
            assert piece.ctypes.data + piece.nbytes <= inside.address + inside.nbytes
            assert piece.ctypes.data % 64 == 0 and not piece.flags.writeable


def test_arenas_are_bound_strictly_to_their_nodes() -> None:
    system = Nodes()
    layouts = {0: layout()}
    NodeExperts(layouts, EXPERTS, (1, 0), Files(layouts), system=system)
    sizes = node_bytes(layouts, EXPERTS, 2)
    assert [(nodes, strict) for _, _, nodes, strict in system.bound] == [((1,), True), ((0,), True)]
    assert [nbytes >= size for (_, nbytes, _, _), size in zip(system.bound, sizes, strict=True)] == [
        True,
        True,
    ]


def test_weights_are_there_once() -> None:
    """case-34: both nodes together hold what the files hold, less the padding; not a copy on each."""
    layouts = {0: layout(biases=False), 1: layout()}
    whole = EXPERTS * sum(found.record_bytes for found in layouts.values())
    assert 0.9 * whole < sum(node_bytes(layouts, EXPERTS, 2)) <= whole


def test_a_node_without_room_is_told_before_anything_is_taken() -> None:
    """case-34: checked again when a run starts."""
    layouts = {0: layout()}
    need = node_bytes(layouts, EXPERTS, 2)
    on_nodes(layouts, (0, 1), free={0: need[0], 1: need[1]})
    system = Nodes()
    with pytest.raises(CapacityError, match=f"{need[1]} bytes on memory node 1, {need[1] - 1} are free"):
        NodeExperts(
            layouts, EXPERTS, (0, 1), Files(layouts), free={0: need[0], 1: need[1] - 1}, system=system
        )
    assert not system.calls


def test_a_record_that_cannot_be_read_is_asked_for_again() -> None:
    layouts = {0: layout()}
    files, broken = Files(layouts), [True]

    def record(expert: ExpertId) -> np.ndarray:
        if broken:
            broken.pop()
            raise OSError("the disk is gone")
        return files(expert)

    experts = NodeExperts(layouts, EXPERTS, (0, 1), record, system=Nodes())
    with pytest.raises(OSError, match="the disk is gone"):
        experts.pieces(ExpertId(0, 1))
    pieces = experts.pieces(ExpertId(0, 1))
    assert b"".join(p.tobytes() for p in pieces) == files.records[ExpertId(0, 1)].tobytes()


def test_copies_of_the_hottest_and_the_others_where_they_are() -> None:
    layouts = {0: layout(), 3: layout(hidden=128)}
    files, hot = Files(layouts), [ExpertId(3, 1), ExpertId(0, 2)]
    experts = NodeCopies(layouts, EXPERTS, (1, 0), files, system=Nodes(), hot=hot)
    sizes = sum(layouts[expert.layer].record_bytes for expert in hot)
    assert [found.nbytes for found in experts.ranges()] == [sizes, sizes] and experts.copies == 2
    for expert, record in files.records.items():
        found = experts.pieces(expert)
        if expert not in hot:
            assert found is record
            continue
        assert isinstance(found, tuple) and len({copy.ctypes.data for copy in found}) == 2
        assert all(copy.tobytes() == record.tobytes() and not copy.flags.writeable for copy in found)
    with pytest.raises(CapacityError, match=f"{sizes} bytes on memory node 0, {sizes - 1} are free"):
        NodeCopies(layouts, EXPERTS, (1, 0), files, system=Nodes(), hot=hot, free={0: sizes - 1})
