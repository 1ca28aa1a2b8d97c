"""`strata eval`: what a model foresees, and what a cheaper one of it lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from strata.errors import UsageError
from strata.interfaces.commands.eval_kv import kv

if TYPE_CHECKING:  # commands import what is heavy when they run
    from strata.interfaces.evaluation.subject import Asked, Subject
    from strata.interfaces.evaluation.texts import Cut, Text


@click.group("eval", short_help="How well a model foresees a text, what a cheaper one lost.")
def command() -> None:
    """How well does a model foresee a text, and what did a cheaper one lose?

    \b
    Examples:
      strata eval perplexity demo
      strata eval compare demo --set-b kv.dtype=f32
      strata eval compare models/Qwen3-30B-A3B stores/qwen3-30b-w4
      strata eval layers models/Qwen3-30B-A3B stores/qwen3-30b-w4
      strata eval kv demo
    """


command.add_command(kv)


def text_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Which text, and how it is cut; what every command of the group takes."""
    for option in reversed(
        (
            click.option("--config", "config_file", metavar="FILE", help="See configs/default.yaml."),
            click.option("--text", type=click.Path(path_type=Path), metavar="FILE", help="UTF-8. [a novel]"),
            click.option(
                "--window",
                type=click.IntRange(2),
                metavar="N",
                default=512,
                help="Tokens that see each other. [512]",
            ),
            click.option("--tokens", type=click.IntRange(3), metavar="N", help="Of the text, at most."),
            click.option("--second-half", is_flag=True, help="Score as llama-perplexity does; see above."),
            click.option("--json", "as_json", is_flag=True, help="Machine-readable output."),
        )
    ):
        function = option(function)
    return function


def two_models(function: Callable[..., Any]) -> Callable[..., Any]:
    """Settings of both models, and of one alone."""
    for name, text, remark in (
        ("settings_b", "--set-b", "Of B alone."),
        ("settings_a", "--set-a", "Of A alone."),
        ("settings", "--set", "Change any option, of both."),
    ):
        function = click.option(text, name, metavar="SECTION.KEY=VALUE", multiple=True, help=remark)(function)
    return function


@command.command("perplexity")
@click.argument("model", metavar="MODEL")
@click.option("--set", "settings", metavar="SECTION.KEY=VALUE", multiple=True, help="Change any option.")
@text_options
def perplexity(
    model: str,
    settings: tuple[str, ...],
    config_file: str | None,
    text: Path | None,
    window: int,
    tokens: int | None,
    second_half: bool,
    as_json: bool,
) -> None:
    """exp of the mean surprise, in nats, at each token of a text.

    MODEL is what `strata run` takes: a store, a GGUF file, a Hugging Face directory, demo or smollm2. What is
    no store is taken as it is: BF16 stays BF16 unless convert.* says otherwise, in a folder of its own. The
    text is cut into windows that begin without a past. Without --text it is the beginning of a novel of
    1814 and the Declaration of Independence, 35 KB. --second-half: whole windows only, and only tokens
    behind the middle of each are scored, so that figures stand beside llama-perplexity's.

    \b
    Examples:
      strata eval perplexity demo --set kv.dtype=f32
      strata eval perplexity smollm2 --text notes.txt --window 1024 --json
    """
    from strata.interfaces.evaluation import report
    from strata.interfaces.evaluation.measuring import measure_perplexity
    from strata.interfaces.evaluation.subject import Asked
    from strata.interfaces.evaluation.texts import Cut
    from strata.interfaces.terminal import show

    subject = open_subject(Asked(model, settings, config_file), window)
    cut = read(text, subject, Cut(window, tokens, second_half))
    found = measure_perplexity(subject, cut)
    form: Callable[..., object] = report.score_json if as_json else report.describe_score
    show(form(subject, cut, found))


