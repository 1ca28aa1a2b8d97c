"""Which memory nodes a plan uses: as asked, as taskset or a cpuset left them, the card's node first."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from models import machine, toy

from strata.engine.simulate.routes import HabitRoutes, habits
from strata.engine.simulate.server import Load, Simulator
from strata.errors import CapacityError
from strata.hardware.profile import HardwareProfile, Rate
from strata.plan.nodes import choose_nodes
from strata.plan.options import PlanOptions
from strata.plan.planner import make_plan
from strata.plan.speeds import speeds_of


def cut(found: HardwareProfile, **cpus: tuple[int, ...]) -> HardwareProfile:
    """A machine of which only some CPUs are allowed: n1=(4,) leaves node 1 one CPU."""
    nodes = list(found.nodes)
    for name, left in cpus.items():
        index = int(name[1:])
        nodes[index] = dataclasses.replace(nodes[index], cpus=left, cores=left)
    return dataclasses.replace(found, nodes=tuple(nodes))


def card_at(node: int, found: HardwareProfile) -> HardwareProfile:
    assert found.device is not None
    return dataclasses.replace(found, device=dataclasses.replace(found.device, node=node))


def plan(found: HardwareProfile, **options: Any) -> Any:
    return make_plan(toy(), found, PlanOptions(context=1024, **options))


def test_one_node_binds_nothing() -> None:
    made = plan(machine(1))
    assert (made.nodes, made.bind, made.teams) == ((), False, ())


def test_every_node_computes_its_own_slices() -> None:
    made = plan(machine(2, cores=3, device_gib=None))
    assert made.host.spread == "partition" and made.bind
    assert made.nodes == (0, 1) and made.cpus == (0, 1, 2, 3, 4, 5)
    assert made.teams == (0, 0, 0, 1, 1, 1)


def test_the_calling_thread_is_on_the_cards_node() -> None:
    made = plan(card_at(1, machine(2, cores=3)))
    assert made.nodes == (1, 0) and made.cpus == (3, 4, 5, 0, 1, 2)
    assert made.teams == (0, 0, 0, 1, 1, 1)


def test_a_draft_stands_on_the_cards_node() -> None:
    """On all threads of it, for the experts' are idle meanwhile; with one node on the model's own."""
    made = plan(card_at(1, machine(2, cores=3)), draft=toy())
    assert made.draft.cpus == (3, 4, 5)
    assert plan(machine(2, cores=3, device_gib=None), draft=toy()).draft.cpus == (0, 1, 2)
    assert plan(cut(machine(2, cores=3, device_gib=None), n0=(1,)), draft=toy()).draft.cpus == (1,)
    for alone in (plan(machine(1), draft=toy()), plan(machine(2), draft=toy(), numa=False)):
        assert alone.draft.cpus == ()


def test_off_binds_nothing() -> None:
    made = plan(card_at(1, machine(2)), numa=False)
    assert (made.nodes, made.bind, made.teams, made.host.spread) == ((), False, (), "interleave")
    assert len(made.cpus) == 8


def test_a_list_of_one_node() -> None:
    """All threads and all memory on it; bound, for the kernel would spread them again."""
    made = plan(machine(2, device_gib=None), nodes=(1,))
    assert made.nodes == (1,) and made.bind and made.cpus == (4, 5, 6, 7)
    assert made.host.total <= machine(2).nodes[1].memory
    assert not made.warnings


def test_a_list_that_names_too_much_is_cut_with_both_lists() -> None:
    """case-32: a node list of another machine."""
    made = plan(machine(2, device_gib=None), nodes=(1, 2, 3))
    assert made.nodes == (1,)
    assert made.warnings == ("host.numa names nodes 2-3, this process may use 0-1: those are left out",)


def test_a_list_that_names_nothing_leaves_all_unbound_with_one_warning() -> None:
    """case-32: empty means one warning, unbound; never an exit."""
    made = plan(machine(2, device_gib=None), nodes=(4, 5))
    assert (made.nodes, made.bind, len(made.cpus)) == ((), False, 8)
    assert len(made.warnings) == 1 and "names nodes 4-5, this process may use 0-1" in made.warnings[0]


def test_a_node_without_allowed_cpus_computes_nothing() -> None:
    """case-32: of two nodes one has no allowed CPU. Its memory is not bound to, either."""
    made = plan(cut(machine(2, device_gib=None), n1=()))
    assert (made.nodes, made.teams, made.cpus) == ((), (), (0, 1, 2, 3))


def test_a_card_on_a_socket_that_taskset_took_away_is_told_with_both_numbers() -> None:
    made = plan(cut(card_at(1, machine(2)), n1=()))
    text = next(text for text in made.warnings if "hangs from memory node 1" in text)
    assert "(CPUs 0-3, 0 of node 1)" in text and "numactl --cpunodebind=1 --membind=1" in text


def test_a_card_at_a_node_that_was_not_asked_for_is_told() -> None:
    made = plan(card_at(1, machine(2)), nodes=(0,))
    assert made.nodes == (0,) and any("hangs from memory node 1" in text for text in made.warnings)


def test_a_socket_with_few_threads_does_not_keep_the_other_waiting() -> None:
    """One CPU of eight is left of node 1: equal shares would be slower than pages in turn."""
    uneven = cut(machine(2, cores=8, device_gib=None), n1=(8,))
    uneven = dataclasses.replace(uneven, node_read=(Rate(50e9, "measured"), Rate(8e9, "measured")))
    assert plan(uneven).host.spread == "interleave"
    assert plan(uneven).teams == ()
    assert plan(machine(2, cores=8, device_gib=None)).host.spread == "partition"


def test_a_single_thread_has_no_teams() -> None:
    made = plan(machine(2, device_gib=None), threads=1)
    assert made.teams == () and made.host.spread == "interleave"


@pytest.mark.parametrize("nodes", [2, 4])
@pytest.mark.parametrize("threads", [None, 2, 4, 7, 99])
@pytest.mark.parametrize("asked", [None, (0,), (1, 0), (0, 9)], ids=str)
def test_threads_teams_and_nodes_agree(nodes: int, threads: int | None, asked: Any) -> None:
    found = machine(nodes, cores=4)
    chosen = choose_nodes(found, PlanOptions(threads=threads, nodes=asked))
    made = plan(found, threads=threads, nodes=asked)
    assert sum(chosen.counts.values()) == len(made.cpus) <= 4 * len(asked or range(nodes))
    allowed = set(range(nodes)) if asked is None else set(asked) & set(range(nodes))
    assert set(made.nodes) <= allowed and {entry.node for entry in made.threads} <= allowed
    assert not made.teams or len(made.teams) == len(made.cpus)
    assert sorted(made.teams) == list(made.teams)


def test_copies_of_hot_experts_are_for_interleaved_ones_and_counted_on_every_node() -> None:
    whole = toy(slices=1)
    made = make_plan(whole, machine(2, device_gib=None), PlanOptions(context=1024, copies=35 * 10**6))
    assert (made.host.spread, made.host.copies) == ("interleave", 3)
    assert sum(made.teams) == len(made.cpus) // 2  # every node's threads read their copies
    parts = {part.name: part.nbytes for part in made.host.parts}
    assert parts["copies"] == 2 * 3 * 10**7 and sum(parts.values()) == made.host.total
    cut = make_plan(toy(), machine(2, device_gib=None), PlanOptions(context=1024, copies=35 * 10**6))
    assert (cut.host.spread, cut.host.copies) == ("partition", 0)
    with pytest.raises(CapacityError, match=r"host\.copies is \d+ bytes on each of 2 nodes, \d+ are free"):
        make_plan(whole, machine(2, device_gib=None), PlanOptions(context=1024, copies=64 << 30))


def test_the_simulator_measures_what_copies_gain() -> None:
    """More copies, more of the misses among them, faster decoding; never faster than all of them copied."""
    whole, found = toy(slices=1, experts=16, expert_total=16 * 10**8), machine(2, device_gib=None)
    rates, shares = [], []
    for copies in (0, 20, 80, 160):
        options = PlanOptions(context=1024, copies=copies * 10**7)
        made = make_plan(whole, found, options)
        threads = {node.node: len(node.cpus) for node in made.threads}
        routes = HabitRoutes(habits(16), 10, 16, 2, seed=1)
        served = Simulator(whole, speeds_of(found, threads, made.host.spread), made, routes).serve(
            Load(1, 8, 32, served=2)
        )
        rates.append(served.decode_rate)
        shares.append(served.copied / (served.distinct * 10))
    assert shares[0] == 0 and shares == sorted(shares) and shares[-1] > 0.9
    assert rates == sorted(rates) and rates[1] > rates[0]
    both = make_plan(whole, found, PlanOptions(context=1024, spread="replicate"))
    assert rates[-1] <= both.predictions[0].tokens_per_second * 1.01
