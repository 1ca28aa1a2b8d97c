"""Build the demo corpus: DIR/<domain>.txt with documents separated by NUL, and the fixed questions.

usage: python -m demo_model.build_corpus --sources DIR --out DIR [--questions FILE]
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable
from pathlib import Path

from demo_model import facts, sources
from demo_model.smalltalk import small_talk

FACT_CHATS, TALKS, RECORDS = 120_000, 20_000, 6_000  # generated documents


def chatterbot_chats(folder: Path, rng: random.Random) -> Iterable[str]:
    """One to three pairs per document."""
    for pairs in sources.chatterbot(folder):
        rng.shuffle(pairs)
        while pairs:
            size = rng.randint(1, 3)
            yield facts.chat(pairs[:size])
            del pairs[:size]


def domains(folder: Path, countries: list[facts.Country]) -> dict[str, Iterable[str]]:
    """Every domain's documents, in a fixed order."""
    book = folder / "factbook" / "package"
    rng = random.Random(0)
    return {
        "facts": facts.fact_chats(countries, FACT_CHATS, rng),
        "talk": [*small_talk(TALKS, rng), *chatterbot_chats(folder, rng)],
        "prose": sources.novels(folder),
        "code": sources.python_code(),
        "json": [*sources.factbook_json(book), *facts.fact_records(countries, RECORDS, rng)],
        "docs": [*sources.python_manual(folder), *sources.office_help(folder), *sources.factbook_prose(book)],
    }


def main() -> None:
    """Write one text file per domain."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sources", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--questions", type=Path, help="write the fixed list of questions here")
    args = parser.parse_args()
    countries = facts.load_countries(args.sources / "factbook" / "package")
    args.out.mkdir(parents=True, exist_ok=True)
    for name, documents in domains(args.sources, countries).items():
        kept = [d for d in documents if len(d) >= 40]
        if name != "facts":  # fact chats repeat on purpose: repetition is how facts are learned
            kept = list(dict.fromkeys(kept)) if name != "talk" else kept
        random.Random(1).shuffle(kept)
        text = "\0".join(kept)
        (args.out / f"{name}.txt").write_text(text, encoding="utf8")
        print(f"{name}: {len(kept)} documents, {len(text.encode()) / 1e6:.2f} MB")
    if args.questions:
        args.questions.parent.mkdir(parents=True, exist_ok=True)
        questions = facts.fixed_questions(countries)
        args.questions.write_text(json.dumps(questions, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
