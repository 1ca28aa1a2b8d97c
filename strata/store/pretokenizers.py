"""What `tokenizer.ggml.pre` stands for: how each family of BPE models cuts text before merging.

GGUF keeps only a name; llama.cpp knows the rule behind it. The patterns are those of the models' own
tokenizer.json files (llama.cpp lists them in `src/llama-vocab.cpp`), in the syntax of Oniguruma, which the
`tokenizers` library uses. Several patterns apply one after the other, each to the pieces the former left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from strata.errors import UnsupportedError

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+"
_SPACES = r"\s+(?!\S)|\s+"
_TAIL = rf"{_PUNCTUATION}[\r\n]*|\s*[\r\n]+|{_SPACES}"
_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_WORDS}|\p{{N}}|{_TAIL}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}"
)
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K_TAIL = rf"{_PUNCTUATION}[\r\n/]*|\s*[\r\n]+|{_SPACES}"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_O200K_TAIL}"
)
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|{_O200K_TAIL}"
)
_KIMI_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_KIMI_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_KIMI_K2 = (
    rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}*{_KIMI_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}+{_KIMI_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_TAIL}"
)
_CJK = "[一-龥\u3040-ゟ゠-ヿ]+"
_DEEPSEEK_V3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}"
)
_DEEPSEEK_CJK = "[一-龥ࠀ-一가-\ud7ff]+"
_DEEPSEEK_LLM_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝ"
    "Ὗ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛ"
    "Ꜣ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    rf"|\s*[\r\n]|{_SPACES}"
)
_SEED = rf"{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|{_SPACES}"


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}


@dataclass(frozen=True)
class PreTokenizer:
    """Patterns applied in order; nfc: text is normalised first; ignore_merges: whole words that are tokens
    are taken as they are; add_bos: the default where the file does not say."""

    patterns: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False

    def to_json(self) -> dict[str, Any]:
        """The `pre_tokenizer` section of tokenizer.json: isolate every pattern, then map bytes to letters."""
        splits = [
            {"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False}
            for p in self.patterns
        ]
        return {"type": "Sequence", "pretokenizers": [*splits, BYTE_LEVEL]}


_GPT2_RULE = PreTokenizer((_GPT2,))
_DIGITS_GPT2_RULE = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA3_RULE = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_CL100K_RULE = PreTokenizer((_LLAMA3,))
_QWEN2_RULE = PreTokenizer((_QWEN2,), nfc=True)
_O200K_RULE = PreTokenizer((_O200K,))
_DEEPSEEK_V3_RULE = PreTokenizer((r"\p{N}{1,3}", _CJK, _DEEPSEEK_V3))
_BAILING_RULE = PreTokenizer((_BAILING,))
_DEFAULT_RULE = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))

_RULES: tuple[tuple[PreTokenizer, tuple[str, ...]], ...] = (
    (_DEFAULT_RULE, ("default",)),
    (_GPT2_RULE, ("gpt-2", "phi-2", "exaone4", "trillion", "granite-docling", "mellum", "gigachat", "mpt")),
    (PreTokenizer((_GPT2,), nfc=True), ("olmo",)),
    (
        _DIGITS_GPT2_RULE,
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
    ),
    (_LLAMA3_RULE, ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2")),
    (_CL100K_RULE, ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe")),
    (PreTokenizer((r"\p{N}{1,3}", _LLAMA3), ignore_merges=True), ("minicpm5",)),
    (_QWEN2_RULE, ("qwen2", "megrez")),
    (PreTokenizer((_QWEN2,)), ("stablelm2", "deepseek-r1-qwen", "hunyuan", "solar-open", "grok-2", "kormo")),
    (PreTokenizer((_QWEN35,), nfc=True), ("qwen35",)),
    (_O200K_RULE, ("gpt-4o", "llama4", "kanana2", "minimax-m2")),
    (PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True), ("tekken",)),
    (PreTokenizer((_KIMI_K2,)), ("kimi-k2",)),
    (
        PreTokenizer(
            (
                r"[\r\n]",
                rf"\s?[{_DEEPSEEK_LLM_LETTERS}]+",
                r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
                r"\s+$",
                _DEEPSEEK_CJK,
                r"\p{N}+",
            )
        ),
        ("deepseek-llm",),
    ),
    (PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")), ("deepseek-coder",)),
    (_DEEPSEEK_V3_RULE, ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4")),
    (_BAILING_RULE, ("bailingmoe", "bailingmoe2", "llada-moe")),
    (PreTokenizer((_SEED,)), ("seed-coder",)),
    (PreTokenizer((r"[^\n]+|[\n]+", _QWEN2)), ("laguna",)),
)
PRE_TOKENIZERS: dict[str, PreTokenizer] = {name: rule for rule, names in _RULES for name in names}


def pre_tokenizer(name: str) -> PreTokenizer:
    """The rule behind a `tokenizer.ggml.pre` value. Raises UnsupportedError for names without one."""
    rule = PRE_TOKENIZERS.get(name)
    if rule is None:
        raise UnsupportedError(
            f"tokenizer.ggml.pre is {name!r}: this pre-tokenizer is not supported",
            remedy=f"supported: {', '.join(sorted(PRE_TOKENIZERS))}; or convert from the model's safetensors",
        )
    return rule
