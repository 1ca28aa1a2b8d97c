"""Where pages lie, by made-up nodes: what is counted, what is moved, and what is said."""

from __future__ import annotations

import errno
import mmap

import pytest
from fake_numa import FakeNuma
from hypothesis import given
from hypothesis import strategies as st

from strata.hardware.page_check import BATCH, PlacedRange, check_pages

PAGE = mmap.PAGESIZE
START = 1 << 30


def experts(pages: int, nodes: tuple[int, ...] = (1,)) -> PlacedRange:
    return PlacedRange("experts", START, pages * PAGE, nodes)


def lying(places: list[int | None]) -> FakeNuma:
    """Page i on the node given; None: not touched."""
    return FakeNuma({START + i * PAGE: node for i, node in enumerate(places) if node is not None})


def test_all_at_home_is_one_call_and_moves_nothing() -> None:
    calls = lying([1] * 1000)
    found = check_pages(experts(1000), calls, samples=100)
    assert (found.sampled, found.right, found.wrong, found.moved, calls.calls) == (100, 100, 0, 0, 1)
    assert found.describe() == "experts: 100 of 100 sampled pages on node 1"


def test_misplaced_pages_are_counted_by_node_and_brought_home() -> None:
    calls = lying([1, 0, None, 2, 1, 0])
    told = check_pages(experts(6), calls, move=False)
    assert told.describe() == (
        "experts: 2 of 5 sampled pages on node 1, 2 on node 0, 1 on node 2, 1 not touched yet"
    )
    found = check_pages(experts(6), calls)
    assert (found.wrong, found.moved, found.stuck) == (3, 3, 0)
    assert found.describe().endswith("; 3 pages moved")
    assert check_pages(experts(6), calls).wrong == 0


def test_what_does_not_move_is_said() -> None:
    calls = lying([0, 0, 1])
    calls.stuck = {START}
    found = check_pages(experts(3), calls)
    assert (found.moved, found.stuck) == (1, 1)
    assert "1 pages could not be moved" in found.describe()


def test_of_several_nodes_each_is_right() -> None:
    calls = lying([0, 1, 2, 3])
    found = check_pages(experts(4, (0, 1)), calls)
    assert (found.right, found.wrong, found.moved) == (2, 2, 2)
    assert {calls.where[START + i * PAGE] for i in (2, 3)} == {0}


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM])
def test_a_kernel_that_does_not_answer_is_no_error(number: int) -> None:
    found = check_pages(experts(4), FakeNuma(refuse=number))
    assert found.problem == errno.errorcode[number] and found.sampled == 0
    assert found.describe() == f"experts: not checked ({errno.errorcode[number]})"


def test_pages_that_the_kernel_will_not_name_are_neither_right_nor_wrong() -> None:
    found = check_pages(experts(2), lying([-errno.EACCES, 1]))
    assert (found.right, found.unknown, found.wrong) == (1, 1, 0)


def test_more_pages_than_one_call_takes() -> None:
    calls = lying([0] * (2 * BATCH + 7))
    assert check_pages(experts(2 * BATCH + 7), calls).moved == 2 * BATCH + 7


@given(
    st.lists(st.sampled_from([None, 0, 1, 2]), min_size=1, max_size=60),
    st.integers(1, 80),
    st.sampled_from([(1,), (0, 1), (2,)]),
    st.integers(0, PAGE - 1),
)
def test_samples_add_up_and_nothing_stays_misplaced(
    places: list[int | None], samples: int, nodes: tuple[int, ...], inside: int
) -> None:
    calls = lying(places)
    found = PlacedRange("x", START + inside, len(places) * PAGE - inside, nodes)
    check = check_pages(found, calls, samples)
    assert check.sampled == min(samples, len(places))
    assert check.right + check.absent + check.unknown + check.wrong == check.sampled
    if check.wrong or samples >= len(places):
        assert all(node in nodes for node in calls.where.values())
