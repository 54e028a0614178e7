"""Stands in for torchaudio so that ComfyUI can be imported; any use of it raises."""

from . import functional, transforms

__all__ = ["functional", "transforms"]
__version__ = "0.0.0+stub"
