"""What a configuration asks of speculative decoding."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

from strata.config import Config
from strata.engine.speculative.draft_length import LengthOptions
from strata.engine.speculative.make import SpeculationOptions
from strata.engine.speculative.vocabulary import IdMap, map_ids
from strata.errors import ConfigError, StrataError
from strata.hardware.profile import HardwareProfile
from strata.interfaces.importing import Progress
from strata.interfaces.stores import store_path
from strata.interfaces.tokenizer import Tokenizer
from strata.store.manifest import read_manifest

LEAST_SHARE = 0.8
"""Of the model's tokens that a draft must know. What it lacks it cannot propose, and reads as another."""


def draft_name(config: Config) -> str:
    """The draft model's path or name; "" where none is to be used. ConfigError for one without a name."""
    asked = config.speculative
    if asked.use == "draft" and not asked.draft:
        raise ConfigError(
            f"speculative.use is draft ({config.where('speculative.use')}) and speculative.draft is empty",
            remedy="name a model there, or choose speculative.use: ngram",
        )
    wanted = asked.use in ("auto", "draft") and asked.most > 0
    return asked.draft if wanted else ""


@contextmanager
def naming_draft(config: Config) -> Iterator[None]:
    """Says of errors in the draft's files that it is the draft's, and where that was named."""
    try:
        yield
    except StrataError as error:
        error.cause = f"the draft ({config.where('speculative.draft')}): {error.cause}"
        raise


def speculation_options(
    config: Config, machine: HardwareProfile, tokenizer: Tokenizer, progress: Progress | None = None
) -> SpeculationOptions | None:
    """None: every step is a token. tokenizer: the model's; progress: hears of the draft's conversion.

    ConfigError where lengths contradict each other, or the draft's tokenizer has hardly the same tokens.
    """
    asked = config.speculative
    if asked.use == "off" or asked.most == 0:
        return None
    if asked.least > asked.most:
        raise ConfigError(
            f"speculative.least is {asked.least} and speculative.most {asked.most} "
            f"({config.where('speculative.most')})",
            remedy="least must not be more than most",
        )
    start = min(asked.most, max(asked.least, asked.start))
    lengths = LengthOptions(start, asked.least, asked.most)
    name = draft_name(config)
    if not name:
        return SpeculationOptions(machine, lengths, asked.costs, promise=asked.promise)
    other = dataclasses.replace(config, model=dataclasses.replace(config.model, path=name))
    with naming_draft(config):
        path = store_path(other, progress=progress)
        if read_manifest(path).spec.further:  # a layer of the model itself: the ids are the same
            return SpeculationOptions(machine, lengths, asked.costs, path, promise=asked.promise)
        draft = Tokenizer.load(path)
    ids = match_vocabularies(tokenizer, draft, name)
    return SpeculationOptions(machine, lengths, asked.costs, path, ids, asked.promise)


def match_vocabularies(model: Tokenizer, draft: Tokenizer, name: str) -> IdMap | None:
    """The draft's ids for the model's tokens, by their spelling; None where all ids are the same.

    The draft may know more ids. ConfigError when it spells fewer than LEAST_SHARE of the model's tokens.
    """
    mine, other = model.spelling(), draft.spelling()
    ids = map_ids(mine, other, model.vocab_size)
    missing = sorted(index for index in mine if ids is not None and ids.drafted[index] < 0)
    if len(missing) <= (1 - LEAST_SHARE) * len(mine):
        return ids
    raise ConfigError(
        f"the draft {name} has another tokenizer: of the model's {len(mine)} tokens it spells "
        f"{len(mine) - len(missing)} (it has {len(other)}), {LEAST_SHARE:.0%} are needed; the first that it "
        f"lacks is {missing[0]}: {mine[missing[0]]!r}",
        remedy="choose a draft of the same family, or speculative.use: ngram",
    )