@command.command("compare")
@click.argument("model", metavar="A")
@click.argument("other", metavar="[B]", required=False)
@two_models
@click.option("--record", "keep", is_flag=True, help="Write the figures into B, a store, for `inspect`.")
@click.option(
    "--samples", type=click.IntRange(0, 64), metavar="N", default=4, help="Greedy continuations shown. [4]"
)
@text_options
def compare(
    model: str,
    other: str | None,
    settings: tuple[str, ...],
    settings_a: tuple[str, ...],
    settings_b: tuple[str, ...],
    keep: bool,
    samples: int,
    config_file: str | None,
    text: Path | None,
    window: int,
    tokens: int | None,
    second_half: bool,
    as_json: bool,
) -> None:
    """What B lost against A, token by token of a text.

    A is the reference; without B it is the same model with other settings (--set-b). Perplexity of both and
    its change, with the standard error of paired tokens; Kullback-Leibler divergence of B's predictions from
    A's; how often both find the same token likeliest; and texts that go on differently. Text, --window and
    --second-half are those of `strata eval perplexity`. --record keeps the figures in B's receipts.json, so
    that `strata inspect` and `strata run` say what its formats cost.

    \b
    Examples:
      strata eval compare demo --set-b kv.dtype=f32
      strata eval compare smollm2 --set-a convert.shared=bf16 --set-b convert.shared=w4g64
      strata eval compare models/Qwen3-30B-A3B stores/qwen3-30b-w4 --record --json
    """
    from strata.interfaces.evaluation import receipts, report
    from strata.interfaces.evaluation.measuring import measure_comparison
    from strata.interfaces.evaluation.texts import Cut
    from strata.interfaces.terminal import note, show

    one, two = _open_both(model, other, (settings, settings_a, settings_b), config_file, window)
    cut = read(text, one, Cut(window, tokens, second_half))
    if keep:
        receipts.check(one, two)
    found = measure_comparison(one, two, cut, samples)
    if keep:
        note(f"recorded in {receipts.record(found)}")
    form: Callable[..., object] = report.comparison_json if as_json else report.describe_comparison
    show(form(found))


def open_subject(asked: Asked, window: int, *, models: int = 1) -> Subject:
    """A model with room for a window and for a continuation, one of `models` at the same time.

    UsageError: its context is shorter than the window.
    """
    from strata.interfaces.evaluation.measuring import ANSWER_TOKENS, PROMPT_TOKENS
    from strata.interfaces.evaluation.subject import Subject

    subject = Subject.open(asked, max(window, PROMPT_TOKENS + ANSWER_TOKENS), models)
    if window > subject.spec.context:
        raise UsageError(
            f"--window is {window}, the context of {subject.label} is {subject.spec.context} tokens",
            remedy="a shorter window",
        )
    return subject


def _open_both(
    model: str, other: str | None, settings: tuple[tuple[str, ...], ...], config_file: str | None, window: int
) -> tuple[Subject, Subject]:
    """A and B; settings: of both, of A, of B. UsageError where they are the same by what was said."""
    from strata.interfaces.evaluation.subject import Asked

    both, of_a, of_b = settings
    if other is None and of_a == of_b:
        raise UsageError(f"{model} is compared with itself", remedy="name a B, or --set-b, e.g. kv.dtype=f32")
    one = open_subject(Asked(model, (*both, *of_a), config_file), window, models=2)
    return one, open_subject(
        Asked(model if other is None else other, (*both, *of_b), config_file), window, models=2
    )


def read(text: Path | None, subject: Subject, cut: Cut) -> Text:
    """The text, or the one that comes with Strata, in the model's tokens."""
    from strata.interfaces.evaluation.texts import PROSE, read_text

    return read_text(text or PROSE, subject.tokenizer, cut)


@command.command("layers")
@click.argument("model", metavar="A")
@click.argument("other", metavar="[B]", required=False)
@two_models
@click.option("--config", "config_file", metavar="FILE", help="See configs/default.yaml.")
@click.option("--text", type=click.Path(path_type=Path), metavar="FILE", help="UTF-8. [a novel]")
@click.option(
    "--tokens", type=click.IntRange(2, 512), metavar="N", default=128, help="Of the text, in one batch. [128]"
)
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def layers(
    model: str,
    other: str | None,
    settings: tuple[str, ...],
    settings_a: tuple[str, ...],
    settings_b: tuple[str, ...],
    config_file: str | None,
    text: Path | None,
    tokens: int,
    as_json: bool,
) -> None:
    """In which layer does B leave A? The same batch through both.

    Per layer: largest absolute error, cosine and relative error of the hidden state behind it; its own error,
    which is that of B's layer when it is given A's input; and, where it routes, how many of the chosen
    experts are equal and how far the router's logits are off. Layers whose own error jumps are marked.

    \b
    Examples:
      strata eval layers demo --set-a backend.activations=f32
      strata eval layers models/Qwen3-30B-A3B stores/qwen3-30b-w4 --json
    """
    from strata.interfaces.evaluation import layers_report
    from strata.interfaces.evaluation.measuring import measure_layers
    from strata.interfaces.evaluation.texts import Cut
    from strata.interfaces.terminal import show

    one, two = _open_both(model, other, (settings, settings_a, settings_b), config_file, tokens)
    cut = read(text, one, Cut(max(tokens, 3), max(tokens, 3)))
    errors = measure_layers(one, two, cut)
    form: Callable[..., object] = layers_report.layers_json if as_json else layers_report.describe_layers
    show(form((one.label, two.label), len(cut.windows[0]), errors))
