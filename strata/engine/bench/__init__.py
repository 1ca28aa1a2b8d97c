"""How fast a model runs here, every figure beside its limit. The command is `strata bench`."""
