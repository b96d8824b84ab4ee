"""Work on the library's own tensors, whatever modes of torch the user's code has around it.

A tensor that is made under ``torch.inference_mode()`` cannot be written later, one that is made
under ``torch.device("meta")`` has no values, and a mode that records would record our copies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from . import private


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """Within the block tensors are ordinary ones of the host, and nobody records what is done."""
    outside = private.optional("disable_current_modes") or contextlib.nullcontext
    with outside(), torch.inference_mode(False), torch.no_grad(), on_host():
        yield


def on_host() -> contextlib.AbstractContextManager[object]:
    """Return a mode that makes tensors on the host, if torch would make them elsewhere.

    Torch asks a mode in Python at each of its functions.
    """
    host = torch.device("cpu")
    return contextlib.nullcontext() if torch.get_default_device() == host else host


def written_to(tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Return the mode in which a tensor of the user's can be written, whichever it was made in."""
    return torch.inference_mode() if tensor.is_inference() else contextlib.nullcontext()
