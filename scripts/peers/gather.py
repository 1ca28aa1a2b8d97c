"""A table that grows pair by pair over hours, for a machine that can be had for a minute at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from peers.figures import Pair
from peers.report import Row, merged, to_json
from peers.workloads import Peer, Workload
from strata.errors import UsageError

Candidate = tuple[Peer, Workload]


@dataclass
class Table:
    """Rows and notes, and how often each row was begun with each version of the kernels.

    Begun, not finished: a row whose runs fail or are killed must not be chosen for ever.
    """

    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tried: dict[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path) -> Table:
        """Empty where there is no file. UsageError: it is not one of ours."""
        if not file.exists():
            return cls()
        try:
            document = json.loads(file.read_text())
            rows, notes = merged([document])
            return cls(rows, notes, dict(document.get("tried", {})))
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{file} is no table of --append or --json ({error!r})") from None

    def write(self, file: Path) -> None:
        """Whole or not at all: whoever runs this may kill it."""
        scratch = file.with_name(f"{file.name}.new")
        scratch.write_text(json.dumps({**to_json(self.rows, self.notes), "tried": self.tried}, indent=1))
        scratch.replace(file)

    def next(self, candidates: Sequence[Candidate], version: str) -> Candidate:
        """The one begun least often with this version; the first of equals."""
        return min(candidates, key=lambda one: self.tried.get(_key(one[0], one[1], version), 0))

    def begin(self, peer: Peer, work: Workload, version: str) -> None:
        """Counts it."""
        key = _key(peer, work, version)
        self.tried[key] = self.tried.get(key, 0) + 1

    def add(self, peer: Peer, work: Workload, pair: Pair, notes: Sequence[str]) -> None:
        """A pair, to the row that has others like it."""
        for index, row in enumerate(self.rows):
            if (row.peer.name, row.peer.isa, row.work.label) == (peer.name, peer.isa, work.label):
                self.rows[index] = replace(row, pairs=(*row.pairs, pair))
                break
        else:
            self.rows.append(Row(peer, work, (pair,)))
        self.notes = list(dict.fromkeys([*self.notes, *notes]))


def _key(peer: Peer, work: Workload, version: str) -> str:
    return f"{peer.name} {peer.isa} {work.label} {version}"


@contextmanager
def begun(file: Path, table: Table, candidate: Candidate, version: str) -> Iterator[None]:
    """Around a pair: that it was begun is in the file before, what came of it afterwards."""
    table.begin(*candidate, version)
    table.write(file)
    yield
    table.write(file)
