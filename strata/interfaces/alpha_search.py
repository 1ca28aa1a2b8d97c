"""`strata convert --alpha perplexity`: one alpha for the whole model, by a grid on perplexity.

Every candidate is a conversion of its own, in a folder beside the output, which is measured on calibration
text as a run would compute it, and removed. What was measured stays there until the store is complete, so
that an interrupted search goes on; room for one store is enough. Among the candidates is the search of each
place by its output's mean square error, which is what a conversion does by itself.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import xxhash

from strata.errors import StoreError, UsageError
from strata.interfaces.calibration import TextFile, cut, open_weights
from strata.interfaces.evaluation.measuring import measure_perplexity
from strata.interfaces.evaluation.subject import Asked, Subject
from strata.interfaces.evaluation.texts import Cut, Text
from strata.interfaces.importing import import_checkpoint
from strata.interfaces.progress import progress_bar
from strata.interfaces.terminal import note
from strata.store.calibration import CalibrationStats, model_fingerprint
from strata.store.checkpoint import open_checkpoint
from strata.store.fingerprint import source_record, tool_name
from strata.store.lock import exclusive
from strata.store.methods import METHODS
from strata.store.options import ConvertOptions
from strata.store.store_file import replace_file
from strata.store.writer import beside, check_output, disk_errors, remove_tree

PER_PLACE = "per place"
GRID: tuple[float | None, ...] = (None, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
"""None: what a conversion without the grid does."""
TOKENS, WINDOW = 8192, 512
_FOUND = "found.json"


@dataclass(frozen=True)
class Search:
    """One model's search. texts: what perplexities are measured on."""

    source: Path
    out: Path
    options: ConvertOptions
    stats: CalibrationStats
    texts: Sequence[TextFile]

    @property
    def folder(self) -> Path:
        """Where candidates are made and what they gave is kept."""
        return beside(self.out, ".alpha")

    def best(self) -> ConvertOptions:
        """The options with the best alpha, and in their record what all gave.

        Raises what a conversion raises; LockedError where another process searches for the same store.
        """
        self._check()
        self.stats.check(moments=self.options.factored)
        _ = self._text  # what is wrong with it is said before anything is written
        self.out.absolute().parent.mkdir(parents=True, exist_ok=True)
        with disk_errors(self.out), exclusive(beside(self.out, ".alpha.lock")):
            found = self._earlier()
            for alpha in GRID:
                if _name(alpha) not in found:
                    found[_name(alpha)] = self._measured(alpha)
                    self._keep(found)
                note(f"alpha {_name(alpha)}: perplexity {found[_name(alpha)]:.4f}")
        chosen = min(GRID, key=lambda alpha: found[_name(alpha)])
        note(f"the least has alpha {_name(chosen)}")
        record = {"by": "perplexity", "found": found, **self._protocol}
        return dataclasses.replace(self.options, alpha=chosen, searched=record)

    def forget(self) -> None:
        """When the store is there. What says whose folder it is goes last, so that a search which is killed
        here leaves it in the folder, or an empty one."""
        remove_tree(self._store)
        remove_tree(self.folder)

    @property
    def _store(self) -> Path:
        return self.folder / "store"

    def _is_free(self) -> bool:
        """Whether there is nothing that another one may have put there."""
        return not self.folder.exists() or (self.folder.is_dir() and not any(self.folder.iterdir()))

    @property
    def _protocol(self) -> dict[str, Any]:
        """How candidates are measured. A scale per token is what smoothing is for."""
        texts = xxhash.xxh3_64(b"".join(text.data for text in self.texts)).hexdigest()
        smooth = any(METHODS[name].scaling == "smooth" for name in self.options.methods.values())
        inputs = "int8_per_token" if smooth else "int8"
        return {"texts": texts, "tokens": TOKENS, "window": self._window, "activations": inputs}

    @property
    def _window(self) -> int:
        return min(WINDOW, self.stats.info.spec.context)

    @cached_property
    def _text(self) -> Text:
        """What candidates are measured on. Raises UsageError where it holds no prediction, or for statistics
        of another model."""
        spec, store, tokenizer = open_weights(self.source)
        self.stats.check_model(spec, model_fingerprint(spec, store.plain))
        windows, _ = cut(tokenizer, self.texts, self._window, TOKENS)
        kept = tuple(tuple(ids) for ids in windows if len(ids) > 1)
        if not kept:
            raise UsageError(
                "the text for --alpha perplexity has 1 token, needed are 2", remedy="give a longer --data"
            )
        return Text("calibration", self._protocol["texts"], kept, Cut(self._window, TOKENS))

    def _check(self) -> None:
        if not self.options.scaled:
            raise UsageError("--alpha is of awq and smooth", remedy="add --method smooth, or awq")
        check_output(self.out, self.options.force)
        if not (self.folder / _FOUND).is_file() and not self._is_free():
            raise StoreError(
                f"{self.folder} exists, but no search made it; it is left alone",
                remedy="move it away, or choose another output",
            )

    def _identity(self) -> dict[str, Any]:
        """What figures are of: those of anything else are not taken up."""
        options = dataclasses.replace(self.options, stats=self.stats.digest).identity()
        record = dataclasses.asdict(source_record(open_checkpoint(self.source)))
        found = {"tool": tool_name(), "source": record, "options": options, **self._protocol}
        return json.loads(json.dumps(found))  # type: ignore[no-any-return]  # as the file gives it back

    def _earlier(self) -> dict[str, float]:
        """What an interrupted search measured; begins a new one where there is none of the same."""
        path = self.folder / _FOUND
        try:
            kept = json.loads(path.read_bytes())
            if kept["search"] == self._identity():
                return {str(name): float(value) for name, value in kept["found"].items()}
        except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError):
            pass
        self.forget()
        self.folder.mkdir()
        self._keep({})
        return {}

    def _keep(self, found: dict[str, float]) -> None:
        content = json.dumps({"search": self._identity(), "found": found}, indent=1)
        replace_file(self.folder / _FOUND, content.encode())

    def _measured(self, alpha: float | None) -> float:
        """Perplexity of the candidate with this alpha."""
        options = dataclasses.replace(self.options, alpha=alpha, force=True)
        with progress_bar(f"alpha {_name(alpha)}") as progress:
            import_checkpoint(self.source, self._store, options, progress, stats=self.stats)
        settings = ("kv.dtype=f32", "backend.name=cpu", "device.use=none")
        inputs = f"backend.activations={self._protocol['activations']}"
        subject = Subject.open(Asked(str(self._store), (*settings, inputs)), self._window)
        perplexity = measure_perplexity(subject, self._text).perplexity
        del subject  # its mapping of the candidate, before that is removed
        remove_tree(self._store)
        return perplexity


def _name(alpha: float | None) -> str:
    return PER_PLACE if alpha is None else f"{alpha:g}"
