"""Strata: mixture-of-experts language models larger than the graphics card, on hardware people own."""

__version__ = "0.1.0"
