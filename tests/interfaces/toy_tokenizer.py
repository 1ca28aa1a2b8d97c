"""Small tokenizers, trained in a moment, with the rules of large ones."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import sentencepiece
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Encoder

from strata.interfaces.tokenizer import Tokenizer
from strata.store.gguf_tokenizer import tokenizer_files

CORPUS = [
    "The quick brown fox jumps over the lazy dog. " * 3,
    "system user assistant think im_start im_end end of turn",
    "def add(a, b):\n    return a + b\n",
    "Füße, déjà vu, 世界 こんにちは, नमस्ते, 👩‍👩‍👧‍👦 and 😀😁",
] * 4
SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
SOFT = ("<think>", "</think>")  # added, but not special


@cache
def byte_level_json() -> str:
    encoder = Encoder(models.BPE())
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(SPECIAL),
    )
    encoder.train_from_iterator(CORPUS, trainer)
    encoder.add_tokens([AddedToken(token, special=False, normalized=False) for token in SOFT])
    return str(encoder.to_str())


def byte_level(**config: Any) -> Tokenizer:
    """Byte-level BPE as in GPT-2, Llama 3 and Qwen. config: tokenizer_config.json."""
    return from_json(byte_level_json(), config)


def from_json(tokenizer: str, settings: Mapping[str, Any], **others: Any) -> Tokenizer:
    files = {"tokenizer.json": tokenizer.encode(), "tokenizer_config.json": json.dumps(settings).encode()}
    files.update({f"{name}.json": json.dumps(value).encode() for name, value in others.items()})
    return Tokenizer(files, where="toy")


@cache
def sentencepiece_model(dummy_prefix: bool = True) -> sentencepiece.SentencePieceProcessor:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        vocab_size=500,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=dummy_prefix,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def sentencepiece_metadata(model: sentencepiece.SentencePieceProcessor, **extra: Any) -> dict[str, Any]:
    """The GGUF metadata of a SentencePiece model, as llama.cpp's converter writes it."""

    def kind(index: int) -> int:
        if model.is_unknown(index):
            return 2
        return 3 if model.is_control(index) else 6 if model.is_byte(index) else 1

    ids = range(model.vocab_size())
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [model.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": [kind(i) for i in ids],
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
        "tokenizer.ggml.unknown_token_id": model.unk_id(),
        **{f"tokenizer.ggml.{key}": value for key, value in extra.items()},
    }


def sentencepiece_bpe(**extra: Any) -> Tokenizer:
    """SentencePiece BPE with byte fallback as in Llama 2, rebuilt from GGUF metadata."""
    return Tokenizer(tokenizer_files(sentencepiece_metadata(sentencepiece_model(), **extra)), where="toy")
