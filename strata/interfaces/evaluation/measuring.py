"""From loaded models and a text to figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from strata.engine.compare_layers import LayerErrors, compare_layers
from strata.engine.continuations import Continuation, continuations
from strata.engine.perplexity import Comparison, Predictions, Score, compare, score
from strata.errors import UsageError
from strata.interfaces.evaluation.subject import Subject, check_same_vocabulary
from strata.interfaces.evaluation.texts import Text
from strata.interfaces.importing import Progress
from strata.interfaces.progress import progress_bar

PROMPT_TOKENS, ANSWER_TOKENS = 32, 48
"""Of a greedy continuation."""


@dataclass(frozen=True)
class Compared:
    """Two models on a text, the first of them the reference."""

    reference: Subject
    other: Subject
    text: Text
    figures: Comparison
    continuations: tuple[Continuation, ...]


def measure_perplexity(subject: Subject, text: Text) -> Score:
    """How well a model foresees a text."""
    with progress_bar("measuring", unit="tokens") as progress:
        parts = subject.predictions(text.windows, second_half=text.cut.second_half)
        return score(_watched(parts, text.predictions, progress))


def measure_comparison(reference: Subject, other: Subject, text: Text, samples: int) -> Compared:
    """A model beside its reference on a text, and how `samples` of its sentences go on in both.

    In memory are one chunk's logits of each. Raises UsageError for different vocabularies.
    """
    check_same_vocabulary(reference, other)
    halves = text.cut.second_half
    with progress_bar("comparing", unit="tokens") as progress:
        mine = _watched(reference.predictions(text.windows, second_half=halves), text.predictions, progress)
        figures = compare(mine, {"other": other.predictions(text.windows, second_half=halves)})["other"]
    room = min(PROMPT_TOKENS, reference.engine.options.context - 1, other.engine.options.context - 1)
    prompts = [window[:room] for window in _spread(text.windows, samples)]
    stops = reference.tokenizer.stop_ids
    found = continuations(reference.engine, other.engine, prompts, ANSWER_TOKENS, stops)
    return Compared(reference, other, text, figures, tuple(found))


def measure_layers(reference: Subject, other: Subject, text: Text) -> list[LayerErrors]:
    """Layer by layer over the text's first window. UsageError for models that have no layers in common."""
    check_same_vocabulary(reference, other)
    one, two = reference.spec, other.spec
    if (one.layers, one.hidden) != (two.layers, two.hidden):
        raise UsageError(
            f"{reference.label} has {one.layers} layers of {one.hidden}, "
            f"{other.label} {two.layers} of {two.hidden}",
            remedy="compare conversions of the same model",
        )
    found = []
    with progress_bar("comparing", unit="layers") as progress:
        for errors in compare_layers(reference.engine, other.engine, text.windows[0]):
            found.append(errors)
            if progress is not None:
                progress(len(found), one.layers, "")
    return found


def _spread(windows: tuple[tuple[int, ...], ...], count: int) -> list[tuple[int, ...]]:
    """So many of them, evenly over the text."""
    count = min(count, len(windows))
    return [windows[index * len(windows) // count] for index in range(count)]


def _watched(parts: Iterator[Predictions], total: int, progress: Progress | None) -> Iterator[Predictions]:
    """The same; tells how far it is when the next part is asked for."""
    done = 0
    for part in parts:
        yield part
        done += len(part.following)
        if progress is not None:
            progress(done, total, "")
