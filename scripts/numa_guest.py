"""What a run does on two memory nodes, asked of the kernel: for scripts/numa_guest.sh or a real machine.

Every line begins with "ok" or "WRONG"; exits with 1 when one is wrong.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from strata.core import Request, SamplingParams
from strata.engine.engine import Engine
from strata.engine.load import load_engine, plan_store
from strata.hardware.cpu import topology
from strata.hardware.files import field_of, read_text
from strata.hardware.numa_calls import NumaCalls, Policy
from strata.hardware.probe import probe
from strata.interfaces.bundled import model_path
from strata.plan.options import PlanOptions
from strata.plan.plan import Plan

PAGE = mmap.PAGESIZE
CALLS = NumaCalls()
STORE = Path(model_path("demo"))
failures: list[str] = []


def say(right: bool, text: str) -> None:
    """One fact."""
    print(("ok     " if right else "WRONG  ") + text, flush=True)
    if not right:
        failures.append(text)


def nodes_of(memory: np.ndarray) -> Counter[int]:
    """How many pages of an array lie on which node."""
    first = memory.ctypes.data // PAGE
    last = (memory.ctypes.data + memory.nbytes - 1) // PAGE
    return Counter(CALLS.nodes_of([page * PAGE for page in range(first, last + 1)]))


def on(cpu: int, work: Callable[[], None]) -> None:
    """Work on a CPU; the caller's own are given back."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, [cpu])
    work()
    os.sched_setaffinity(0, before)


def file_pages(far: int, near_node: int, far_node: int) -> None:
    """What decides that expert slices are copied: where the kernel puts pages of mapped files."""
    files = sorted((STORE / "experts").iterdir())

    def mapped(path: Path) -> np.ndarray:
        with path.open("rb") as file:
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)

    first, second = mapped(files[0]), mapped(files[1])
    on(far, lambda: first[::PAGE].sum())
    found = nodes_of(first)
    say(
        found[far_node] > 0.9 * found.total(),
        f"pages of a file lie at the node that read them in: {dict(found)}",
    )
    start = second.ctypes.data // PAGE * PAGE
    CALLS.bind(start, second.nbytes, [near_node], Policy.BIND)
    on(far, lambda: second[::PAGE].sum())
    found = nodes_of(second)
    say(
        found[far_node] > 0.9 * found.total(),
        f"and do not obey mbind (bound to node {near_node}): {dict(found)}",
    )
    again = mapped(files[1])
    on(0, lambda: again[::PAGE].sum())
    found = nodes_of(again)
    say(found[far_node] > 0.9 * found.total(), f"and stay there for whoever reads them next: {dict(found)}")


def answer(engine: Engine) -> list[int]:
    """Some greedy tokens."""
    greedy = SamplingParams(temperature=0.0, max_tokens=6)
    return list(engine.generate(Request("a", list(range(5, 45)), greedy)))


def plan(**options: object) -> Plan:
    """For this machine as this process may use it."""
    return plan_store(STORE, probe("guest", "avx2"), PlanOptions(context=128, **options))  # type: ignore[arg-type]


def threads() -> list[str]:
    """The CPUs that this process's threads may run on, one entry per thread that has one CPU only."""
    found = [
        field_of(read_text(task / "status"), "Cpus_allowed_list") or ""
        for task in Path("/proc/self/task").iterdir()
    ]
    return sorted(cpus for cpus in found if cpus.isdecimal())


def run(made: Plan) -> None:
    """A run as planned: threads, pages, text, and what is done about pages in the wrong place."""
    engine = load_engine(STORE, made)
    text = answer(engine)
    bound = [str(cpu) for cpu in made.cpus[1:]]
    say(set(bound) <= set(threads()), f"workers stand on CPUs {', '.join(bound)}: found {threads()}")
    placement = engine.placement
    assert placement is not None and placement.experts is not None
    for check in placement.check():
        say(check.right > 0 and not check.wrong, check.describe())
    arena = placement.experts.arenas[1]
    there = [at for at in page_addresses(arena.memory) if CALLS.nodes_of([at]) == [made.nodes[1]]][:64]
    CALLS.move(there, [made.nodes[0]] * len(there))
    wrong = sum(node == made.nodes[0] for node in CALLS.nodes_of(there))
    moved = placement.check(move=True)[1]
    left = sum(node == made.nodes[0] for node in CALLS.nodes_of(there))
    say(
        wrong == 64 and left in (0, 64 if not moved.wrong else 0),
        f"{wrong} pages misplaced; {moved.describe()}; {left} left",
    )
    say(answer(engine) == text, "the text is the same afterwards")
    alone = load_engine(STORE, plan(numa=False))
    say(answer(alone) == text, f"and the same with numa off: {text}")


def page_addresses(memory: np.ndarray) -> list[int]:
    """The pages that an array has to itself."""
    first, last = -(-memory.ctypes.data // PAGE), (memory.ctypes.data + memory.nbytes) // PAGE
    return [page * PAGE for page in range(first, last)]


def planned_elsewhere(words: str, before: Callable[[], object] | None, wanted: tuple[object, ...]) -> None:
    """What a process plans that was started on fewer CPUs or with another policy."""
    done = subprocess.run(
        [sys.executable, __file__, "planned"], preexec_fn=before, capture_output=True, text=True, check=True
    )
    say(done.stdout.strip() == str(wanted), f"{words}: {done.stdout.strip()}")


def main() -> None:
    machine = topology()
    say(len(machine.nodes) == 2, f"nodes: {[(node.index, node.cpus) for node in machine.nodes]}")
    near, far = machine.nodes
    file_pages(far.cpus[0], near.index, far.index)
    made = plan()
    say(
        made.nodes == (near.index, far.index) and made.host.spread == "partition",
        f"planned: nodes {made.nodes}, {made.host.spread}, teams {made.teams}",
    )
    planned_elsewhere(
        "as taskset leaves it one socket", lambda: os.sched_setaffinity(0, far.cpus), ((), far.cpus)
    )
    planned_elsewhere(
        "as numactl --membind leaves it one node",
        lambda: CALLS.set_policy([far.index], Policy.BIND),
        ((), near.cpus + far.cpus),
    )
    run(made)
    print(f"numa_guest: {len(failures)} wrong", flush=True)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    if sys.argv[1:] == ["planned"]:
        short = plan()
        print((short.nodes, tuple(sorted(short.cpus))))
    else:
        main()
