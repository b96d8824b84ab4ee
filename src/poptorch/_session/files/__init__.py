"""Save a wrapped model, load it, and export its program."""

from .exporting import check_export, export, export_for
from .loading import fill, restore, resume
from .saved_model import SavedModel, UserObjects, decode, encode, packed, random_state, read, save

__all__ = [
    "SavedModel",
    "UserObjects",
    "check_export",
    "decode",
    "encode",
    "export",
    "export_for",
    "fill",
    "packed",
    "random_state",
    "read",
    "restore",
    "resume",
    "save",
]
