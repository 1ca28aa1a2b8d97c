"""`strata bench --speculative`: texts that repeat and texts that mislead, and what drafts make of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from strata.backends.hybrid.backend import HybridBackend
from strata.config import Config
from strata.engine.bench.runs import limits_probe
from strata.engine.bench.speculation import (
    POLICIES,
    SpeculativeBench,
    SpeculativeRun,
    Workload,
    scripted_workloads,
)
from strata.engine.load import load_engine
from strata.engine.speculative.draft_model import DraftModel
from strata.engine.speculative.make import SpeculationOptions, make_proposer
from strata.engine.speculative.mtp import MtpProposer
from strata.errors import CapacityError, IncompleteError, UsageError
from strata.hardware.profile import HardwareProfile
from strata.interfaces.hardware import device_run, remembered_machine, with_device
from strata.interfaces.planning import plan_run
from strata.interfaces.speculation import speculation_options
from strata.interfaces.stores import store_path
from strata.interfaces.tokenizer import Tokenizer
from strata.model.footprint import contents_of_store, footprint
from strata.plan.decode_cost import DecodeCost
from strata.plan.plan import Plan
from strata.store.manifest import read_manifest

_CODE = """def total_price(items, tax):
    total = 0.0
    for item in items:
        total = total + item.price * item.count
    if tax > 0:
        total = total * (1 + tax)
    return total


def total_weight(items, box):
    total = 0.0
    for item in items:
        total = total + item.weight * item.count
    if box > 0:
        total = total + box
    return total
"""
_JSON = "".join(
    f'  {{"id": {i}, "name": "part {i}", "price": {i}.50, "in_stock": true, "tags": ["steel", "small"]}},\n'
    for i in range(1, 9)
)
_TEXTS = (
    (
        "code edit",
        f"{_CODE}\n\n# The same functions once more, with a comment on top:\n\n# Prices and weights.\n",
    ),
    ("JSON", f'{{"parts": [\n{_JSON}  {{"id": 9, "name": "part 9", "price": 9.50,'),
    ("prose", "The road went down to the river, where an old man sat and mended his nets. He said that"),
)
_HEADS = ("text", "drafts", "t/s", "of plain", "spread", "undisturbed", "slowest 64", "tokens/forward",
          "accepted", "length", "proposed by", "draft time", "GB/s", "of memory", "same text")  # fmt: skip
_LONGEST_PROMPT = 1024


class SpeculativeBenchmark:
    """One model and its proposer, ready to be measured. Texts are greedy, or scripted."""

    def __init__(self, config: Config, tokens: int, texts: Sequence[str] = ()) -> None:
        """texts: beginnings of their names; (): all. UsageError where one is none's."""
        path = store_path(config, text=False)
        manifest = read_manifest(path)
        if manifest.spec.context < _LONGEST_PROMPT + tokens:
            raise UsageError(
                f"{tokens} tokens after {_LONGEST_PROMPT} do not fit the model's context of "
                f"{manifest.spec.context}",
                remedy="choose a smaller -n",
            )
        self.machine = with_device(remembered_machine(), config)
        device = device_run(config, self.machine)
        self.plan, self.alone = _plan(path, config, self.machine, tokens, device is not None)
        tokenizer = _tokenizer(path)
        self.engine = engine = load_engine(
            path,
            _for_one(self.plan),
            backend=config.backend.name,
            activations=config.backend.activations,
            valid_tokens=tokenizer.vocab_size if tokenizer else None,
            share_prefixes=False,  # every run computes its own prompt
            device=device,
        )
        asked = SpeculationOptions(self.machine)
        if tokenizer is not None:
            asked = speculation_options(config, self.machine, tokenizer) or asked
        backend, known = engine.decoder.backend, engine.options.valid_tokens
        host = backend.cpu if isinstance(backend, HybridBackend) else backend
        proposer = make_proposer(asked, self.plan, host, known, engine.decoder)
        if isinstance(proposer, DraftModel | MtpProposer):
            # Else it would read a text once, and no other policy or round pay for it.
            proposer.pages.share = False
        self.proposer = proposer.name
        model = footprint(contents_of_store(manifest), engine.kv)
        estimate = DecodeCost(model, self.plan, self.machine)
        probe = limits_probe(backend)
        self._bench = SpeculativeBench(
            engine, proposer, estimate, probe, asked.promise, in_turns=not self.alone
        )
        self.tokens = tokens
        self.workloads = scripted_workloads(engine.options.valid_tokens, tokens)
        if tokenizer is not None:
            found = [Workload(name, tokenizer.encode_completion(text)) for name, text in _TEXTS]
            self.workloads = [*found, *self.workloads]
        self.workloads = _chosen(self.workloads, texts)
        self.model, self.kv_place = manifest.spec.name, engine.kv_place
        self.vocabulary = engine.options.valid_tokens

    def results(self, repeats: int) -> Iterator[list[SpeculativeRun]]:
        """The runs of each workload, as they are done."""
        for workload in self.workloads:
            yield self._bench.runs(workload, self.tokens, repeats)


