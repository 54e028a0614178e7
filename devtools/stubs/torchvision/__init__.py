"""Stands in for torchvision so that ComfyUI can be imported; nothing in it computes.

Covered: the names that ComfyUI and spandrel import when they start. Not covered: any use of them,
which raises. It has no package metadata, so transformers still sees torchvision as not installed.
"""

from . import transforms

__all__ = ["transforms"]
__version__ = "0.0.0+stub"
