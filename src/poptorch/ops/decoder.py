"""Provide ``ctc_beam_search_decoder``: beam search over CTC label prefixes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from .._ops.library import define
from . import operand_checks


def ctc_beam_search_decoder(
    probs: torch.Tensor,
    lengths: torch.Tensor,
    blank: int = 0,
    beam_width: int = 100,
    top_paths: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find the most likely label sequences of a CTC network's output.

    No gradient flows through it.

    Args:
        probs: log-probabilities, of shape ``[steps, samples, classes]``.
        lengths: integer number of steps of each sample, of shape ``[samples]``.
        blank: the class that means no label.
        beam_width: how many label prefixes to keep from step to step.
        top_paths: how many sequences to return for each sample, at most ``beam_width``.

    Returns:
        Three tensors: the log-probability of each path, ``[samples, top_paths]``, best first; its
        length, int32 of the same shape; its labels, int32 ``[samples, top_paths, steps]``, padded
        with the blank. Missing paths have probability 0.

    Raises:
        poptorch.Error: an argument has another type or shape.
    """
    operand_checks.tensor(probs, "ctc_beam_search_decoder: probs must be a torch.tensor")
    operand_checks.tensor(lengths, "ctc_beam_search_decoder: lengths must be a torch.tensor")
    title, got = "ctc_beam_search_decoder: probs must be rank-3", f"shape {tuple(probs.shape)}"
    operand_checks.that(
        probs.dim() == 3, title, got, "pass a tensor of shape [steps, samples, classes]"
    )
    title = "ctc_beam_search_decoder: lengths must have one entry per sample"
    got = f"shape {tuple(lengths.shape)} for {probs.shape[1]} samples"
    fits = lengths.shape == probs.shape[1:2]
    operand_checks.that(fits, title, got, "pass an integer tensor of shape [samples]")
    operand_checks.that(
        0 <= blank < probs.shape[2] and 1 <= top_paths <= beam_width,
        "ctc_beam_search_decoder: a number is out of range",
        f"blank={blank}, beam_width={beam_width}, top_paths={top_paths}",
        f"pass a blank from 0 to {probs.shape[2] - 1}, and top_paths from 1 to beam_width",
    )
    paths: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _ctc_beam_search(
        probs.detach(), lengths, blank, beam_width, top_paths
    )
    return paths


_NONE = -1  # the last label of the empty prefix; also the parent of a prefix outside of the beam


@dataclass
class _Beam:
    labels: list[tuple[int, ...]]
    blank: np.ndarray
    label: np.ndarray

    @property
    def total(self) -> np.ndarray:
        both: np.ndarray = np.logaddexp(self.blank, self.label)
        return both


def _advance(beam: _Beam, scores: np.ndarray, blank: int, width: int) -> _Beam:
    count, classes = len(beam.labels), len(scores)
    last = np.array([labels[-1] if labels else _NONE for labels in beam.labels])
    some = last != _NONE
    rows = np.arange(count)
    ends_blank = beam.total + scores[blank]
    repeated = np.where(some, beam.label + scores[last], -np.inf)
    longer = beam.total[:, None] + scores[None, :]
    longer[rows[some], last[some]] = beam.blank[some] + scores[last[some]]
    longer[:, blank] = -np.inf
    places = {labels: at for at, labels in enumerate(beam.labels)}
    for at, labels in enumerate(beam.labels):  # a longer prefix may already be in the beam
        parent = places.get(labels[:-1], _NONE) if labels else _NONE
        if parent != _NONE:
            repeated[at] = np.logaddexp(repeated[at], longer[parent, labels[-1]])
            longer[parent, labels[-1]] = -np.inf
    blanks = np.concatenate([ends_blank, np.full(longer.size, -np.inf)])
    ends = np.concatenate([repeated, longer.reshape(-1)])
    candidates = np.logaddexp(blanks, ends)
    best = np.argsort(-candidates, kind="stable")[:width]
    best = best[candidates[best] > -np.inf]
    labels_of: list[tuple[int, ...]] = []
    for choice in best.tolist():
        source, symbol = divmod(choice - count, classes)
        same = choice < count
        labels_of.append(beam.labels[choice] if same else (*beam.labels[source], symbol))
    return _Beam(labels_of, blanks[best], ends[best])


def _decode(
    log_probs: torch.Tensor, lengths: torch.Tensor, blank: int, beam_width: int, top_paths: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scores = log_probs.detach().cpu().double().numpy()
    results = _decoded_shapes(log_probs, lengths, blank, beam_width, top_paths)
    probability, length, path = results
    for result, start in zip(results, (-torch.inf, 0, blank), strict=True):
        result.fill_(start)
    with np.errstate(invalid="ignore"):
        for sample, steps in enumerate(lengths.tolist()):
            beam = _Beam([()], np.array([0.0]), np.array([-np.inf]))
            for step in range(int(steps)):
                beam = _advance(beam, scores[step, sample], blank, beam_width)
            total = beam.total
            for rank, at in enumerate(np.argsort(-total, kind="stable")[:top_paths]):
                labels = beam.labels[at]
                probability[sample, rank] = total[at]
                length[sample, rank] = len(labels)
                path[sample, rank, : len(labels)] = torch.tensor(labels, dtype=torch.int32)
    return results


def _decoded_shapes(
    log_probs: torch.Tensor, lengths: torch.Tensor, blank: int, beam_width: int, top_paths: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    steps, samples, _ = log_probs.shape
    half = log_probs.dtype == torch.float16
    paths = samples, top_paths
    return (
        log_probs.new_empty(paths, dtype=torch.float16 if half else torch.float32),
        log_probs.new_empty(paths, dtype=torch.int32),
        log_probs.new_empty((*paths, steps), dtype=torch.int32),
    )


_ctc_beam_search = define(
    "ctc_beam_search",
    "(Tensor log_probs, Tensor lengths, int blank, int beam_width, int top_paths)"
    " -> (Tensor, Tensor, Tensor)",
    _decode,
    _decoded_shapes,
)
