"""`strata eval kv`: a model's own text, foreseen over every kind of KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from strata.core import Request, SamplingParams
from strata.engine.kv_comparison import TRUTH, VARIANTS, KvResult, KvText, compare_kv
from strata.engine.perplexity import Comparison
from strata.errors import UsageError
from strata.interfaces.evaluation.subject import Asked, Subject
from strata.interfaces.evaluation.texts import PROSE, Cut, read_text
from strata.interfaces.progress import progress_bar

_SETTINGS = ("kv.dtype=bf16", "backend.name=cpu", "backend.activations=f32", "device.use=none")


@dataclass(frozen=True)
class KvAsked:
    """prompt, written: tokens. end: how many of the first and last written ones are looked at apart."""

    prompt: int
    written: int
    end: int
    seed: int

    @property
    def ends(self) -> tuple[slice, slice]:
        """The first and the last written tokens."""
        return slice(0, self.end), slice(-self.end, None)


@dataclass(frozen=True)
class KvCompared:
    """What came of it. head: elements of a key or value, the larger; text: what the model wrote."""

    label: str
    asked: KvAsked
    head: int
    text: str
    results: list[KvResult]


def measure_kv(asked: Asked, how: KvAsked) -> KvCompared:
    """Text that the model writes over BF16, then every cache on it. Activations are f32: only KV differs.

    UsageError where prompt and text exceed the model's context.
    """
    subject = Subject.open(
        Asked(asked.model, (*asked.settings, *_SETTINGS), asked.config_file), how.prompt + how.written
    )
    room = subject.engine.options.context
    if how.prompt + how.written > room:
        raise UsageError(
            f"{how.prompt} tokens of prompt and {how.written} to write, the context has {room}",
            remedy="fewer --tokens",
        )
    prompt = read_text(PROSE, subject.tokenizer, Cut(how.prompt, how.prompt)).windows[0]
    written = _write(subject, prompt, how)
    results = compare_kv(subject.engine.decoder, KvText(prompt, written), subject.engine.options.page_tokens)
    kv = subject.engine.kv
    wrote = subject.tokenizer.decode(written, skip_special=False)
    return KvCompared(asked.label, how, max(kv.key_dim, kv.value_dim), wrote, results)


def _write(subject: Subject, prompt: tuple[int, ...], how: KvAsked) -> list[int]:
    """Sampled from all tokens as likely as the model finds them: greedy text repeats itself before long."""
    sampling = SamplingParams(
        temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=how.seed, max_tokens=how.written, ignore_eos=True
    )
    written = []
    with progress_bar("writing", unit="tokens") as progress:
        for token in subject.engine.generate(Request("written", list(prompt), sampling)):
            written.append(token)
            if progress is not None:
                progress(len(written), how.written, "")
    return written


def describe_kv(found: KvCompared) -> str:
    """A table; the first line is BF16 itself."""
    end, written = found.asked.end, found.asked.written
    head = (
        "KV",
        "bytes/token",
        f"ppl 1-{end}",
        f"{written - end + 1}-{written}",
        "all",
        "change",
        "KL, nats",
    )
    truth = found.results[0].figures.reference
    rows: list[tuple[str, ...]] = [(*head, "99 %", f"{written - end + 1}-{written}", "same top")]
    for one in found.results:
        first, last = (one.part(tokens) for tokens in found.asked.ends)
        figures = one.figures
        rows.append(
            (
                one.dtype,
                f"{one.token_bytes:,.0f}",
                *(f"{part.score.perplexity:.4f}" for part in (first, last, figures)),
                f"{figures.change:+.3%} ± {figures.change_error:.3%}",
                f"{figures.divergence:.2e}",
                f"{figures.divergence_at(0.99):.2e}",
                f"{last.divergence:.2e}",
                f"{figures.agreement:.2%}",
            )
        )
    intro = (
        f"{found.label}: {written} tokens written over {TRUTH} after {found.asked.prompt} of prompt "
        f"(seed {found.asked.seed}), perplexity {truth.perplexity:.4f} ± {truth.standard_error:.4f}"
    )
    return "\n".join((intro, "", *_aligned(rows), *_left_out(found)))


def _left_out(found: KvCompared) -> list[str]:
    """Groups that a head has no more than one of are the head's own scale."""
    same = [dtype for dtype in VARIANTS if dtype not in {one.dtype for one in found.results}]
    heads = f"heads have {found.head} elements"
    return ["", f"{' and '.join(same)}: the same as int8, because {heads}"] if same else []


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """The first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            (
                row[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
            )
        )
        for row in rows
    ]


def kv_json(found: KvCompared) -> dict[str, Any]:
    """Shares as fractions, divergences in nats, bytes of one token over all layers."""
    return {
        "model": found.label,
        "prompt_tokens": found.asked.prompt,
        "written_tokens": found.asked.written,
        "end_tokens": found.asked.end,
        "seed": found.asked.seed,
        "text": found.text,
        "caches": [_result_json(one, found.asked) for one in found.results],
    }


def _result_json(one: KvResult, asked: KvAsked) -> dict[str, Any]:
    first, last = (one.part(tokens) for tokens in asked.ends)
    parts = {"first": first, "last": last, "all": one.figures}
    return {
        "dtype": one.dtype,
        "bytes_per_token": one.token_bytes,
        **{name: _part_json(part) for name, part in parts.items()},
    }


def _part_json(part: Comparison) -> dict[str, Any]:
    return {
        "perplexity": part.score.perplexity,
        "perplexity_change": part.change,
        "perplexity_change_error": part.change_error,
        "kl_mean": part.divergence,
        "kl_p99": part.divergence_at(0.99),
        "top1": part.agreement,
    }
