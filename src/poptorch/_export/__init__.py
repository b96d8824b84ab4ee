"""A compiled program as a file that needs torch alone."""

from .program import tensors_of, text_of

__all__ = ["tensors_of", "text_of"]
