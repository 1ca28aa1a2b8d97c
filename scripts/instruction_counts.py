"""Instructions of a few fixed ops, counted by callgrind: a regression shows however busy the machine is.

    python scripts/instruction_counts.py             # beside tests/csrc/instruction_counts.json
    python scripts/instruction_counts.py --update    # record what is counted now
    python scripts/instruction_counts.py --profile gemm-64   # where they go, by function

The objects are those that setup.py compiles, for AVX2: valgrind 3.19 knows no AVX-512. Counts belong to a
compiler, so the record names it. They say nothing of waiting for memory: `strata bench` does.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from compiling import ROOT, Setup, link

RECORD = ROOT / "tests" / "csrc" / "instruction_counts.json"
DRIVER = ROOT / "tests" / "csrc" / "counts_driver.cpp"
TOLERANCE = 0.03


@dataclass(frozen=True)
class Counts:
    """Instructions by case, and what compiled and counted."""

    compiler: str
    valgrind: str
    instructions: dict[str, int]

    @classmethod
    def read(cls) -> Counts:
        """The record."""
        return cls(**json.loads(RECORD.read_text()))

    def write(self) -> None:
        """Make this the record."""
        RECORD.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")


@dataclass(frozen=True)
class Change:
    """A case's instructions as recorded (None: not at all) and now."""

    case: str
    before: int | None
    now: int

    @property
    def share(self) -> float | None:
        """0.03: 3 % more than recorded."""
        return self.now / self.before - 1 if self.before else None

    @property
    def worse(self) -> bool:
        """Whether it takes more than TOLERANCE more, or nothing is recorded to hold it to."""
        return self.share is None or self.share > TOLERANCE


def compare(record: Counts, now: Counts) -> list[Change]:
    """Every case counted now beside the record."""
    return [Change(case, record.instructions.get(case), count) for case, count in now.instructions.items()]


def table(changes: Iterable[Change]) -> str:
    """For people."""
    lines = [f"{'case':20} {'recorded':>12} {'now':>12} {'change':>8}"]
    for one in changes:
        change = "new" if one.share is None else f"{one.share:+.1%}"
        lines.append(f"{one.case:20} {one.before or '-':>12} {one.now:>12} {change:>8}")
    return "\n".join(lines)


def compiler() -> str:
    """Such as "g++ 12.2.0"."""
    return f"g++ {_output('g++', '-dumpfullversion').strip()}"


def valgrind() -> str:
    """Such as "3.19.0"."""
    return _output("valgrind", "--version").strip().removeprefix("valgrind-")


def missing() -> str:
    """The program that is needed and not here, or ""."""
    return next((name for name in ("g++", "valgrind") if shutil.which(name) is None), "")


def build(folder: Path) -> Path:
    """The driver with every op and the AVX2 kernels, from the extension's own objects where they are up to
    date."""
    setup = Setup.read()
    _, flags = setup.group("avx2")
    jobs = [(DRIVER.relative_to(ROOT), flags, folder), *setup.jobs("avx2"), *setup.jobs("kernels_avx2")]
    return link(setup.compile_all(jobs), folder / "counts")


def count_all(program: Path) -> Counts:
    """Run every case of the driver under callgrind."""
    cases = _output(program).split()
    with tempfile.TemporaryDirectory() as folder:
        found = {case: count(program, case, Path(folder) / "out") for case in cases}
    return Counts(compiler(), valgrind(), found)


def count(program: Path, case: str, out: Path) -> int:
    """Instructions of one case; callgrind's file goes to `out`."""
    options = ("--tool=callgrind", "--collect-atstart=no", "--toggle-collect=counted")
    _output("valgrind", *options, f"--callgrind-out-file={out}", program, case)
    totals = re.search(r"^(?:totals|summary): (\d+)", out.read_text(), re.MULTILINE)
    if totals is None or int(totals[1]) == 0:
        raise RuntimeError(f"callgrind counted nothing in {case}: the function `counted` was not seen")
    return int(totals[1])


def _output(*command: object) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(map(str, command))}: exit code {done.returncode}\n{done.stderr[-3000:]}"
        )
    return done.stdout


def main() -> int:
    """Exit code 1 when a case takes more than 3 % more than recorded."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--update", action="store_true", help="record what is counted now")
    parser.add_argument("--profile", metavar="CASE", help="print callgrind's functions of one case")
    options = parser.parse_args()
    if missing():
        sys.exit(f"{missing()} is not installed")
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder))
        if options.profile:
            count(program, options.profile, Path(folder) / "out")
            print(_output("callgrind_annotate", Path(folder) / "out"))
            return 0
        now = count_all(program)
    record = Counts.read() if RECORD.exists() else Counts("nothing", "", {})
    changes = compare(record, now)
    print(f"recorded with {record.compiler}, counted with {now.compiler}\n{table(changes)}")
    if options.update:
        now.write()
        return 0
    return int(any(one.worse for one in changes))


if __name__ == "__main__":
    sys.exit(main())
