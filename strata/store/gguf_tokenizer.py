"""Rebuild the tokenizer files of a Hugging Face checkpoint from GGUF metadata.

GGUF keeps a tokenizer as flat arrays (`tokenizer.ggml.tokens`, `.scores`, `.token_type`, `.merges`) and
leaves the rules to the program that reads them (format: ggml's docs/gguf.md; behaviour: llama.cpp's
llama-vocab.cpp). Here they become `tokenizer.json`, `tokenizer_config.json` and `generation_config.json`, so
that a store is the same whatever it was converted from.

- "gpt2": byte-level BPE; `tokenizer.ggml.pre` names the rule that cuts text into words.
- "llama": SentencePiece BPE; merges are derived from the scores: every way to cut a token into two tokens is
  a merge, and a higher score of the result merges first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strata.errors import FileFormatError, UnsupportedError
from strata.store.checkpoint_file import shown
from strata.store.pretokenizers import BYTE_LEVEL, pre_tokenizer

# tokenizer.ggml.token_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
MAX_TOKEN = 1024
"""Characters of one token. Published ones have 128 at most; deriving merges costs their square."""
SPACE = "\u2581"  # SentencePiece's visible space


@dataclass(frozen=True)
class _Vocabulary:
    """The checked arrays: token i has text tokens[i], kind types[i] and (SPM) score scores[i]."""

    tokens: list[str]
    types: list[int]
    scores: list[float]

    def entries(self) -> dict[str, int]:
        """Token -> id without the padding that some converters append."""
        return {token: index for index, token in enumerate(self.tokens) if self.types[index] != UNUSED}


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """GGUF metadata (key -> value) to file name -> content; UTF-8 JSON.

    Raises UnsupportedError for tokenizer models and pre-tokenizers without a rule here, FileFormatError for
    arrays that contradict each other.
    """
    model = metadata.get("tokenizer.ggml.model")
    builder = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe}.get(str(model))
    if builder is None:
        raise UnsupportedError(
            f"tokenizer.ggml.model is {model!r}: this kind of tokenizer is not supported",
            remedy="supported: gpt2 (byte-level BPE), llama (SentencePiece BPE)",
        )
    vocabulary = _vocabulary(metadata)
    tokenizer = builder(metadata, vocabulary)
    config = _tokenizer_config(metadata, vocabulary)
    tokenizer["post_processor"] = _post_processor(config, vocabulary, tokenizer["decoder"])
    files = {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": config,
        "generation_config.json": _generation_config(metadata, vocabulary),
    }
    return {name: json.dumps(value, ensure_ascii=False).encode() for name, value in files.items()}


def _vocabulary(metadata: Mapping[str, Any]) -> _Vocabulary:
    tokens = _array(metadata, "tokenizer.ggml.tokens")
    if not tokens:
        raise FileFormatError("tokenizer.ggml.tokens is missing or empty")
    types = [int(t) for t in _array(metadata, "tokenizer.ggml.token_type")] or [NORMAL] * len(tokens)
    scores = [float(s) for s in _array(metadata, "tokenizer.ggml.scores")] or [0.0] * len(tokens)
    for name, values in (("token_type", types), ("scores", scores)):
        if len(values) != len(tokens):
            raise FileFormatError(
                f"tokenizer.ggml.{name} has {len(values)} entries but tokenizer.ggml.tokens has {len(tokens)}"
            )
    texts = [t.decode("utf-8", "replace") if isinstance(t, bytes) else str(t) for t in tokens]
    longest = max(range(len(texts)), key=lambda index: len(texts[index]))
    if len(texts[longest]) > MAX_TOKEN:
        raise FileFormatError(
            f"tokenizer.ggml.tokens[{longest}] has {len(texts[longest])} characters, "
            f"at most {MAX_TOKEN} are read"
        )
    _check_distinct(texts, types)
    return _Vocabulary(texts, types, scores)


def _array(metadata: Mapping[str, Any], key: str) -> Sequence[Any]:
    """An array of the metadata as a list; a missing key is an empty one."""
    value = metadata.get(key)
    if value is None:
        return []
    if isinstance(value, (str, bytes, int, float)):
        raise FileFormatError(f"{key} is a {type(value).__name__}, not an array")
    return value.tolist() if hasattr(value, "tolist") else list(value)


def _check_distinct(tokens: list[str], types: list[int]) -> None:
    """Two ids for one text would make encoding ambiguous; padding is exempt."""
    seen: dict[str, int] = {}
    for index, token in enumerate(tokens):
        if types[index] == UNUSED:
            continue
        if token in seen:
            raise FileFormatError(f"tokenizer.ggml.tokens: {token!r} has the ids {seen[token]} and {index}")
        seen[token] = index


def _byte_level_bpe(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> dict[str, Any]:
    rule = pre_tokenizer(str(metadata.get("tokenizer.ggml.pre", "default")))
    vocab = vocabulary.entries()
    merges = list(_listed_merges(metadata, vocab))
    return _tokenizer_json(
        vocabulary,
        normalizer={"type": "NFC"} if rule.nfc else None,
        pre_tokenizer=rule.to_json(),
        decoder=BYTE_LEVEL,
        model={"vocab": vocab, "merges": merges, "ignore_merges": rule.ignore_merges},
    )


def _listed_merges(metadata: Mapping[str, Any], vocab: Mapping[str, int]) -> Iterator[list[str]]:
    """Pairs from `tokenizer.ggml.merges`; the first space after a character separates the two parts."""
    merges = _array(metadata, "tokenizer.ggml.merges")
    if not merges:
        raise FileFormatError("tokenizer.ggml.merges is missing or empty, and a gpt2 tokenizer needs it")
    for index, merge in enumerate(merges):
        cut = str(merge).find(" ", 1)
        left, right = str(merge)[:cut], str(merge)[cut + 1 :]
        if cut < 0 or left not in vocab or right not in vocab or left + right not in vocab:
            raise FileFormatError(
                f"tokenizer.ggml.merges[{index}] is {merge!r}, which does not join two tokens into a third"
            )
        yield [left, right]


def _sentencepiece_bpe(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> dict[str, Any]:
    vocab = vocabulary.entries()
    types = vocabulary.types
    unknown = vocabulary.tokens[types.index(UNKNOWN)] if UNKNOWN in types else None
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prepend = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    return _tokenizer_json(
        vocabulary,
        normalizer={"type": "Sequence", "normalizers": [*prepend, replace]},
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        model={
            "vocab": vocab,
            "merges": _scored_merges(vocabulary),
            "unk_token": unknown,
            "fuse_unk": True,
            "byte_fallback": BYTE in types,
        },
    )


def _scored_merges(vocabulary: _Vocabulary) -> list[list[str]]:
    """Every pair of mergeable tokens whose concatenation is one too, best score first.

    Ties follow the ids of the parts, as in training order. Control tokens and bytes never take part.
    """
    rank = {
        token: index
        for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind in (NORMAL, USER_DEFINED)
    }
    found = []
    for token, index in rank.items():
        for cut in range(1, len(token)):
            left, right = rank.get(token[:cut]), rank.get(token[cut:])
            if left is not None and right is not None:
                found.append((-vocabulary.scores[index], index, left, right))
    found.sort()
    return [[vocabulary.tokens[left], vocabulary.tokens[right]] for _, _, left, right in found]


def _tokenizer_json(
    vocabulary: _Vocabulary,
    *,
    normalizer: dict[str, Any] | None,
    pre_tokenizer: dict[str, Any] | None,
    decoder: dict[str, Any],
    model: dict[str, Any],
) -> dict[str, Any]:
    defaults = {"type": "BPE", "dropout": None, "unk_token": None, "fuse_unk": False, "byte_fallback": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(vocabulary),
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "decoder": decoder,
        "model": {**defaults, "continuing_subword_prefix": None, "end_of_word_suffix": None, **model},
    }


def _added_tokens(vocabulary: _Vocabulary) -> list[dict[str, Any]]:
    """Tokens that are found in text before anything else happens to it; only control tokens are `special`."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": index, "content": token, **flags, "special": kind != USER_DEFINED}
        for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind in (CONTROL, USER_DEFINED, UNKNOWN)
    ]


