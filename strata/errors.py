"""Every error a user can meet: cause, the numbers that disagree, the remedy.

A command prints `str(error)` on stderr and exits with `exit_code`; a traceback is shown only with
`--debug`. Raise the most specific class; put file, field and value into the cause.
"""

from __future__ import annotations


class StrataError(Exception):
    """Base of all expected failures. `cause` says what is wrong, `remedy` what to do about it;
    `usual_remedy` is that of a whole class where none is given."""

    exit_code = 1
    usual_remedy = ""

    def __init__(self, cause: str, *, remedy: str = "") -> None:
        super().__init__(cause)
        self.cause = cause
        self.remedy = remedy or self.usual_remedy

    def __str__(self) -> str:
        return f"{self.cause}\n  remedy: {self.remedy}" if self.remedy else self.cause


class UsageError(StrataError):
    """The command line asks for something that cannot be (exit code 2)."""

    exit_code = 2


class ConfigError(UsageError):
    """A configuration file has an unknown key, a wrong unit or a value out of range."""


class FileFormatError(StrataError):
    """A file is broken, truncated or hostile; the cause names file, field and value."""

    usual_remedy = "the file is damaged, incomplete or made for something else: fetch or make it again"


class IncompleteError(FileFormatError):
    """Files or tensors that an index promises are missing ("incomplete download?")."""


class UnsupportedError(StrataError):
    """A well-formed input that Strata does not support: architecture, quantization method, dtype."""


class WeightValueError(StrataError):
    """NaN or Inf among the source weights."""


class StoreError(StrataError):
    """A shard store is missing, half-written, of another version, or fails its checksums."""


class LockedError(StoreError):
    """Another process is writing the same store or file of statistics."""


class CapacityError(StrataError):
    """Not enough disk, host memory or device memory: the cause gives needed and available bytes."""


class HardwareError(StrataError):
    """The machine lacks something that is required, e.g. AVX2."""


class RequestError(StrataError):
    """A request that cannot be answered: empty prompt, bad sampling value, malformed messages."""


class ContextOverflowError(RequestError):
    """The prompt does not fit the context window; carries both numbers.

    at_least: the prompt was too long to be counted to its end.
    """

    def __init__(self, prompt_tokens: int, context_tokens: int, *, at_least: bool = False) -> None:
        count = f"at least {prompt_tokens}" if at_least else f"{prompt_tokens}"
        super().__init__(
            f"the prompt has {count} tokens but the context holds {context_tokens}",
            remedy="shorten the prompt, /reset the chat, or raise model.context in the config",
        )
        self.prompt_tokens = prompt_tokens
        self.context_tokens = context_tokens


class TemplateError(RequestError):
    """A chat template refused the conversation or ran past its limits."""


class NumericalError(StrataError):
    """NaN logits: this request ends, others go on."""