def _plan(
    path: Path, config: Config, machine: HardwareProfile, tokens: int, device: bool
) -> tuple[Plan, str]:
    """With KV pages for all policies at once, and ""; or else for one, and why."""
    plan = partial(plan_run, path, config, machine, context=_LONGEST_PROMPT + tokens)
    if device:
        return plan(requests=1), "a device's memory is cut for one KV cache"
    try:
        found = plan(requests=len(POLICIES))
    except CapacityError:
        found = None
    if found is None or (found.draft is not None and not found.draft.pages):
        return plan(requests=1), f"there is no room for {len(POLICIES)} KV caches"
    return found, ""


def _for_one(plan: Plan) -> Plan:
    """The same with KV pages for one request only, as each engine has them."""
    kv, count = plan.kv, plan.kv.requests
    return replace(plan, kv=replace(kv, requests=1, pages=kv.pages // count, nbytes=kv.nbytes // count))


def _chosen(workloads: Sequence[Workload], texts: Sequence[str]) -> list[Workload]:
    wanted = [text.strip().lower() for text in texts]
    names = [workload.name for workload in workloads]
    for text in wanted:
        if not text or not any(name.lower().startswith(text) for name in names):
            raise UsageError(
                f"--texts has {text!r}, with which no text's name begins",
                remedy=f"choose from {', '.join(names)}; beginnings of these suffice, comma-separated",
            )
    return [each for each in workloads if not wanted or each.name.lower().startswith(tuple(wanted))]


def _tokenizer(path: Any) -> Tokenizer | None:
    try:
        return Tokenizer.load(path)
    except IncompleteError:
        return None


def markdown_head() -> str:
    """The table's first two lines."""
    return f"| {' | '.join(_HEADS)} |\n|{'|'.join('---' for _ in _HEADS)}|"


def markdown_lines(runs: Sequence[SpeculativeRun]) -> list[str]:
    """One line per policy: speeds and `of plain` of all rounds together, figures of drafts as medians.

    Ratios have standard errors where there are several rounds. `spread`: the least and the most of one;
    `undisturbed`: of plain, but for what some steps took longer than others of their kind (`undisturbed`);
    `slowest 64`: so many steps in a row of any round, as a part of plain decoding's speed, likewise.
    """
    lines = []
    for name, *_ in POLICIES:
        mine = [run for run in runs if run.policy == name]
        memory = [run.bytes / run.seconds / run.bandwidth for run in mine if run.bandwidth]
        ratio = compare(runs, name)
        cells = (
            mine[0].workload,
            name,
            f"{sum(run.tokens for run in mine) / sum(run.seconds for run in mine):.1f}",
            str(ratio),
            f"{min(ratio.rounds):.2f}-{max(ratio.rounds):.2f}" if len(mine) > 1 else "-",
            str(compare(runs, name, cut=True)) if mine[0].in_turns else "-",
            _slowest(runs, name),
            f"{_median(run.tokens_per_forward for run in mine):.2f}",
            _accepted(mine),
            f"{_median(run.mean_length for run in mine):.1f}",
            _proposers(mine),
            f"{100 * _median(run.draft_share for run in mine):.0f} %",
            f"{_median(run.bytes / run.seconds for run in mine) / 1e9:.1f}",
            f"{100 * median(memory):.0f} %" if memory else "-",
            "yes" if all(run.same for run in mine) else "NO",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def remark(repeats: int, alone: str = "") -> str:
    """How it was measured and what that does not prove, for the line below the table. alone: why policies
    took no turns."""
    noise = 'How far "plain again" is from 1 is how far all ratios may err.'
    if alone:
        return (
            f"Each policy ran by itself, one after the other, because {alone}: the machine may have changed "
            f"between them. {noise}"
        )
    few = " One round has no standard error (choose -r 3)." if repeats == 1 else ""
    return (
        'All policies took turns at the same tokens; "undisturbed" leaves out what some steps took longer '
        f"than others of as many rows. {noise}{few}"
    )


def _accepted(runs: Sequence[SpeculativeRun]) -> str:
    """Of the rounds in which something was proposed: in the others nothing was wrong, either."""
    found = [run.acceptance for run in runs if run.proposed_by]
    return f"{100 * median(found):.0f} %" if found else "-"


def _proposers(runs: Sequence[SpeculativeRun]) -> str:
    """Tokens by who proposed them, of all rounds: n-grams take the place of a draft that does not pay."""
    found: Counter[str] = Counter()
    for run in runs:
        found.update(run.proposed_by)
    return ", ".join(f"{name} {count}" for name, count in found.most_common()) or "-"


class Ratio(NamedTuple):
    """Speed as a part of plain decoding's. total: of all rounds' time; error: its standard error, None of one
    round; rounds: of each."""

    total: float
    error: float | None
    rounds: list[float]

    def __str__(self) -> str:
        """E.g. "0.951 ± 0.004"."""
        return f"{self.total:.3f}" + (f" ± {self.error:.3f}" if self.error is not None else "")


def compare(runs: Sequence[SpeculativeRun], policy: str, *, cut: bool = False) -> Ratio:
    """A policy with plain decoding, round by round and in all. cut: without disturbances."""
    pairs = _pairs(runs, policy)
    mine = np.array([_seconds(run, cut) / run.tokens for run, _ in pairs])
    plain = np.array([_seconds(base, cut) / base.tokens for _, base in pairs])
    total = float(plain.sum() / mine.sum())
    error = None
    if len(pairs) > 1:
        apart = plain - total * mine
        error = float(np.sqrt((apart @ apart) / (len(pairs) * (len(pairs) - 1))) / mine.mean())
    return Ratio(total, error, (plain / mine).tolist())


def _seconds(run: SpeculativeRun, cut: bool) -> float:
    return run.undisturbed if cut else run.seconds


def _pairs(runs: Sequence[SpeculativeRun], policy: str) -> list[tuple[SpeculativeRun, SpeculativeRun]]:
    """A policy's runs, each with its round's plain one."""
    plain = [run for run in runs if run.policy == POLICIES[0][0]]
    return list(zip((run for run in runs if run.policy == policy), plain, strict=True))


def _slowest(runs: Sequence[SpeculativeRun], policy: str) -> str:
    found = [run.slowest(base) for run, base in _pairs(runs, policy)]
    return min((f"{speed:.2f}" for speed in found if speed is not None), default="-")


def to_json(bench: SpeculativeBenchmark, results: Sequence[Sequence[SpeculativeRun]]) -> dict[str, Any]:
    """Every single run."""
    runs = [
        {
            **asdict(run),
            "tokens_per_second": run.tokens_per_second,
            "undisturbed_seconds": run.undisturbed,
        }
        for each in results
        for run in each
    ]
    named = {"model": bench.model, "proposer": bench.proposer, "tokens": bench.tokens}
    return {**named, "in_turns": not bench.alone, "runs": runs}


def _median(values: Iterable[float]) -> float:
    return float(median(values))
