"""`strata bench --speculative`: texts that repeat and texts that mislead, and what drafts make of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

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
from strata.engine.speculative.make import SpeculationOptions, make_proposer
from strata.errors import IncompleteError, UsageError
from strata.interfaces.hardware import device_run, remembered_machine
from strata.interfaces.planning import plan_run
from strata.interfaces.speculation import speculation_options
from strata.interfaces.stores import store_path
from strata.interfaces.tokenizer import Tokenizer
from strata.model.footprint import contents_of_store, footprint
from strata.plan.decode_cost import DecodeCost
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
_HEADS = ("text", "drafts", "t/s", "of plain", "spread", "slowest 64", "tokens/forward", "accepted", "length",
          "proposed by", "draft time", "GB/s", "of memory", "same text")  # fmt: skip
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
        self.machine = remembered_machine()
        self.plan = plan_run(path, config, self.machine, context=_LONGEST_PROMPT + tokens, requests=1)
        tokenizer = _tokenizer(path)
        self._engine = engine = load_engine(
            path,
            self.plan,
            backend=config.backend.name,
            activations=config.backend.activations,
            valid_tokens=tokenizer.vocab_size if tokenizer else None,
            share_prefixes=False,  # every run computes its own prompt
            device=device_run(config, self.machine),
        )
        asked = SpeculationOptions(self.machine)
        if tokenizer is not None:
            asked = speculation_options(config, self.machine, tokenizer) or asked
        backend, known = engine.decoder.backend, engine.options.valid_tokens
        host = backend.cpu if isinstance(backend, HybridBackend) else backend
        proposer = make_proposer(asked, self.plan, host, known, engine.decoder)
        self.proposer = proposer.name
        model = footprint(contents_of_store(manifest), engine.kv)
        estimate = DecodeCost(model, self.plan, self.machine)
        self._bench = SpeculativeBench(engine, proposer, estimate, limits_probe(backend), asked.promise)
        self.tokens = tokens
        self.workloads = scripted_workloads(engine.options.valid_tokens, tokens)
        if tokenizer is not None:
            found = [Workload(name, tokenizer.encode_completion(text)) for name, text in _TEXTS]
            self.workloads = [*found, *self.workloads]
        self.workloads = _chosen(self.workloads, texts)
        self.model, self.kv_place = manifest.spec.name, engine.kv_place

    def results(self, repeats: int) -> Iterator[list[SpeculativeRun]]:
        """The runs of each workload, as they are done."""
        for workload in self.workloads:
            yield list(self._bench.runs(workload, self.tokens, repeats))


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
    """One line per policy: medians. `of plain` compares each run with the plain one of its round; `spread`:
    the least and the most of that, of several rounds; `slowest 64`: so many steps in a row of any round, by
    that plain run."""
    lines = []
    for name, *_ in POLICIES:
        mine = [run for run in runs if run.policy == name]
        memory = [run.bytes / run.seconds / run.bandwidth for run in mine if run.bandwidth]
        cells = (
            mine[0].workload,
            name,
            f"{_median(run.tokens_per_second for run in mine):.1f}",
            f"{median(ratios(runs, name)):.2f}",
            _spread(ratios(runs, name)),
            _slowest(runs, name),
            f"{_median(run.tokens_per_forward for run in mine):.2f}",
            "-" if name == "plain" else f"{100 * _median(run.acceptance for run in mine):.0f} %",
            f"{_median(run.mean_length for run in mine):.1f}",
            _proposers(mine),
            f"{100 * _median(run.draft_share for run in mine):.0f} %",
            f"{_median(run.bytes / run.seconds for run in mine) / 1e9:.1f}",
            f"{100 * median(memory):.0f} %" if memory else "-",
            "yes" if all(run.same for run in mine) else "NO",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def remark(repeats: int) -> str:
    """What the table does not prove, for the line below it."""
    disturbed = "whose plain line has a share of memory far below those of other texts' plain lines"
    if repeats == 1:
        return f"One round proves nothing (choose -r 3), and least of all of a text {disturbed}."
    return f"Nothing is proven of a text {disturbed}: other programs ran."


def _spread(found: Sequence[float]) -> str:
    return f"{min(found):.2f}-{max(found):.2f}" if len(found) > 1 else "-"


def _proposers(runs: Sequence[SpeculativeRun]) -> str:
    """Tokens by who proposed them, of all rounds: n-grams take the place of a draft that does not pay."""
    found: Counter[str] = Counter()
    for run in runs:
        found.update(run.proposed_by)
    return ", ".join(f"{name} {count}" for name, count in found.most_common()) or "-"


def ratios(runs: Sequence[SpeculativeRun], policy: str) -> list[float]:
    """Speed of a policy as a part of plain decoding's, round by round."""
    plain = [run.tokens_per_second for run in runs if run.policy == "plain"]
    mine = [run.tokens_per_second for run in runs if run.policy == policy]
    return [speed / base for speed, base in zip(mine, plain, strict=True)]


def _slowest(runs: Sequence[SpeculativeRun], policy: str) -> str:
    """A plain run's, too, which says how far speeds vary without any draft."""
    plain = [run.tokens_per_second for run in runs if run.policy == "plain"]
    mine = [run.slowest() for run in runs if run.policy == policy]
    found = [speed / base for speed, base in zip(mine, plain, strict=True) if speed is not None]
    return f"{min(found):.2f}" if found else "-"


def to_json(bench: SpeculativeBenchmark, results: Sequence[Sequence[SpeculativeRun]]) -> dict[str, Any]:
    """Every single run."""
    runs = [{**asdict(run), "tokens_per_second": run.tokens_per_second} for each in results for run in each]
    return {"model": bench.model, "proposer": bench.proposer, "tokens": bench.tokens, "runs": runs}


def _median(values: Iterable[float]) -> float:
    return float(median(values))
