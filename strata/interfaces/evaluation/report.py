"""Figures of `strata eval` for people and as JSON."""

from __future__ import annotations

from typing import Any

from strata.engine.continuations import Continuation
from strata.engine.perplexity import Comparison, Score
from strata.interfaces.evaluation.measuring import Compared
from strata.interfaces.evaluation.subject import Subject
from strata.interfaces.evaluation.texts import Text
from strata.interfaces.tokenizer import Tokenizer

_TAIL = 60  # characters of a prompt that are shown


def describe_score(subject: Subject, text: Text, score: Score) -> str:
    """One model."""
    return f"{subject.label}\n{_text_line(text)}\nperplexity {_perplexity(score)}"


def describe_comparison(found: Compared) -> str:
    """Two models. Percentages of the perplexity are paired: both met the same tokens."""
    figures = found.figures
    parts = [
        f"A  {found.reference.label}: perplexity {_perplexity(figures.reference)}",
        f"B  {found.other.label}: perplexity {_perplexity(figures.score)}",
        _text_line(found.text),
        _settings_line(found.reference, found.other),
        "",
        f"perplexity      {100 * figures.change:+.3f} % ± {100 * figures.change_error:.3f} %, paired",
        f"KL divergence   mean {figures.divergence:.3g} ± {figures.divergence_error:.2g} nats, median "
        f"{figures.divergence_at(0.5):.3g}, 99 % {figures.divergence_at(0.99):.3g}, largest "
        f"{figures.divergence_at(1.0):.3g}",
        f"same top token  {100 * figures.agreement:.2f} %",
    ]
    return "\n".join(parts + _continuation_lines(found))


def score_json(subject: Subject, text: Text, score: Score) -> dict[str, Any]:
    """One model; perplexity and its standard error."""
    return {**_subject_json(subject, score), "text": text_json(text)}


def comparison_json(found: Compared) -> dict[str, Any]:
    """Two models; shares as fractions, divergences in nats."""
    tokenizer = found.reference.tokenizer
    return {
        "a": _subject_json(found.reference, found.figures.reference),
        "b": _subject_json(found.other, found.figures.score),
        "text": text_json(found.text),
        **figures_json(found.figures),
        "continuations": [_continuation_json(one, tokenizer) for one in found.continuations],
    }


def figures_json(figures: Comparison) -> dict[str, Any]:
    """What was measured between two models."""
    return {
        "perplexity_change": figures.change,
        "perplexity_change_error": figures.change_error,
        "kl": {
            "mean": figures.divergence,
            "mean_error": figures.divergence_error,
            "median": figures.divergence_at(0.5),
            "p99": figures.divergence_at(0.99),
            "max": figures.divergence_at(1.0),
        },
        "top1": figures.agreement,
    }


def text_json(text: Text) -> dict[str, Any]:
    """Which text, and how it was cut."""
    return {
        "name": text.name,
        "xxh3": text.xxh3,
        "tokens": text.tokens,
        "predictions": text.predictions,
        "window": text.cut.window,
        "second_half": text.cut.second_half,
    }


def _subject_json(subject: Subject, score: Score) -> dict[str, Any]:
    return {
        "model": subject.label,
        "store": str(subject.path),
        "kv_dtype": subject.kv_dtype,
        "activations": subject.activations,
        "perplexity": score.perplexity,
        "perplexity_error": score.standard_error,
    }


def _continuation_json(one: Continuation, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "prompt": tokenizer.decode(one.prompt, skip_special=False),
        "same_tokens": one.diverges,
        "a": tokenizer.decode(one.reference, skip_special=False, continuation=True),
        "b": tokenizer.decode(one.other, skip_special=False, continuation=True),
    }


def _perplexity(score: Score) -> str:
    return f"{score.perplexity:.4f} ± {score.standard_error:.4f}"


def _text_line(text: Text) -> str:
    halves = ", the second half of each" if text.cut.second_half else ""
    return (
        f"{text.name} ({text.xxh3}): {text.predictions:,} predictions in windows of {text.cut.window}{halves}"
    )


def _settings_line(one: Subject, two: Subject) -> str:
    """What both ran with, each where they differ."""
    mine, theirs = (f"activations {subject.activations}, KV {subject.kv_dtype}" for subject in (one, two))
    return f"both with {mine}" if mine == theirs else f"A with {mine}; B with {theirs}"


def _continuation_lines(found: Compared) -> list[str]:
    """The texts that part, each from where it does."""
    tokenizer = found.reference.tokenizer
    parting = [one for one in found.continuations if one.diverges is not None]
    if not found.continuations:
        return []
    lines = ["", f"greedy continuations: {len(parting)} of {len(found.continuations)} part"]
    for one in parting:
        same = one.diverges or 0
        before = tokenizer.decode((*one.prompt, *one.reference[:same]), skip_special=False)
        lines.append(f"  after {same} tokens: ...{before[-_TAIL:]!r}")
        for name, answer in (("A", one.reference), ("B", one.other)):
            rest = tokenizer.decode(answer[same:], skip_special=False, continuation=True)
            lines.append(f"    {name} {rest!r}")
    return lines
