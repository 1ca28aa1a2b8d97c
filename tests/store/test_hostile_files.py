"""Every broken or malicious file of the shared collection gets what its manifest asks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hangs import soon

from strata.errors import StrataError
from strata.store.checkpoint import open_checkpoint

HOSTILE = Path(__file__).resolve().parents[3] / "shared/cases/hostile"
MANIFEST: list[dict[str, Any]] = (
    json.loads((HOSTILE / "manifest.json").read_text()) if HOSTILE.is_dir() else []
)
# Their headers are sound: the model resolver (missing tensors) and the converter (NaN) refuse them.
SOUND = {"gguf/ok_minimal.gguf", "st/nan_weights.safetensors"}
# What the message must say beyond the file's name, where the manifest asks for more than a clean error.
SAYS = {
    "gguf/version_4.gguf": ["version 4", "2 to 3"],
    "gguf/bad_type.gguf": ["'a.weight'", "250"],
    "gguf/block_count_1e9.gguf": ["block_count", "1000000000"],
    "gguf/split-00001-of-00003.gguf": ["split-00002-of-00003.gguf", "split-00003-of-00003.gguf"],
    "gguf/dims_overflow.gguf": ["token_embd.weight", "4398046511105"],
    "gguf/off_misaligned.gguf": ["'a.weight'", "offset 3", "32"],
    "gguf/overlap.gguf": ["'a.weight'", "'b.weight'"],
    "gguf/dup_key.gguf": ["'general.architecture'"],
    "st/hdr_len_past_eof.safetensors": ["1000", "2 bytes"],
    "st/truncated_data.safetensors": ["1098", "774"],
    "st/dtype_unknown.safetensors": ["'a'", "F128"],
    "st/overlap.safetensors": ["'a'", "'b'"],
    "st/missing_shard/model-00001-of-00002.safetensors": [
        "model-00002-of-00002.safetensors",
        "incomplete download?",
    ],
    "st/traversal_rel/model.safetensors.index.json": ["../ok.safetensors", "outside the model directory"],
    "st/tensor_not_in_shard/model.safetensors.index.json": ["'b'", "m.safetensors"],
}


@pytest.mark.skipif(
    not MANIFEST, reason="../shared/cases/hostile is absent: it is not part of the repository"
)
def test_the_expectations_are_about_files_of_the_manifest() -> None:
    assert SOUND | SAYS.keys() <= {item["file"] for item in MANIFEST}


@pytest.mark.parametrize("item", MANIFEST, ids=[item["file"] for item in MANIFEST])
def test_hostile_files(item: dict[str, Any]) -> None:
    """case-01, case-02, case-04, case-05, case-06."""
    path = HOSTILE / item["file"]
    if item["file"] in SOUND:
        assert open_checkpoint(path).tensors
    else:
        with soon(), pytest.raises(StrataError) as caught:
            open_checkpoint(path)
        message = str(caught.value)
        assert path.name in message or str(path.parent) in message
        assert all(part in message for part in SAYS.get(item["file"], []))
        assert caught.value.exit_code != 0


@pytest.mark.skipif(
    not MANIFEST, reason="../shared/cases/hostile is absent: it is not part of the repository"
)
def test_directories_of_hostile_shards_are_refused() -> None:
    for name in ("missing_shard", "traversal_rel", "tensor_not_in_shard"):
        with pytest.raises(StrataError):
            open_checkpoint(HOSTILE / "st" / name)


PEAK = """
import sys
from strata.errors import StrataError
from strata.store.checkpoint import open_checkpoint
for path in sys.argv[1:]:
    try:
        open_checkpoint(path)
    except StrataError:
        pass
status = open("/proc/self/status").read()
print(status.split("VmHWM:")[1].split()[0])
"""


def peak_kib(paths: list[Path]) -> int:
    """Peak resident KiB of a fresh process that opens the files.

    VmHWM, because ru_maxrss would count the parent's memory too.
    """
    result = subprocess.run(
        [sys.executable, "-c", PEAK, *map(str, paths)],
        capture_output=True, text=True, timeout=60, check=True, cwd=Path(__file__).resolve().parents[2],
    )  # fmt: skip
    return int(result.stdout)


@pytest.mark.skipif(
    not MANIFEST, reason="../shared/cases/hostile is absent: it is not part of the repository"
)
def test_all_hostile_files_in_one_process_stay_below_200_mb() -> None:
    assert peak_kib([HOSTILE / item["file"] for item in MANIFEST]) < 200 * 1000


def test_sparse_giants_cost_no_memory(tmp_path: Path) -> None:
    """case-01: lengths that do fit the file (a sparse one of 4 TB) are limited too."""
    giant_string = b"GGUF" + b"".join(n.to_bytes(w, "little") for n, w in ((3, 4), (0, 8), (1, 8), (1, 8)))
    giant_string += b"k" + (8).to_bytes(4, "little") + (1 << 40).to_bytes(8, "little")
    giant_array = giant_string[:33] + b"".join(
        n.to_bytes(w, "little") for n, w in ((9, 4), (8, 4), (1 << 38, 8))
    )
    giant_header = (99_999_999).to_bytes(8, "little") + b'{"a":['
    files = {"a.gguf": giant_string, "b.gguf": giant_array, "c.safetensors": giant_header}
    for name, content in files.items():
        with (tmp_path / name).open("wb") as file:
            file.write(content)
            file.truncate(1 << 42)
        with soon(), pytest.raises(StrataError, match=name):
            open_checkpoint(tmp_path / name)
    assert peak_kib([tmp_path / name for name in files]) < 200 * 1000
