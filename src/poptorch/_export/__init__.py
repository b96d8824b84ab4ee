"""Write a compiled program as a Python file that needs only torch, or as a page."""

from .exported_program import tensors_of, text_of
from .step_page import html

__all__ = ["html", "tensors_of", "text_of"]
