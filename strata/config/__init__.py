"""Config: what was asked, as frozen dataclasses read from YAML and the command line."""

from strata.config.loader import Override, load_config
from strata.config.schema import (
    BUNDLED_MODELS,
    KINDS,
    BackendConfig,
    ChatConfig,
    Config,
    ConvertConfig,
    DeviceConfig,
    EngineConfig,
    ExpertsConfig,
    HostConfig,
    KvConfig,
    ModelConfig,
    SpeculativeConfig,
)
from strata.config.units import format_as, format_bytes, format_size, parse_size

__all__ = [
    "BUNDLED_MODELS",
    "KINDS",
    "BackendConfig",
    "ChatConfig",
    "Config",
    "ConvertConfig",
    "DeviceConfig",
    "EngineConfig",
    "ExpertsConfig",
    "HostConfig",
    "KvConfig",
    "ModelConfig",
    "Override",
    "SpeculativeConfig",
    "format_as",
    "format_bytes",
    "format_size",
    "load_config",
    "parse_size",
]
