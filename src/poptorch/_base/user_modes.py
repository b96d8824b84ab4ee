"""Work on the library's own tensors without the torch modes that the user's code has set.

A tensor made under ``torch.inference_mode()`` cannot be written later, one made under
``torch.device("meta")`` has no values, and a recording mode would record our copies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from . import private


@contextlib.contextmanager
def without_user_modes() -> Iterator[None]:
    """Within the block, tensors are ordinary host tensors, and no mode records operators."""
    outside = private.optional("disable_current_modes") or contextlib.nullcontext
    with outside(), torch.inference_mode(False), torch.no_grad(), on_host():
        yield


def on_host() -> contextlib.AbstractContextManager[object]:
    """Return a mode that makes tensors on the host, if torch would make them elsewhere.

    This is not always used, because torch then calls Python for each of its functions.
    """
    host = torch.device("cpu")
    return contextlib.nullcontext() if torch.get_default_device() == host else host


def written_to(tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Return the mode in which one of the user's tensors can be written, depending on the mode it
    was made in.
    """
    return torch.inference_mode() if tensor.is_inference() else contextlib.nullcontext()
