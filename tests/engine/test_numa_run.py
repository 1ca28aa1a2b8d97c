"""A run on two made-up memory nodes: who goes where, the same text, and what is checked afterwards."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from fake_numa import FakeNuma

from strata.backends.base import KvSpec
from strata.core import Request, SamplingParams
from strata.engine.engine import Engine
from strata.engine.load import load_engine, plan_store
from strata.engine.placement import NumaSystem, settle
from strata.engine.speculative.draft_model import DraftModel
from strata.engine.speculative.make import SpeculationOptions
from strata.errors import CapacityError
from strata.hardware.numa import MemoryNode
from strata.hardware.numa_calls import Policy
from strata.hardware.profile import HardwareProfile, Processor, Rate
from strata.hardware.profile_file import load_profile
from strata.interfaces.bundled import model_path
from strata.interfaces.server.engine_figures import node_figures
from strata.memory.host_arena import System
from strata.model.footprint import contents_of_store, footprint
from strata.plan.options import PlanOptions
from strata.store.manifest import read_manifest

GIB = 1 << 30
DEMO = Path(model_path("demo"))


class BindsNothing(System):
    """Memory as it comes, for nodes that are not there."""

    def __init__(self) -> None:
        self.bound: list[tuple[tuple[int, ...], bool]] = []

    def bind(self, address: int, nbytes: int, nodes: Sequence[int], *, strict: bool = False) -> None:
        self.bound.append((tuple(nodes), strict))


class TwoNodes(NumaSystem):
    """What a run asks of a machine with nodes 0 and 1. room: free bytes on node 1."""

    def __init__(self, room: int = GIB, outer: Policy = Policy.DEFAULT) -> None:
        self.calls: FakeNuma = FakeNuma()
        self.arenas = BindsNothing()
        self.outer = (outer, (0, 1))
        self.room = room
        self.asked: list[str] = []

    def stay_on(self, cpus: Sequence[int]) -> None:
        self.asked.append(f"stay on {list(cpus)}")

    def prefer(self, node: int) -> None:
        self.asked.append(f"prefer {node}")

    def interleave(self, nodes: Sequence[int]) -> None:
        self.asked.append(f"interleave {list(nodes)}")

    def free(self) -> dict[int, int]:
        return {0: GIB, 1: self.room}


def machine(nodes: int = 2) -> HardwareProfile:
    """`nodes` nodes of one CPU each, as far as there are CPUs: threads of node 1 are on CPU 0, too."""
    made = tuple(MemoryNode(i, (i,), (i,), GIB, GIB) for i in range(nodes))
    rates = (Rate(1e10, "assumed"),) * nodes
    return HardwareProfile("test", Processor("test", "avx2", Rate(1e11, "assumed")), made, rates, nodes * GIB)


def load(system: TwoNodes, found: HardwareProfile | None = None, **options: object) -> Engine:
    plan = plan_store(DEMO, found or machine(), PlanOptions(context=128, **options))  # type: ignore[arg-type]
    return load_engine(DEMO, replace(plan, bind=False), numa=system)


def answer(engine: Engine) -> list[int]:
    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    return list(engine.generate(Request("a", [5, 77, 3, 120, 42] * 4, greedy)))


def test_slices_lie_on_two_nodes_and_the_text_is_the_same() -> None:
    system = TwoNodes()
    engine = load(system)
    assert engine.placement is not None and engine.placement.experts is not None
    alone = load(TwoNodes(), machine(1))
    assert alone.placement is not None and alone.placement.experts is None
    assert answer(engine) == answer(alone)
    assert engine.placement.experts.placed > 0
    assert {(0,), (1,)} == {nodes for nodes, strict in system.arenas.bound if strict}
    assert system.asked == ["interleave [0, 1]"]


def test_a_copy_on_every_node_gives_the_same_text() -> None:
    system = TwoNodes()
    engine = load(system, spread="replicate")
    assert engine.placement is not None and engine.placement.experts is not None
    assert engine.placement.experts.copies == 2
    assert answer(engine) == answer(load(TwoNodes(), machine(1)))
    first, second, _ = engine.placement.ranges()
    assert first.nbytes == second.nbytes and (first.nodes, second.nodes) == ((0,), (1,))


def with_draft(nodes: int) -> Engine:
    """The demo and its draft on so many nodes."""
    path = Path(model_path("demo-draft"))
    contents = contents_of_store(read_manifest(path))
    draft = footprint(contents, KvSpec.of(contents.spec, 32, "int8"))
    plan = plan_store(DEMO, machine(nodes), PlanOptions(context=128, draft=draft))
    speculation = SpeculationOptions(machine(nodes), draft=path)
    return load_engine(DEMO, replace(plan, bind=False), numa=TwoNodes(), speculation=speculation)


def test_a_draft_has_threads_of_its_own_on_the_first_of_two_nodes() -> None:
    """On one node it works on the model's; the text is the same."""
    backends = []
    for nodes in (1, 2):
        engine = with_draft(nodes)
        assert answer(engine) == answer(load(TwoNodes(), machine(1)))
        assert engine.speculator is not None and isinstance(engine.speculator.proposer, DraftModel)
        backends.append((engine.speculator.proposer.decoder.backend, engine.decoder.backend))
    (alone, model), (own, other) = backends
    assert alone is model and own is not other
    assert own.chosen_cpus.cpus == (0,) and own.chosen_cpus.nodes == (0,)


