"""`strata eval kv`: what each kind of KV cache costs."""

from __future__ import annotations

import click


@click.command("kv")
@click.argument("model", metavar="MODEL")
@click.option("--config", "config_file", metavar="FILE", help="See configs/default.yaml.")
@click.option("--set", "settings", metavar="SECTION.KEY=VALUE", multiple=True, help="Change any option.")
@click.option(
    "--tokens", type=click.IntRange(2), metavar="N", default=800, help="Written by the model. [800]"
)
@click.option("--prompt", type=click.IntRange(3), metavar="N", default=64, help="Tokens given before. [64]")
@click.option(
    "--ends",
    type=click.IntRange(1),
    metavar="N",
    default=100,
    help="First and last ones; half at most. [100]",
)
@click.option("--seed", type=click.IntRange(0), metavar="N", default=0, help="Of the text. [0]")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def kv(
    model: str,
    config_file: str | None,
    settings: tuple[str, ...],
    tokens: int,
    prompt: int,
    ends: int,
    seed: int,
    as_json: bool,
) -> None:
    """What keeping keys and values in fewer bits costs.

    The model writes --tokens tokens over a BF16 cache, sampled at temperature 1. Then it foresees the same
    text over every other: int8t has one scale per layer for keys and one for values, from the largest
    elements of the prompt (larger ones are clipped), and is there for comparison only; int8 has one per token
    and head; int8g64 and its like one per so many elements of a head; f32 rounds nothing. Shown are
    perplexity at the beginning, at the end and over all, Kullback-Leibler divergence from BF16, and bytes
    per token of context. Activations are f32: only KV differs.

    \b
    Examples:
      strata eval kv demo
      strata eval kv smollm2 --tokens 1600 --json
    """
    from strata.interfaces.evaluation.kv import KvAsked, describe_kv, kv_json, measure_kv
    from strata.interfaces.evaluation.subject import Asked
    from strata.interfaces.terminal import show

    asked = KvAsked(prompt, tokens, min(ends, tokens // 2), seed)  # ends that do not overlap
    found = measure_kv(Asked(model, settings, config_file), asked)
    show(kv_json(found) if as_json else describe_kv(found))
