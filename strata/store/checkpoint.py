"""Open a checkpoint, whatever file format it came in."""

from __future__ import annotations

from pathlib import Path

from strata.errors import FileFormatError, UnsupportedError, UsageError
from strata.store.checkpoint_file import CheckpointFile, inside, listed
from strata.store.gguf_parse import MAGIC
from strata.store.gguf_source import PART_NAME, GgufHeaders, GgufSource
from strata.store.safetensors_index import INDEX_SUFFIX
from strata.store.safetensors_source import SafetensorsSource
from strata.store.source import CheckpointSource

_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


def open_checkpoint(path: Path | str) -> CheckpointSource:
    """Open a directory with safetensors or one GGUF model, a .safetensors file or index, or a .gguf file
    (any part of a split one). Headers are read and checked, weights are not touched.

    Raises UsageError (nothing to open), FileFormatError, IncompleteError, UnsupportedError.
    """
    path = Path(path)
    try:
        if path.is_dir():
            return _open_directory(path)
        if path.name.endswith((".safetensors", INDEX_SUFFIX)):
            return SafetensorsSource(path)
        if path.name.endswith(".gguf") or _is_gguf(path):
            return GgufSource(path)
    except OSError as error:  # no permission, an unreadable disk, a name that is too long
        raise FileFormatError(f"{path}: cannot be read: {error}") from error
    raise _refused(path, [path.name])


def open_headers(path: Path | str) -> CheckpointSource:
    """The same for a look at names, types and shapes only: of a GGUF file, the beginning suffices."""
    path = Path(path)
    if path.is_file() and path.name.endswith(".gguf"):
        return GgufHeaders(path)
    return open_checkpoint(path)


def _is_gguf(path: Path) -> bool:
    """By magic: downloads that are named by their hash have no suffix."""
    file = CheckpointFile(path)
    return file.size >= len(MAGIC) and file.read_bytes(0, len(MAGIC)) == MAGIC


def _open_directory(directory: Path) -> CheckpointSource:
    names = sorted(entry.name for entry in directory.iterdir())
    if any(name.endswith((".safetensors", INDEX_SUFFIX)) for name in names):
        return SafetensorsSource(directory)
    models: dict[str, str] = {}  # one name for each model: a split one counts once
    for name in names:
        if name.endswith(".gguf") and not name.startswith("mmproj"):  # vision projectors lie beside models
            part = PART_NAME.fullmatch(name)
            models.setdefault(part["stem"] if part else name, name)
    if len(models) > 1:
        raise UsageError(
            f"{directory}: several GGUF models: {listed(list(models.values()))}",
            remedy="name one of the files",
        )
    if not models:
        raise _refused(directory, names)
    return GgufSource(inside(directory, next(iter(models.values())), "file"))


def _refused(path: Path, names: list[str]) -> UsageError | UnsupportedError:
    if any(name.endswith(_PICKLES) for name in names):
        return UnsupportedError(
            f"{path}: PyTorch pickle files can run code and are not read",
            remedy="use the safetensors or GGUF version of this model",
        )
    return UsageError(
        f"{path}: no safetensors or GGUF checkpoint",
        remedy="name a directory with *.safetensors and config.json, or a .gguf file",
    )
