"""Finding the loss: torch's own losses by what they are, ``identity_loss`` by its mark."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .._base import log, source
from .._base.errors import Error
from .._ir.operators import functions_before, reachable
from .._ops.context import Candidate
from .recorded import leads_to, original
from .trace import outermost

_NAMES = (
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "cosine_embedding_loss",
    "cross_entropy", "ctc_loss", "gaussian_nll_loss", "hinge_embedding_loss", "huber_loss",
    "kl_div", "l1_loss", "linear_cross_entropy", "margin_ranking_loss", "mse_loss",
    "multi_margin_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss", "nll_loss",
    "poisson_nll_loss", "smooth_l1_loss", "soft_margin_loss", "triplet_margin_loss",
    "triplet_margin_with_distance_loss",
)  # fmt: skip
MARK = "identity_loss"
# Some of them exist under ``torch`` as well; the functions are others.
LOSS_FUNCTIONS: dict[Callable[..., Any], str] = {
    getattr(owner, name): name for name in _NAMES for owner in (F, torch) if hasattr(owner, name)
}


def final_loss(
    candidates: Sequence[Candidate], model: nn.Module, returned: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return the one loss that feeds no other, or the one returned scalar made of all of these."""
    if not candidates:
        raise Error(
            "Couldn't find a loss in graph",
            got=f"{type(model).__name__}.forward called no torch loss and no identity_loss",
            where=source.definition_line(type(model).forward),
            fix=(
                "compute the loss in forward with a torch.nn loss and return it",
                "mark a loss of your own: poptorch.identity_loss(loss, reduction='mean')",
            ),
        )
    final = [c for c in candidates if not _feeds_another(c, candidates)]
    combined = _combined(final, returned)
    if combined is not None:
        log.python.info(
            "Training follows a returned value that is made of %s",
            ", ".join(f"{c.function} at {c.line}" for c in final),
        )
        return combined
    if len(final) > 1:
        raise Error(
            "Multiple independent losses found in graph",
            got="\n".join(f"{c.function} at {c.line}" for c in final),
            where=source.definition_line(type(model).forward),
            fix=(
                "return their sum, or another single number that is made of all of them",
                "combine them and mark the result: "
                "poptorch.identity_loss(loss1 + loss2, reduction='sum')",
            ),
        )
    (loss,) = final
    _check_unchanged(loss, returned)
    return loss.tensor


def _combined(final: Sequence[Candidate], returned: Sequence[torch.Tensor]) -> torch.Tensor | None:
    if any(each.function == MARK for each in final):
        return None
    losses = [each.tensor for each in final]
    if len(losses) == 1 and any(_same_values(losses[0], each) for each in returned):
        return None
    made = [
        each
        for each in returned
        if each.numel() == 1 and all(_reaches(each, loss) for loss in losses)
    ]
    return made[0] if made and all(_same_values(made[0], each) for each in made) else None


def _check_unchanged(loss: Candidate, returned: Sequence[torch.Tensor]) -> None:
    made_of_it = [tensor for tensor in returned if _reaches(tensor, loss.tensor)]
    same = any(_same_values(loss.tensor, tensor) for tensor in returned)
    if made_of_it and not same:
        raise Error(
            "The returned value is not the loss that training would follow",
            got=f"a value that was computed from {loss.function} at {loss.line}",
            where=loss.line,
            fix=(
                "mark the final value: poptorch.identity_loss(value, reduction='none')",
                f"or return the result of {loss.function}, too, if training should follow that",
            ),
        )


def _feeds_another(candidate: Candidate, candidates: Iterable[Candidate]) -> bool:
    later = False
    for other in candidates:
        if other is candidate:
            later = True
        elif candidate.tensor is other.tensor:
            if later:  # the same tensor marked again: the later mark stands
                return True
        elif leads_to(outermost(candidate.tensor), outermost(other.tensor)):  # gradient or not
            return True
    return False


def _same_values(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two values are the same numbers: views, copies, means over a single element."""
    if first is second:
        return True
    one, other = (original(outermost(tensor)) for tensor in (first, second))
    return one is not None and one is other


def _reaches(start: torch.Tensor, goal: torch.Tensor) -> bool:
    first, wanted = outermost(start).grad_fn, outermost(goal).grad_fn
    if first is None or first is wanted:
        return False
    return wanted in reachable([first], functions_before)
