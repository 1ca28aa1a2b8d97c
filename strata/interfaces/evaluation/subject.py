"""A model that is measured: loaded as `strata run` would load it, with its own settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from strata.backends.base import Activations
from strata.config import Config, Override, load_config
from strata.core import KvDtype
from strata.engine.engine import Engine
from strata.engine.load import load_engine
from strata.engine.perplexity import CHUNK, Predictions, predictions
from strata.errors import NumericalError, UsageError
from strata.interfaces.hardware import device_run, remembered_machine, with_device
from strata.interfaces.planning import plan_run
from strata.interfaces.stores import store_path
from strata.interfaces.tokenizer import Tokenizer
from strata.plan.spec import ModelSpec
from strata.store.manifest import read_manifest


@dataclass(frozen=True)
class Asked:
    """What a command line says about one model. settings: what --set says, for this model."""

    model: str
    settings: tuple[str, ...] = ()
    config_file: str | None = None

    @property
    def label(self) -> str:
        """The model and what is special about it."""
        return " ".join((self.model, *self.settings)).strip()

    def config(self) -> Config:
        """The configuration. UsageError where it names no model."""
        named = [Override("model.path", self.model, "MODEL")] if self.model else []
        config = load_config(self.config_file, [*map(Override.parse, self.settings), *named])
        if not config.model.path:
            raise UsageError("no model is given", remedy="name one, e.g. strata eval perplexity demo")
        return config


@dataclass(frozen=True)
class Subject:
    """A loaded model. path: its store. A checkpoint is taken as it is (`ConvertOptions.exact`), so that the
    formats in which `strata run` would import it are not in what others are measured against."""

    label: str
    path: Path
    config: Config
    engine: Engine
    tokenizer: Tokenizer

    @classmethod
    def open(cls, asked: Asked, context: int, models: int = 1) -> Subject:
        """With KV pages for one text of `context` tokens, or as many as the model takes if that is less.

        models: how many will be loaded at the same time, each with its share of the free memory.
        Raises what `strata run` raises: UsageError, StoreError, HardwareError, CapacityError.
        """
        config = asked.config()
        path = store_path(config, exact=True)
        tokenizer = Tokenizer.load(path)
        machine = with_device(remembered_machine(), config)
        machine = dataclasses.replace(machine, available=machine.available // models)
        fits = min(context, read_manifest(path).spec.context)
        plan = plan_run(path, config, machine, context=fits, requests=1)
        engine = load_engine(
            path,
            plan,
            backend=config.backend.name,
            activations=config.backend.activations,
            valid_tokens=tokenizer.vocab_size,
            share_prefixes=False,  # the KV pages are borrowed between requests
            device=device_run(config, machine),
        )
        return cls(asked.label or config.model.path, path, config, engine, tokenizer)

    @property
    def spec(self) -> ModelSpec:
        """Of the model."""
        return self.engine.decoder.spec

    @property
    def kv_dtype(self) -> KvDtype:
        """What the KV cache holds."""
        return self.engine.options.kv_dtype

    @property
    def activations(self) -> Activations:
        """What products read."""
        return self.config.backend.activations

    def predictions(self, windows: Sequence[Sequence[int]], *, second_half: bool) -> Iterator[Predictions]:
        """See `perplexity.predictions`; no request may run meanwhile, whose pages would be overwritten.

        NumericalError for logits that are no numbers.
        """
        device = self.config.device.use in ("emulated", "cuda")
        options = self.engine.options
        chunk = min(CHUNK, options.logit_rows, options.chunk) if device else CHUNK
        found = predictions(
            self.engine.decoder,
            windows,
            options.kv_dtype,
            chunk=chunk,
            page_tokens=options.page_tokens,
            cache=self.engine.executor.cache,
            second_half=second_half,
        )
        for part in found:
            if not np.isfinite(part.logits).all():
                bad = int((~np.isfinite(part.logits)).sum())
                raise NumericalError(
                    f"{self.label}: {bad:,} of {part.logits.size:,} logits are no numbers",
                    remedy="`strata eval layers` against a model that works shows where they begin",
                )
            yield part


def check_same_vocabulary(one: Subject, other: Subject) -> None:
    """UsageError unless the same ids mean the same text in both: nothing else can be compared."""
    sizes = one.spec.vocab, other.spec.vocab
    if sizes[0] != sizes[1]:
        raise UsageError(
            f"{one.label} has a vocabulary of {sizes[0]:,} tokens, {other.label} one of {sizes[1]:,}",
            remedy="compare models with the same tokenizer; `strata eval perplexity` takes any",
        )
    mine, theirs = one.tokenizer.spelling(), other.tokenizer.spelling()
    odd = sum(mine.get(index) != theirs.get(index) for index in mine.keys() | theirs.keys())
    if odd:
        raise UsageError(
            f"{odd:,} of {sizes[0]:,} tokens are spelled otherwise in {one.label} than in {other.label}",
            remedy="compare models with the same tokenizer; `strata eval perplexity` takes any",
        )
