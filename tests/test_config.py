"""Configuration files: every mistake is named with file, line and remedy (case-36)."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from strata.config import KINDS, Config, Override, format_as, format_size, load_config, parse_size
from strata.errors import ConfigError

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
Load = Callable[..., Config]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def load_text(text: str | bytes, *overrides: str) -> Config:
        file = tmp_path / "c.yaml"
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return load_config(file, [Override.parse(item) for item in overrides])

    return load_text


def test_default_yaml_lists_every_option_with_its_default() -> None:
    document = yaml.safe_load((CONFIGS / "default.yaml").read_text())
    assert {name: list(keys) for name, keys in document.items()} == {
        name: list(kinds) for name, kinds in KINDS.items()
    }
    assert load_config(CONFIGS / "default.yaml") == Config()


def test_every_field_has_a_kind_and_every_kind_a_field() -> None:
    for section, kinds in KINDS.items():
        fields = [field.name for field in dataclasses.fields(getattr(Config(), section))]
        assert fields == list(kinds), section


# litellm_proxy.yaml is a configuration of LiteLLM's, with a test of its own.
OURS = sorted(path for path in CONFIGS.glob("*.yaml") if path.name != "litellm_proxy.yaml")


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.name)
def test_shipped_configurations_load(path: Path) -> None:
    assert load_config(path).file == path


BAD = {
    "unknown key": (
        "kv:\n  page_token: 8\n",
        ":2:3: unknown key 'page_token' in section 'kv'",
        "'page_tokens'",
    ),
    "hyphens": ("kv:\n  page-tokens: 32\n", "unknown key 'page-tokens'", "did you mean 'page_tokens'?"),
    "wrong section": ("model:\n  dtype: int8\n", "unknown key 'dtype' in section 'model'", "section 'kv'"),
    "key at the top": ("temperature: 0\n", ":1:1: unknown section 'temperature'", "section 'sampling'"),
    "unknown section": ("ports: 8080\n", ":1:1: unknown section 'ports'", "known here: model"),
    "nearest section": ("sampler:\n  top_k: 1\n", "unknown section 'sampler'", "did you mean 'sampling'?"),
    "later option": ("adapters:\n  path: x\n", "unknown section 'adapters'", ""),
    "duplicate key": ("kv:\n  dtype: int8\n  dtype: bf16\n", ":3:3: 'dtype' stands twice", "line 2"),
    "huge key": ('? "' + "a" * 200_000 + '"\n: 1\n', ":1:3: a key of 200000 characters in the top level", ""),
    "duplicate section": ("kv:\nchat:\nkv:\n", ":3:1: 'kv' stands twice in the top level", ""),
    "tab": ("kv:\n\tdtype: int8\n", ":2:1: a tab in the indentation", "spaces"),
    "tab after spaces": ("kv:\n  dtype: int8\n \t page_tokens: 3\n", ":3:", "spaces"),
    "list at the top": ("- kv\n", ":1:1: the file holds a list", "sections"),
    "scalar at the top": ("hello\n", ":1:1: the file holds a single value", "sections"),
    "two documents": ("kv:\n---\nchat:\n", "c.yaml:3:1: a second document", "one document"),
    "list as section": ("kv: [1]\n", "section 'kv' holds a list", "known keys"),
    "mapping as value": ("kv:\n  dtype:\n    a: 1\n", ":3:5: kv.dtype holds a mapping", ""),
    "list as value": ("kv:\n  dtype: [int8]\n", "kv.dtype holds a list", ""),
    "list as key": ("kv:\n  ? [a]\n  : 1\n", "a list is used as a key", ""),
    "no value": ("kv:\n  dtype:\n", ":2:9: kv.dtype has no value", ""),
    "null value": ("kv:\n  dtype: ~\n", "kv.dtype has no value", ""),
    "bare size": ("kv:\n  size: 20\n", "has no unit; write 20GiB (2^30 bytes) or 20GB (10^9 bytes)", ""),
    "ambiguous size": ("kv:\n  size: 20G\n", "is ambiguous; write 20GB (powers of 1000) or 20GiB", ""),
    "negative size": ("kv:\n  size: -1\n", ":2:9: kv.size: '-1' is not a size", ""),
    "exponent size": ("kv:\n  size: 1e3\n", "kv.size: '1e3'", ""),
    "unknown unit": ("kv:\n  size: 20 gallons\n", "unknown unit 'gallons'; known: B, kB", ""),
    "size too small": ("kv:\n  size: 20kB\n", "is 20000 bytes; at least 1 MiB (1048576 bytes)", ""),
    "size too large": ("kv:\n  size: 99999999TiB\n", "is more than 1 EiB", ""),
    "yes": ("sampling:\n  ignore_eos: yes\n", "'yes' is not true or false", ""),
    "Off": ("sampling:\n  ignore_eos: Off\n", "'Off' is not true or false", ""),
    "quoted boolean": ('sampling:\n  ignore_eos: "true"\n', '"true" is text', "quotes"),
    "quoted number": ('sampling:\n  top_k: "40"\n', '"40" is text', "quotes"),
    "no as text": ("chat:\n  system: no\n", "no without quotes means yes or no in YAML", '"no"'),
    "number as text": ("model:\n  path: 1.10\n", "1.10 without quotes means a number", '"1.10"'),
    "date as text": ("model:\n  path: 2024-01-01\n", "means a date", ""),
    "number wanted": ("sampling:\n  temperature: warm\n", "'warm' is not a number", ""),
    "nan": ("sampling:\n  temperature: .nan\n", "'.nan' is not a number", ""),
    "infinity": ("sampling:\n  temperature: 1e999\n", "out of range; allowed: 0 to 100", ""),
    "whole number wanted": ("sampling:\n  top_k: 4.5\n", "'4.5' is not a whole number", ""),
    "sexagesimal": ("sampling:\n  top_k: 1:30\n", "'1:30' is not a whole number", ""),
    "out of range": ("sampling:\n  top_p: 1.5\n", ":2:10: sampling.top_p: '1.5' is out of range", ""),
    "last word": ("sampling:\n  repeat_penalty: 0\n", "sampling.repeat_penalty", "above 0"),
    "multiple": ("kv:\n  page_tokens: 20\n", "'20' is not a multiple of 8", ""),
    "choice": (
        "kv:\n  dtype: int4\n",
        "'int4' is not one of: int8, int8g128, int8g64, int8g32, bf16, f32",
        "",
    ),
    "empty stop": ('sampling:\n  stop: ["a", ""]\n', ":2:15: sampling.stop: '' is empty", ""),
    "nested stop": ("sampling:\n  stop: [[a]]\n", "sampling.stop holds a list", ""),
    "huge number": ("sampling:\n  seed: " + "9" * 5000 + "\n", "is not a whole number", ""),
    "python object": ("kv: !!python/object:os.system {}\nx: 1", "unknown section 'x'", ""),
    "open quote": ('chat:\n  system: "a\n', "not valid YAML", ""),
    "bad indentation": ("kv:\n  dtype: int8\n size: 1GiB\n", ":3:2: not valid YAML", ""),
    "undefined alias": ("kv: *a\n", "not valid YAML", ""),
    "deep nesting": ("[" * 20000, "nested too deeply", ""),
    "not UTF-8": (b"kv:\n  dtype: \xff\n", ":2: byte 0xff is not UTF-8", ""),
    "NUL": ("kv:\n  dtype: \0\n", ":2: the character #x0000 is not allowed", ""),
    "a long list": ("chat:\n" + "- a\n" * 200_000, ":3999: more than 4000 keys and values", ""),
    "a long flow list": ("[" + "a," * 300_000 + "]", ":1: more than 4000 keys and values", ""),
    "too large": ("#" * (1 << 21), "larger than 1048576 bytes", ""),
}


@pytest.mark.parametrize(("text", "cause", "remedy"), BAD.values(), ids=BAD.keys())
def test_mistakes_are_named(load: Load, text: str | bytes, cause: str, remedy: str) -> None:
    """case-36: unknown keys, units and YAML traps."""
    with pytest.raises(ConfigError) as caught:
        load(text)
    assert "c.yaml" in caught.value.cause
    assert cause in caught.value.cause
    assert remedy in str(caught.value)
    assert caught.value.exit_code == 2
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "text", ["", "\n", "# nothing\n", "---\n", "kv:\n", "~\n", "\ufeff# bom\n", "kv: {}\n", "{}"]
)
def test_empty_means_all_defaults(load: Load, text: str) -> None:
    assert load(text) == Config()


def test_missing_file_and_directory_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: No such file"):
        load_config(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load_config(tmp_path)
    with pytest.raises(ConfigError, match="null byte"):
        load_config("a\0b")


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_pipes_and_devices_are_not_opened(tmp_path: Path, kind: str) -> None:
    """Opening a pipe waits for its writer."""
    path = Path("/dev/null")
    if kind == "pipe":
        path = tmp_path / "pipe.yaml"
        os.mkfifo(path)
    with pytest.raises(ConfigError, match=f"{path}: a pipe or device, not a file"):
        load_config(path)


def test_a_long_text_is_one_value(load: Load) -> None:
    text = "".join(f"  {'word ' * 18}\n" for _ in range(5_000))
    assert len(load("chat:\n system: |\n" + text).chat.system) > 400_000


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("20GB", 20 * 10**9),
        ("20 GiB", 20 * 2**30),
        ('"20 GB"', 20 * 10**9),
        ("1.5GiB", 3 * 2**29),
        ("512MiB", 2**29),
        ("2tib", 2**41),
        ("1048576B", 2**20),
        ("auto", None),
    ],
)
def test_sizes(load: Load, text: str, size: int | None) -> None:
    """case-36: GB and GiB are both understood and echoed in bytes."""
    config = load(f"kv:\n  size: {text}\n")
    assert config.kv.size == size
    assert ("auto" if size is None else f"({size} bytes)") in config.show()


def test_nothing_needs_no_unit(load: Load) -> None:
    """copies: 0 reads as "off"; any other bare number could be GB or GiB."""
    for text in ("0", "0.0", "0B", "0 GiB"):
        assert load(f"host:\n  copies: {text}\n").host.copies == 0
    with pytest.raises(ConfigError, match="no unit"):
        load("host:\n  copies: 1\n")


@given(st.integers(0, 2**60))
def test_every_byte_count_survives(size: int) -> None:
    assert parse_size(f"{size}B") == size
    number, unit = format_size(size).split()
    assert abs(parse_size(f"{number}{unit}") - size) <= max(1, size * 0.06)


@given(st.text(max_size=20))
def test_any_text_is_a_size_or_a_value_error(text: str) -> None:
    try:
        assert parse_size(text) >= 0
    except ValueError as error:
        assert str(error)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_config_or_a_config_error(tmp_path_factory: Any, data: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    file.write_bytes(data)
    try:
        assert isinstance(load_config(file), Config)
    except ConfigError as error:
        assert "fuzz.yaml" in str(error)


def test_words_stand_for_none(load: Load) -> None:
    config = load("sampling:\n  seed: random\n  max_tokens: -1\nmodel:\n  context: 0\n")
    assert (config.sampling.seed, config.sampling.max_tokens, config.model.context) == (None, None, None)


def test_stop_is_a_list_or_one_text(load: Load) -> None:
    assert load('sampling:\n  stop: ["a", "b c"]\n').sampling.stop == ("a", "b c")
    assert load("sampling:\n  stop: User\n").sampling.stop == ("User",)


def test_paths_start_at_the_file(load: Load, tmp_path: Path) -> None:
    assert load("model:\n  path: x/model\n").model.path == str(tmp_path / "x" / "model")
    assert load("model:\n  path: /x\n").model.path == "/x"
    assert load("model:\n  path: demo\n").model.path == "demo"
    assert load("model:\n  path: ~/x\n").model.path == str(Path.home() / "x")


def test_overrides_win_and_are_named(load: Load) -> None:
    config = load("kv:\n  dtype: bf16\n", "kv.dtype=f32", "chat.system=no: really", "sampling.seed=7")
    assert (config.kv.dtype, config.chat.system, config.sampling.seed) == ("f32", "no: really", 7)
    assert config.where("kv.dtype") == "--set kv.dtype"
    assert config.where("kv.page_tokens") == "default"
    assert load("", "model.path=x").model.path == str(Path.cwd() / "x")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("kv.dtype", "is not section.key=value"),
        ("dtype=int8", "is not section.key=value"),
        ("kv.dtype.x=int8", "is not section.key=value"),
        ("kv.dtyp=int8", "did you mean 'dtype'"),
        ("kw.dtype=int8", "did you mean 'kv'"),
        ("kv.size=3", "--set kv.size: kv.size: '3' has no unit"),
        ("sampling.top_p=", "'' is not a number"),
        ("server.host=", "server.host: '' is empty"),
        ("server.host= ", "server.host: ' ' is empty"),
    ],
)
def test_bad_overrides_are_named(load: Load, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load("", override)
    assert message in str(caught.value)


def test_values_of_the_command_line_replace_a_list_and_add_up() -> None:
    stops = [Override("sampling.stop", text, "--stop") for text in ("a", "b")]
    assert load_config(None, stops).sampling.stop == ("a", "b")


def test_a_configuration_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().kv.dtype = "f32"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("size", "given", "shown"),
    [
        (84_900_000, "85MB", "84.9 MB"),
        (60 << 30, " 61.5 GiB ", "60 GiB"),
        (1234, "1300B", "1,234 B"),
    ],
)
def test_a_size_in_the_unit_of_another(size: int, given: str, shown: str) -> None:
    assert format_as(size, given) == shown
