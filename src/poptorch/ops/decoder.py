"""``ctc_beam_search_decoder``. Source: PopTorch user guide, "PopTorch ops"."""

from __future__ import annotations

import torch

from .._base.errors import Error
from .._ops.ctc import ctc_beam_search
from . import check


def ctc_beam_search_decoder(
    probs: torch.Tensor,
    lengths: torch.Tensor,
    blank: int = 0,
    beam_width: int = 100,
    top_paths: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find the most likely label sequences of a CTC network's output.

    No gradient flows through it. Source: PopTorch user guide, "PopTorch ops".

    Args:
        probs: log-probabilities, of shape ``[steps, samples, classes]``.
        lengths: integer number of steps of each sample, of shape ``[samples]``.
        blank: the class that stands for no label.
        beam_width: label prefixes that are kept from step to step.
        top_paths: sequences to return for each sample, at most ``beam_width``.

    Returns:
        The log-probability of each path ``[samples, top_paths]``, best first; its length, int32 of
        the same shape; and its labels, int32 ``[samples, top_paths, steps]``, filled up with the
        blank. Where there are fewer paths, the rest has probability 0.

    Raises:
        poptorch.Error: an argument of another kind or shape.
    """
    check.tensor(probs, "ctc_beam_search_decoder: probs must be a torch.tensor")
    check.tensor(lengths, "ctc_beam_search_decoder: lengths must be a torch.tensor")
    if probs.dim() != 3:
        raise Error(
            "ctc_beam_search_decoder: probs must be rank-3",
            got=f"shape {tuple(probs.shape)}",
            fix="pass [steps, samples, classes]",
        )
    if lengths.shape != probs.shape[1:2]:
        raise Error(
            "ctc_beam_search_decoder: lengths must have one entry per sample",
            got=f"shape {tuple(lengths.shape)} for {probs.shape[1]} samples",
            fix="pass an integer tensor of shape [samples]",
        )
    if not 0 <= blank < probs.shape[2] or not 1 <= top_paths <= beam_width:
        raise Error(
            "ctc_beam_search_decoder: a number is out of range",
            got=f"blank={blank}, beam_width={beam_width}, top_paths={top_paths}",
            fix="a class as blank, and no more paths than the beam is wide",
        )
    paths: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = ctc_beam_search(
        probs.detach(), lengths, blank, beam_width, top_paths
    )
    return paths
