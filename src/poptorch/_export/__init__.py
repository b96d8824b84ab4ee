"""Write a compiled program as a Python file that needs only torch, or as a page."""

from .page import html
from .program import tensors_of, text_of

__all__ = ["html", "tensors_of", "text_of"]
