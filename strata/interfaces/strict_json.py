"""JSON as RFC 8259 has it: what is none is refused with the cause, also where Python's reader takes it."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

_BOM = "\ufeff"
_SHOWN = 40


class JsonError(ValueError):
    """The text is no JSON, or holds a number that nothing here can hold; its words say where and why."""


def read_json(data: bytes | str, *, strict: bool = True) -> Any:
    """The value. Raises JsonError. Of equal keys the last counts; a byte order mark is skipped.

    strict: false lets control characters stand in texts, as models write them.
    """
    try:
        text = data if isinstance(data, str) else data.decode("utf-8")
        return json.loads(text.removeprefix(_BOM), strict=strict, parse_constant=_refuse, parse_float=_finite)
    except UnicodeDecodeError as error:
        raise JsonError(f"byte {error.start} is no UTF-8") from None
    except json.JSONDecodeError as error:
        raise JsonError(f"{error.msg} at character {error.pos}") from None
    except JsonError:
        raise
    except ValueError as error:  # of int(): "Exceeds the limit (4300 digits) ...; use sys.set..."
        raise JsonError(f"a number is too long: {str(error).partition(';')[0]}") from None
    except RecursionError:
        raise JsonError("it is nested too deeply") from None


def _refuse(name: str) -> NoReturn:
    raise JsonError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise JsonError(f"the number {text[:_SHOWN]} is larger than any that can be held")
    return value
