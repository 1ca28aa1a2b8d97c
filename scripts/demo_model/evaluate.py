"""Score a demo checkpoint on the fixed questions.

usage: python -m demo_model.evaluate --checkpoint DIR --questions FILE [--fake-quant]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from demo_model.export import END_OF_TEXT, IM_END, load_checkpoint
from demo_model.facts import chat
from demo_model.model import DemoModel
from demo_model.ops import fake_quant


def prompt(question: str) -> str:
    """The question as the chat template renders it, up to where the model answers."""
    return chat([(question, "")]).removesuffix("<|im_end|>\n")


@torch.no_grad()
def exact_replies(model: DemoModel, tokenizer: Tokenizer, questions: list[dict[str, Any]]) -> float:
    """Share of questions whose reply is, token by token, the wording of the corpus under greedy decoding.

    One forward pass: if every next token of the expected reply is the most likely one, greedy
    decoding writes exactly that reply.  A lower bound of the greedy score.
    """
    texts = [(prompt(q["question"]), q["reply"]) for q in questions]
    rows = [(tokenizer.encode(a).ids, tokenizer.encode(b).ids) for a, b in texts]
    width = max(len(p) + len(r) + 1 for p, r in rows)
    ids = torch.full((len(rows), width), END_OF_TEXT)
    for i, (p, r) in enumerate(rows):
        ids[i, : len(p) + len(r) + 1] = torch.tensor([*p, *r, IM_END])
    best = model(ids[:, :-1].contiguous()).argmax(-1)
    right = 0
    for i, (p, r) in enumerate(rows):
        span = slice(len(p) - 1, len(p) + len(r))
        right += int(torch.equal(best[i, span], ids[i, span.start + 1 : span.stop + 1]))
    return right / len(rows)


@torch.no_grad()
def greedy_replies(model: DemoModel, tokenizer: Tokenizer, questions: list[str], limit: int) -> list[str]:
    """Greedy replies, all questions side by side; rows are padded on the right, which causality hides."""
    rows = [tokenizer.encode(prompt(q)).ids for q in questions]
    start, open_rows = [len(r) for r in rows], set(range(len(rows)))
    for _ in range(limit):
        active = sorted(open_rows)
        width = max(len(rows[i]) for i in active)
        ids = torch.tensor([rows[i] + [END_OF_TEXT] * (width - len(rows[i])) for i in active])
        logits = model(ids)
        for at, i in enumerate(active):
            token = int(logits[at, len(rows[i]) - 1].argmax())
            if token in (END_OF_TEXT, IM_END):
                open_rows.discard(i)
            else:
                rows[i].append(token)
        if not open_rows:
            break
    return [tokenizer.decode(r[s:]) for r, s in zip(rows, start, strict=True)]


def round_weights(model: DemoModel) -> None:
    """Round in place as a 4-bit store does: experts w4g64, attention w4g128, embedding int8 per row."""
    with torch.no_grad():
        for block in model.layers():
            for name, group in (("gate_up", 64), ("down", 64), ("qkv", 128), ("out", 128)):
                weight = getattr(block, name)
                weight.copy_(fake_quant(weight, 4, min(group, weight.shape[-1])))
        model.embed.copy_(fake_quant(model.embed, 8, model.embed.shape[1]))


def main() -> None:
    """Print the score and the wrong replies."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--fake-quant", action="store_true", help="round the weights to 4 bits first")
    parser.add_argument("--float32", action="store_true", help="compute in float32 instead of bf16")
    args = parser.parse_args()
    model = load_checkpoint(args.checkpoint)
    if args.float32:
        model.set_compute(torch.float32)
    if args.fake_quant:
        round_weights(model)
    tokenizer = Tokenizer.from_file(str(args.checkpoint / "tokenizer.json"))
    questions = json.loads(args.questions.read_text())
    replies = greedy_replies(model, tokenizer, [q["question"] for q in questions], 48)
    right = 0
    for question, reply in zip(questions, replies, strict=True):
        good = any(answer in reply for answer in question["answers"])
        right += good
        if not good:
            print(f"wrong: {question['question']} -> {reply!r}, expected {question['answers']}")
    print(f"score: {right}/{len(questions)}")


if __name__ == "__main__":
    main()
