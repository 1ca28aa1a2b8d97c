"""What is compared: the rows of the table, and the command line that measures each in either engine."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

_LONG = 2048
"""A prompt of which one repetition has to do: it takes half a minute."""
_TOUCH = 128
"""Tokens that touch every expert of `moe`."""
_PROMPT = 1
"""Tokens before each stream's answer at depth 0: what `strata bench` takes."""
LLAMA, IK = "llama.cpp", "ik_llama.cpp"


@dataclass(frozen=True)
class Workload:
    """One row. kv: "half" is f16 in llama.cpp and bf16 in Strata, "int8" is q8_0 and int8.

    targets: ratios to reach, per peer in the fast and in the slow state of the memory.
    """

    model: Literal["moe", "smollm2"]
    kind: Literal["prefill", "decode"]
    tokens: int
    depth: int = 0
    streams: int = 1
    kv: Literal["half", "int8"] = "half"
    targets: dict[str, tuple[float, float]] = field(default_factory=dict, compare=False)

    @property
    def label(self) -> str:
        """For people, unique: "moe prefill 512", "moe decode x 4", "moe decode x 1 @ 4096 int8"."""
        name = f"{self.model} {self.kind}"
        name += f" {self.tokens}" if self.kind == "prefill" else f" x {self.streams}"
        return name + (f" @ {self.depth} {self.kv}" if self.depth else "")

    @property
    def long(self) -> bool:
        """A repetition takes half a minute: none is spent on warming up, and one has to do."""
        return max(self.tokens if self.kind == "prefill" else 0, self.depth) >= _LONG


def workloads(generate: int) -> list[Workload]:
    """All rows; generate: tokens of a decode run. The targets are those of the performance issue, which has
    none for half the depth: that one is for machines where llama.cpp needs minutes to get to 4,096."""
    prefill = {LLAMA: (2.8, 2.8), IK: (1.5, 1.5)}
    deep = {LLAMA: (4.0, 4.0), IK: (1.5, 1.5)}
    streams = {
        1: {LLAMA: (2.0, 1.4), IK: (1.4, 1.25)},
        4: {LLAMA: (2.3, 1.6), IK: (1.7, 1.25)},
        16: {LLAMA: (2.5, 2.0), IK: (1.9, 1.5)},
    }
    rows = [Workload("moe", "prefill", tokens, targets=prefill) for tokens in (512, 2048)]
    rows += [Workload("moe", "decode", generate, 0, count, targets=t) for count, t in streams.items()]
    depths: dict[int, dict[str, tuple[float, float]]] = {2048: {}, 4096: deep}
    for depth, goals in depths.items():
        rows.append(Workload("moe", "decode", generate, depth))
        rows.append(Workload("moe", "decode", generate, depth, kv="int8", targets=goals))
    small = {LLAMA: (2.5, 2.5), IK: (1.2, 1.2)}, {LLAMA: (1.6, 1.6), IK: (1.3, 1.3)}
    rows.append(Workload("smollm2", "prefill", 512, targets=small[0]))
    rows.append(Workload("smollm2", "decode", 2 * generate, targets=small[1]))
    return rows


def select(rows: list[Workload], name: str) -> list[Workload]:
    """The row of that name; otherwise all whose name holds it."""
    return [row for row in rows if row.label == name] or [row for row in rows if name in row.label]


@dataclass(frozen=True)
class Peer:
    """A llama-bench, and the llama-batched-bench beside it if several streams are to be measured.

    isa: one of build.VARIANTS; Strata is held to it, too. extra, batched_extra: options of every call.
    """

    name: str
    isa: str
    bench: Path
    batched: Path | None = None
    extra: tuple[str, ...] = ()
    batched_extra: tuple[str, ...] = ()

    def can(self, work: Workload) -> bool:
        """Whether there is a program for it."""
        return work.streams == 1 or self.batched is not None

    def warm_ups(self, work: Workload) -> int:
        """Repetitions that do not count, where its own warm-up is a single token, which leaves most experts
        untouched. At depth the prompt has touched them, llama.cpp's prefill repeats the whole prompt, and
        before a long one both compute a short one.
        `strata bench` warms up with 512 tokens."""
        whole = work.kind == "prefill" and self.name == LLAMA
        return 0 if work.long or whole else 1

    def command(self, work: Workload, model: Path, threads: int, repeats: int) -> list[str]:
        """The call that measures `work` `repeats` times behind its warm-ups."""
        shared = ["-m", str(model), "-t", str(threads)]
        repeats += self.warm_ups(work)
        if work.kv == "int8":
            shared += ["-ctk", "q8_0", "-ctv", "q8_0", "-fa", "1"]
        if work.streams > 1:
            return [str(self.batched), *shared, *self._batched(work, repeats), *self.batched_extra]
        return [str(self.bench), *shared, *self._sizes(work), "-r", str(repeats), "-o", "json", *self.extra]

    def _sizes(self, work: Workload) -> list[str]:
        """ik_llama.cpp has no -d: its -gp times the generation behind a prompt."""
        if work.kind == "prefill" and work.long:
            without = ["--warmup", "0"] if self.name == IK else ["--no-warmup"]
            return ["-p", f"{_TOUCH},{work.tokens}", "-n", "0", *without]
        if work.kind == "prefill":
            return ["-p", str(work.tokens), "-n", "0"]
        if work.depth and self.name == IK:
            return ["-p", "0", "-n", "0", "-gp", f"{work.depth},{work.tokens}"]
        depth = ["-d", str(work.depth)] if work.depth else []
        return ["-p", "0", "-n", str(work.tokens), *depth]

    def _batched(self, work: Workload, repeats: int) -> list[str]:
        """Every stream has a cache of its own, a multiple of 256 tokens long. ik_llama.cpp prints a table."""
        each = -(-(_PROMPT + work.tokens) // 256) * 256
        counts = ",".join([str(work.streams)] * repeats)
        sizes = ["-npp", str(_PROMPT), "-ntg", str(work.tokens), "-npl", counts]
        form = [] if self.name == IK else ["--output-format", "jsonl"]
        return [*sizes, "-c", str(each * work.streams), *form]


def strata_command(work: Workload, store: Path, threads: int, repeats: int) -> list[str]:
    """The `strata bench` call for it."""
    command = [sys.executable, "-m", "strata", "bench", str(store), "--json", "-t", str(threads)]
    sizes = (work.tokens, 0) if work.kind == "prefill" else (0, work.tokens)
    command += ["-p", str(sizes[0]), "-n", str(sizes[1]), "-d", str(work.depth), "-s", str(work.streams)]
    command += ["-r", str(repeats), "--set", f"kv.dtype={'int8' if work.kv == 'int8' else 'bf16'}"]
    return command
