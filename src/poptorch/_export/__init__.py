"""A compiled program as a file that needs torch alone, and as a page."""

from .page import html
from .program import tensors_of, text_of

__all__ = ["html", "tensors_of", "text_of"]
