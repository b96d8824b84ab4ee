"""Beam search over CTC label prefixes, as an operator."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from .library import define

_NONE = -1  # the last label of the empty prefix, and the parent of a prefix outside the beam


@dataclass
class _Beam:
    """The best prefixes so far; one entry of every array for each."""

    labels: list[tuple[int, ...]]
    blank: np.ndarray
    label: np.ndarray

    @property
    def total(self) -> np.ndarray:
        """Log-probability of each prefix."""
        both: np.ndarray = np.logaddexp(self.blank, self.label)
        return both


def _advance(beam: _Beam, scores: np.ndarray, blank: int, width: int) -> _Beam:
    """Read one step's log-probabilities ``[classes]``."""
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
    for at, labels in enumerate(beam.labels):  # a longer prefix may be in the beam already
        parent = places.get(labels[:-1], _NONE) if labels else _NONE
        if parent != _NONE:
            repeated[at] = np.logaddexp(repeated[at], longer[parent, labels[-1]])
            longer[parent, labels[-1]] = -np.inf
    candidates = np.concatenate([np.logaddexp(ends_blank, repeated), longer.reshape(-1)])
    best = np.argsort(-candidates, kind="stable")[:width]
    best = best[candidates[best] > -np.inf]
    labels_of, blanks, ends = [], [], []
    for choice in best:
        if choice < count:
            labels_of.append(beam.labels[choice])
            blanks.append(ends_blank[choice])
            ends.append(repeated[choice])
        else:
            source, symbol = divmod(int(choice) - count, classes)
            labels_of.append((*beam.labels[source], symbol))
            blanks.append(-np.inf)
            ends.append(longer[source, symbol])
    return _Beam(labels_of, np.array(blanks), np.array(ends))


def _decode(
    log_probs: torch.Tensor, lengths: torch.Tensor, blank: int, beam_width: int, top_paths: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scores = log_probs.detach().cpu().double().numpy()
    steps, samples, _ = scores.shape
    probability = np.full((samples, top_paths), -np.inf, dtype=np.float32)
    length = np.zeros((samples, top_paths), dtype=np.int32)
    path = np.full((samples, top_paths, steps), blank, dtype=np.int32)
    with np.errstate(invalid="ignore"):
        for sample in range(samples):
            beam = _Beam([()], np.array([0.0]), np.array([-np.inf]))
            for step in range(int(lengths[sample])):
                beam = _advance(beam, scores[step, sample], blank, beam_width)
            total = beam.total
            for rank, at in enumerate(np.argsort(-total, kind="stable")[:top_paths]):
                labels = beam.labels[at]
                probability[sample, rank] = total[at]
                length[sample, rank] = len(labels)
                path[sample, rank, : len(labels)] = labels
    device = log_probs.device
    probabilities = torch.from_numpy(probability).to(device, _result_dtype(log_probs))
    return probabilities, torch.from_numpy(length).to(device), torch.from_numpy(path).to(device)


def _fake(
    log_probs: torch.Tensor, lengths: torch.Tensor, blank: int, beam_width: int, top_paths: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    steps, samples, _ = log_probs.shape
    return (
        log_probs.new_empty((samples, top_paths), dtype=_result_dtype(log_probs)),
        log_probs.new_empty((samples, top_paths), dtype=torch.int32),
        log_probs.new_empty((samples, top_paths, steps), dtype=torch.int32),
    )


def _result_dtype(log_probs: torch.Tensor) -> torch.dtype:
    return torch.float16 if log_probs.dtype == torch.float16 else torch.float32


ctc_beam_search = define(
    "ctc_beam_search",
    "(Tensor log_probs, Tensor lengths, int blank, int beam_width, int top_paths)"
    " -> (Tensor, Tensor, Tensor)",
    _decode,
    _fake,
)