def test_one_node_asks_the_kernel_for_nothing() -> None:
    system = TwoNodes()
    engine = load(system, machine(1))
    assert system.asked == [] and system.calls.calls == 0 and not system.arenas.bound
    assert engine.placement is not None and engine.placement.describe() == ""


def test_off_asks_the_kernel_for_nothing() -> None:
    system = TwoNodes()
    engine = load(system, numa=False)
    assert system.asked == [] and not system.arenas.bound
    assert engine.placement is not None and engine.placement.experts is None


def test_pages_are_looked_at_and_brought_home() -> None:
    system = TwoNodes()
    placement = load(system).placement
    assert placement is not None
    first, second, kv = placement.ranges()
    assert (first.nodes, second.nodes, kv.nodes) == ((0,), (1,), (0, 1))
    for found, node in ((first, 0), (second, 0)):  # all on node 0: the second half is misplaced
        start = found.address // mmap.PAGESIZE * mmap.PAGESIZE
        for address in range(start, found.address + found.nbytes, mmap.PAGESIZE):
            system.calls.where[address] = node
    told = placement.check()
    assert [check.wrong > 0 for check in told] == [False, True, False]
    assert "sampled pages on node 1" in placement.describe() and "on node 0" in placement.describe()
    moved = placement.check(move=True)
    assert moved[1].moved > moved[1].sampled - 1 and placement.check()[1].wrong == 0


def test_a_run_looks_after_its_first_step_and_tells_what_it_moved() -> None:
    system = TwoNodes()
    engine = load(system)
    assert engine.placement is not None
    found = engine.placement.ranges()[1]
    page = found.address // mmap.PAGESIZE * mmap.PAGESIZE
    system.calls.where = dict.fromkeys(range(page, found.address + found.nbytes, mmap.PAGESIZE), 0)
    assert engine.placement.describe() == "memory nodes 0, 1, 0 experts there so far"
    with pytest.warns(RuntimeWarning, match=r"memory nodes: experts of node 1: 0 of \d+ .* pages moved"):
        answer(engine)
    assert engine.placement.moved == len(system.calls.where) and set(system.calls.where.values()) == {1}
    figures = {
        (sample.name, sample.labels.get("range", "")): sample.value
        for family in node_figures(engine)
        for sample in family.samples
    }
    assert figures["strata_numa_pages_misplaced", "experts of node 1"] > 0
    assert figures["strata_numa_pages_sampled", "experts of node 0"] == 0
    assert figures["strata_numa_pages_moved_total", ""] == engine.placement.moved


def test_one_node_has_no_figures() -> None:
    assert list(node_figures(load(TwoNodes(), machine(1)))) == []


def test_with_a_card_the_calling_thread_and_its_pages_are_on_the_cards_node() -> None:
    card = load_profile("rtx3090-2x-e5-2680v4").device
    assert card is not None
    with_card = replace(machine(), device=replace(card, node=1))
    plan = plan_store(DEMO, with_card, PlanOptions(context=128))
    system = TwoNodes()
    assert plan.nodes == (1, 0) and plan.threads[0].node == 1
    assert settle(plan, system) == ""
    assert system.asked == ["stay on [1]", "prefer 1"]


@pytest.mark.parametrize("outer", [Policy.INTERLEAVE, Policy.PREFERRED, Policy.WEIGHTED_INTERLEAVE])
def test_a_policy_from_outside_is_obeyed_and_told(outer: Policy) -> None:
    """`numactl --interleave=all strata serve`: nothing of ours is put against it."""
    system = TwoNodes(outer=outer)
    with pytest.warns(RuntimeWarning, match=f"numactl asked for {outer.name.lower()} on nodes 0-1"):
        engine = load(system)
    assert system.asked == [] and not any(strict for _, strict in system.arenas.bound)
    assert engine.placement is not None and engine.placement.experts is None
    assert answer(engine) == answer(load(TwoNodes(), machine(1)))


def test_a_kernel_that_refuses_is_told_and_the_run_goes_on() -> None:
    class Refuses(TwoNodes):
        def interleave(self, nodes: Sequence[int]) -> None:
            raise OSError(1, "Operation not permitted")

    with pytest.warns(RuntimeWarning, match=r"nodes 0-1 are wanted, .* refused: Operation not permitted"):
        engine = load(Refuses())
    assert len(answer(engine)) == 8


def test_a_node_that_filled_up_since_the_plan_is_an_error_with_both_numbers() -> None:
    """case-34: serve checks again before allocating."""
    with pytest.raises(CapacityError, match=r"experts take \d+ bytes on memory node 1, 4096 are free"):
        load(TwoNodes(room=4096))
