"""What a configuration asks of speculative decoding."""

from __future__ import annotations

from strata.config import Config
from strata.engine.speculative.draft_length import LengthOptions
from strata.engine.speculative.make import SpeculationOptions
from strata.errors import ConfigError
from strata.hardware.profile import HardwareProfile


def speculation_options(config: Config, machine: HardwareProfile) -> SpeculationOptions | None:
    """None: every step is a token. ConfigError where the lengths contradict each other."""
    asked = config.speculative
    if asked.use == "off" or asked.most == 0:
        return None
    if asked.least > asked.most:
        raise ConfigError(
            f"speculative.least is {asked.least}, speculative.most is {asked.most} "
            f"({config.where('speculative.most')})",
            remedy="least must not be more than most",
        )
    start = min(asked.most, max(asked.least, asked.start))
    lengths = LengthOptions(start, asked.least, asked.most)
    return SpeculationOptions(machine, lengths, asked.costs)
