"""What a configuration asks of speculative decoding."""

from __future__ import annotations

import dataclasses

from strata.config import Config
from strata.engine.speculative.draft_length import LengthOptions
from strata.engine.speculative.make import SpeculationOptions
from strata.errors import ConfigError
from strata.hardware.profile import HardwareProfile
from strata.interfaces.importing import Progress
from strata.interfaces.stores import store_path
from strata.interfaces.tokenizer import Tokenizer


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


def speculation_options(
    config: Config, machine: HardwareProfile, tokenizer: Tokenizer, progress: Progress | None = None
) -> SpeculationOptions | None:
    """None: every step is a token. tokenizer: the model's; progress: hears of the draft's conversion.

    ConfigError where lengths contradict each other, or the draft has another tokenizer.
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
        return SpeculationOptions(machine, lengths, asked.costs)
    other = dataclasses.replace(config, model=dataclasses.replace(config.model, path=name))
    path = store_path(other, progress=progress)
    check_vocabularies(tokenizer, Tokenizer.load(path), name)
    return SpeculationOptions(machine, lengths, asked.costs, path)


def check_vocabularies(model: Tokenizer, draft: Tokenizer, name: str) -> None:
    """ConfigError unless every id of the model means the same to the draft; the draft may know more ids."""
    mine, other = model.spelling(), draft.spelling()
    differing = sorted(index for index, text in mine.items() if other.get(index) != text)
    if differing:
        first = differing[0]
        raise ConfigError(
            f"the draft {name} has another tokenizer: {len(differing)} of the model's {len(mine)} ids differ "
            f"(it has {len(other)}); the first is {first}: {mine[first]!r}, there {other.get(first)!r}",
            remedy="choose a draft of the same family, or speculative.use: ngram",
        )