def _token_id(metadata: Mapping[str, Any], vocabulary: _Vocabulary, key: str) -> int | None:
    """The id under `tokenizer.ggml.<key>_token_id`, or None where absent.

    Raises FileFormatError for what is no id or lies past the vocabulary.
    """
    value = metadata.get(f"tokenizer.ggml.{key}_token_id")
    if value is None:
        return None
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or not 0 <= value < len(vocabulary.tokens):
        raise FileFormatError(
            f"tokenizer.ggml.{key}_token_id is {shown(value)} but the vocabulary has "
            f"{len(vocabulary.tokens)} tokens"
        )
    return int(value)


def _tokenizer_config(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": _adds_bos(metadata),
        "add_eos_token": bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
    }
    names = (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    for short, key in names:
        index = _token_id(metadata, vocabulary, key)
        if index is not None:
            config[f"{short}_token"] = vocabulary.tokens[index]
    template = _chat_template(metadata)
    if template:
        config["chat_template"] = template
    return config


def _adds_bos(metadata: Mapping[str, Any]) -> bool:
    """Whether raw text gets a BOS: the file's word, else llama.cpp's default for this kind of tokenizer."""
    stated = metadata.get("tokenizer.ggml.add_bos_token")
    if stated is not None:
        return bool(stated)
    if metadata.get("tokenizer.ggml.model") == "llama":
        return True
    return pre_tokenizer(str(metadata.get("tokenizer.ggml.pre", "default"))).add_bos


def _chat_template(metadata: Mapping[str, Any]) -> str | list[dict[str, str]] | None:
    """The template, or a list of named ones where the file has several (`tokenizer.chat_template.<name>`)."""
    default = metadata.get("tokenizer.chat_template")
    prefix = "tokenizer.chat_template."
    named = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}
    if not named:
        return None if default is None else str(default)
    if default is not None:
        named["default"] = default
    return [{"name": name, "template": str(text)} for name, text in named.items()]


def _generation_config(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> dict[str, Any]:
    """`eos_token_id` lists every id that ends an answer: end of text, of turn and of message."""
    stops = [_token_id(metadata, vocabulary, key) for key in ("eos", "eot", "eom")]
    config: dict[str, Any] = {"eos_token_id": sorted({s for s in stops if s is not None})}
    for short, key in (("bos", "bos"), ("pad", "padding")):
        index = _token_id(metadata, vocabulary, key)
        if index is not None:
            config[f"{short}_token_id"] = index
    return config


def _post_processor(
    config: Mapping[str, Any], vocabulary: _Vocabulary, decoder: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Other programs that read the store expect the BOS rule here."""
    bos = config.get("bos_token")
    if config["add_bos_token"] and bos is not None:
        special = {"id": bos, "ids": [vocabulary.tokens.index(bos)], "tokens": [bos]}
        begin = {"SpecialToken": {"id": bos, "type_id": 0}}
        first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
        return {
            "type": "TemplateProcessing",
            "single": [begin, first],
            "pair": [begin, first, begin, second],
            "special_tokens": {bos: special},
        }
    return dict(decoder) if decoder["type"] == "ByteLevel" else None
