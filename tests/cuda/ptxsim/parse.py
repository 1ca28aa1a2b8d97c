"""PTX text to instructions. Every statement of the emitted code ends in `;`; `.loc` names the source line."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

_ENTRY = re.compile(r"\.entry\s+(\w+)\s*\((.*?)\)([^{]*)\{", re.DOTALL)
_GUARD = re.compile(r"@(!?)(%\w+)\s+")
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")
_LABEL = re.compile(r"^([$\w]+):")
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]+)"', re.MULTILINE)
_NAMES = re.compile(r"[%$\w.]+")


class PtxError(RuntimeError):
    """The code did what it must not do, or uses what the simulation does not know."""


@dataclass(frozen=True)
class Instruction:
    """opcode: split at dots. guard: predicate register and whether it is negated. place: file and line."""

    opcode: tuple[str, ...]
    operands: tuple[str, ...]
    guard: tuple[str, bool] | None
    text: str
    place: str

    @property
    def type(self) -> str:
        return self.opcode[-1]

    def __str__(self) -> str:
        return f"`{self.text}` at {self.place}"


@dataclass
class Entry:
    """One kernel. parameters: (name, type)."""

    parameters: list[tuple[str, str]]
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)


def names_in(operand: str) -> list[str]:
    """Registers of a vector operand `{a, b}`, or the operand itself."""
    return _NAMES.findall(operand)


def parse(ptx: str) -> dict[str, Entry]:
    """Every `.entry` of the text."""
    ptx = re.sub(r"//[^\n]*", "", ptx)
    return {match[1]: _entry(match, ptx) for match in _ENTRY.finditer(ptx)}


def _entry(match: re.Match[str], ptx: str) -> Entry:
    declared = [part.split() for part in match[2].split(",") if part.strip()]
    entry = Entry([(words[-1].partition("[")[0], words[1].lstrip(".")) for words in declared])
    files = dict(_FILE.findall(ptx))
    place = "an unknown line"
    for raw in _statements(_body(ptx, match.end())):
        label = _LABEL.match(raw)
        if label:
            entry.labels[label[1]] = len(entry.code)
        elif raw.startswith((".loc\t", ".loc ")):
            number, line = raw.split()[1:3]
            place = f"{Path(files[number]).name}:{line}"
        elif not raw.startswith("."):
            entry.code.append(_instruction(raw, place))
    return entry


def _body(ptx: str, start: int) -> str:
    depth, end = 1, start
    while depth:
        depth += {"{": 1, "}": -1}.get(ptx[end], 0)
        end += 1
    return ptx[start : end - 1]


class _Scopes:
    """Registers that are declared inside braces hide those outside: they get names of their own."""

    def __init__(self) -> None:
        self._open: list[dict[str, str]] = []
        self._made = 0

    def renamed(self, line: str) -> str:
        if line == "{":
            self._open.append({})
        elif line == "}":
            self._open.pop()
        elif self._open:
            if line.startswith(".reg"):
                for name in re.findall(r"%\w+", line):
                    self._made += 1
                    self._open[-1][name] = f"{name}_{self._made}_inside"
            for name, own in self._open[-1].items():
                line = re.sub(rf"{name}\b", own, line)
        return line


def _statements(body: str) -> list[str]:
    """Instructions without `;`, labels with `:`, directives; scopes in braces are dissolved."""
    found, pending, scopes = [], "", _Scopes()
    for raw in body.splitlines():
        line = scopes.renamed(raw.strip())
        if not pending and (line.startswith((".loc\t", ".loc ")) or _LABEL.match(line)):
            found.append(line)
            continue
        pending = f"{pending} {line}".strip()
        while ";" in pending:
            statement, _, pending = pending.partition(";")
            found.append(statement.strip())
            pending = pending.strip()
        if pending in ("{", "}"):
            pending = ""
    return [statement for statement in found if statement]


def _instruction(statement: str, place: str) -> Instruction:
    text = " ".join(statement.split())
    guard = _GUARD.match(text)
    rest = text[guard.end() :] if guard else text
    opcode, _, operands = rest.partition(" ")
    parts = tuple(operand.strip() for operand in _OPERAND.findall(operands))
    named = (guard[2], guard[1] == "!") if guard else None
    return Instruction(tuple(opcode.split(".")), parts, named, text, place)
