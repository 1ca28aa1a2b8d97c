"""Train the byte-level BPE tokenizer on a corpus and encode every domain to uint16 token files.

usage: python -m demo_model.train_tokenizer --corpus DIR --out DIR [--vocab 4096]
Writes tokenizer.json, <domain>.train.bin and <domain>.val.bin (uint16, documents end with token 0).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SAMPLE_CHARS = {"facts": 1_200_000, "talk": 400_000}
DEFAULT_SAMPLE = 1_500_000


def read_corpus(folder: Path) -> dict[str, list[str]]:
    """Documents by domain."""
    return {p.stem: p.read_text(encoding="utf8").split("\0") for p in sorted(folder.glob("*.txt"))}


def sample(corpus: dict[str, list[str]]) -> Iterator[str]:
    """A bounded sample of each domain, so that no domain owns the vocabulary."""
    for name, documents in corpus.items():
        room = SAMPLE_CHARS.get(name, DEFAULT_SAMPLE)
        for document in documents:
            yield document
            room -= len(document)
            if room < 0:
                break


def train(corpus: dict[str, list[str]], vocab: int) -> Tokenizer:
    """Byte-level BPE with GPT-2's word pattern; the special tokens take the first three ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(sample(corpus), trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, documents: list[str]) -> np.ndarray:
    """uint16 token ids of all documents, each closed by token 0."""
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(documents):
        ids += encoding.ids
        ids.append(0)
    return np.array(ids, dtype=np.uint16)


def main() -> None:
    """Train, encode, report bytes per token."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocab", type=int, default=4096)
    args = parser.parse_args()
    corpus = read_corpus(args.corpus)
    tokenizer = train(corpus, args.vocab)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(args.out / "tokenizer.json"))
    sizes = {}
    for name, documents in corpus.items():
        held_out = max(1, len(documents) // 50)
        for split, part in (("val", documents[:held_out]), ("train", documents[held_out:])):
            ids = encode(tokenizer, part)
            ids.tofile(args.out / f"{name}.{split}.bin")
            sizes[f"{name}.{split}"] = {"tokens": len(ids), "bytes": sum(len(d.encode()) for d in part)}
        print(name, sizes[f"{name}.train"])
    (args.out / "sizes.json").write_text(json.dumps(sizes, indent=1))


if __name__ == "__main__":
    main()
