"""From the options of `strata bench` to results: loads the model once, large enough for every case."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from strata.backends.base import Backend
from strata.config import Config
from strata.engine.bench.figures import Case, Result
from strata.engine.bench.ops import OpTimer
from strata.engine.bench.runs import Bench, limits_probe, tokens_needed
from strata.engine.engine import Engine
from strata.engine.load import load_engine
from strata.errors import IncompleteError, UsageError
from strata.interfaces.hardware import device_run, remembered_machine, with_device
from strata.interfaces.planning import plan_run
from strata.interfaces.recording import Files, recording
from strata.interfaces.stores import store_path
from strata.interfaces.tokenizer import Tokenizer
from strata.model.counts import count
from strata.plan.plan import Plan
from strata.store.manifest import read_manifest

_WARM_UP_TOKENS = 512


@dataclass(frozen=True)
class Subject:
    """What was measured. bytes: of the store's files. backend: with its instruction set.

    activations: what products read, None for a backend without the choice.
    """

    model: str
    bytes: int
    parameters: int
    backend: str
    threads: int | None
    activations: str | None
    kv_dtype: str


class Benchmark:
    """One model, ready to be measured. left_out: cases that do not fit the model's context.

    plan: what the run obeys on `machine`, made for the longest case and the widest.
    """

    def __init__(self, config: Config, cases: Sequence[Case], *, ops: bool, seed: int) -> None:
        """Opens the model. UsageError when no case is left."""
        path = store_path(config, text=False)
        manifest = read_manifest(path)
        self._chunk = config.engine.prefill_chunk
        fits = {case: tokens_needed(case, self._chunk) <= manifest.spec.context for case in cases}
        self.cases = [case for case in cases if fits[case]]
        self.left_out = [case for case in cases if not fits[case]]
        self.context = manifest.spec.context
        if not self.cases:
            raise UsageError(
                f"no case fits the model's context of {self.context} tokens", remedy="smaller -p, -n or -d"
            )
        self.machine = with_device(remembered_machine(), config)
        self.plan = self._plan(config, path)
        timer = OpTimer() if ops else None
        self._engine = self._load(config, path, timer)
        backend = self._engine.decoder.backend
        self._bench = Bench(self._engine, limits_probe(backend), seed=seed, timer=timer)
        self.subject = Subject(
            manifest.spec.name,
            sum(file.bytes for file in manifest.files),
            count(manifest.spec).total,
            _describe(backend),
            len(self.plan.cpus),
            getattr(backend, "activations", None),
            config.kv.dtype,
        )

    @property
    def kv_place(self) -> str:
        """What memory the KV cache is."""
        return self._engine.kv_place

    def warm_up(self) -> None:
        """A prompt that does not count."""
        self._bench.warm_up(min(_WARM_UP_TOKENS, self._engine.options.context - 1))

    def recording(self, timeline: Path | None) -> AbstractContextManager[None]:
        """What is measured inside goes into a timeline, too; noting it takes a few percent of the time."""
        return recording(self._engine, self.plan, Files(timeline))

    def results(self, repeats: int) -> Iterator[Result]:
        """Case after case, as they are done."""
        for case in self.cases:
            yield self._bench.measure(case, repeats)

    def _plan(self, config: Config, path: Path) -> Plan:
        """Context and pages for the longest case and the one with the most pages."""
        needed = [(tokens_needed(case, self._chunk), case.streams) for case in self.cases]
        context = max(tokens for tokens, _ in needed)
        per_page = config.kv.page_tokens
        pages = max(streams * -(-tokens // per_page) for tokens, streams in needed)
        requests = -(-pages // -(-context // per_page))
        return plan_run(path, config, self.machine, context=context, requests=requests)

    def _load(self, config: Config, path: Path, timer: OpTimer | None) -> Engine:
        return load_engine(
            path,
            self.plan,
            backend=config.backend.name,
            activations=config.backend.activations,
            valid_tokens=_vocabulary(path),
            share_prefixes=False,  # repetitions must compute what they measure
            wrap=timer.wrap if timer else None,
            device=device_run(config, self.machine),
        )


def _vocabulary(path: Path) -> int | None:
    """The tokenizer's ids; None for a store without one, whose ids are all rows."""
    try:
        return Tokenizer.load(path).vocab_size
    except IncompleteError:
        return None


def _describe(backend: Backend) -> str:
    isa = getattr(getattr(backend, "cpu", None), "isa", "")
    return f"{backend.name} {isa}".strip()
