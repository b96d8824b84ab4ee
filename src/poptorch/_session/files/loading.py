"""Load a saved model: check that it fits the user's objects, and restore its values in them. They
are then compiled as usual.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any, NoReturn

import torch
from torch import nn

from ... import _capture, _compile
from ..._base import log
from ..._base.errors import Error
from ..._base.user_modes import without_user_modes, written_to
from ...optim import KINDS
from ...optim.arguments import LARGEST
from ...optim.freeze_optimizer import freeze
from ..calls import Arguments
from ..programs import check_saved, refuse_saved
from ..random import Randomness
from ..session import Session
from .saved_model import CODE, DEVICE, MODEL, SavedModel, attributes, shapes_of

_NUMBERS = {name for kind in KINDS for name in ("betas", *kind.hypers)}


@without_user_modes()
def fill(
    saved: SavedModel,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    loss: object | None,
) -> Callable[[], None]:
    """Restore the saved weights and hyper-parameters in the user's objects; return a function that
    undoes it.
    """
    if (optimizer is None) != (saved.algorithm is None):
        kind = "inference" if saved.algorithm is None else "training"
        raise Error(
            f"The file contains a model that was compiled for {kind}",
            got=f"optimizer={'None' if optimizer is None else type(optimizer).__name__}; "
            f"the file was saved with {saved.algorithm or 'no optimizer'}",
            fix="load the file without an optimizer"
            if saved.algorithm is None
            else "pass an optimizer of the class that was saved; its values and state come from "
            "the file: poptorch.load(path, model=model, optimizer=SGD(model.parameters(), ...))",
        )
    if (loss is not None) != saved.has_loss:
        raise Error(
            "The model was saved with a loss that was passed as loss="
            if saved.has_loss
            else "The model was saved without a loss that was passed as loss=",
            fix=(
                "pass the same loss to poptorch.load: loss=..."
                if saved.has_loss
                else "remove the argument loss= from the call of poptorch.load"
            ),
        )
    stored = saved.under(MODEL)
    tensors = _capture.tensors_of(model)
    check_saved(
        {path: (tensor.shape, tensor.dtype) for path, tensor in stored.items()},
        {path: (tied.tensor.shape, tied.tensor.dtype) for path, tied in tensors.items()},
    )
    values = _fitting(saved, optimizer)
    before = {path: tied.tensor.detach().clone() for path, tied in tensors.items()}
    were = [(target, {name: target[name] for name in new}) for target, new in values]
    undo = functools.partial(_put, tensors, before, were)
    try:
        _put(tensors, stored, values)
    except BaseException:
        undo()
        raise
    return undo


def _put(
    tensors: Mapping[str, _capture.ModelTensor],
    stored: Mapping[str, torch.Tensor],
    values: Sequence[tuple[dict[str, Any], dict[str, Any]]],
) -> None:
    with without_user_modes():
        for path, tied in tensors.items():
            with written_to(tied.tensor):
                tied.tensor.copy_(stored[path])
    for target, new in values:
        target.update(new)


def _fitting(
    saved: SavedModel, optimizer: torch.optim.Optimizer | None
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the optimizer's dictionaries, each with the values from the file."""
    if optimizer is None:
        return []
    _check_algorithm(saved, optimizer)
    targets = [vars(optimizer), *optimizer.param_groups]
    if len(targets) != len(saved.hypers):
        _refuse(f"{len(saved.hypers) - 1} parameter groups", f"{len(targets) - 1}")
    result = []
    for target, known, new in zip(targets, attributes(optimizer), saved.hypers, strict=True):
        _check_range(new)
        wrong = [name for name in new if name in known and not _has_types(new[name], known[name])]
        if wrong:
            _refuse(f"{wrong[0]} is {new[wrong[0]]!r}", repr(known[wrong[0]]))
        result.append((target, {name: new[name] for name in new if name in known}))
    return result


def _check_range(hypers: Mapping[str, Any]) -> None:
    for name in sorted(_NUMBERS & hypers.keys()):
        value = hypers[name]
        for number in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(number, (int, float)) and not (0 <= number <= LARGEST or number == inf):
                raise Error(
                    "Invalid file: a hyper-parameter is out of range",
                    got=f"{name} is {value!r:.40}; float32 can represent 0 to {LARGEST:.3g}",
                    fix=(
                        (
                            "in the script that saved the file, set this hyper-parameter to a "
                            "number from 0 to 3e38, and save the model again"
                        ),
                        (
                            "or, if you need another number, set it in the optimizer after you "
                            "load the file"
                        ),
                    ),
                )


def _check_algorithm(saved: SavedModel, optimizer: torch.optim.Optimizer) -> None:
    here = freeze(optimizer, {})[0].algorithm
    if here != saved.algorithm:
        _refuse(str(saved.algorithm), here)


def _refuse(there: str, here: str) -> NoReturn:
    raise Error(
        "Invalid file: it was saved with another optimizer",
        got=f"{there} in the file, {here} in this model",
        fix="create the same kind of optimizer as in the script that saved the file",
    )


def _has_types(new: Any, old: Any) -> bool:
    if isinstance(new, (list, tuple)):
        old_items = old if isinstance(old, (list, tuple)) else ()
        return len(new) == len(old_items) and all(map(_has_types, new, old_items))
    if isinstance(new, bool) or new is None or isinstance(old, bool) or old is None:
        return isinstance(old, (bool, type(None))) and isinstance(new, (bool, type(None)))
    return any(isinstance(new, kind) and isinstance(old, kind) for kind in (str, (int, float)))


def restore(session: Session, saved: SavedModel, random: list[int] | None) -> None:
    """Make the next compilation continue with the state in a file; ``random`` is the state for this
    process.
    """
    Randomness(0).set(random, None)
    session.restored = saved.under(DEVICE), random
    if saved.arguments is not None:
        session.whole = _arguments(session, saved.arguments)
    if session.optimizer is not None:
        session.optimizer.begin_at(saved.steps)


def _arguments(session: Session, saved: Mapping[str, Any]) -> Arguments:
    """Return the arguments of a file as those of a call."""
    try:
        return session.model.signature.assemble(saved)
    except (KeyError, TypeError) as error:
        asked = f"arguments {', '.join(saved)} ({error})"
        refuse_saved(f"{asked}; the signature here is forward{session.model.signature}", error)


def resume(session: Session, saved: SavedModel, whole: bool) -> None:
    """Compile a model for the arguments in a file, or leave this to the first call.

    With ``whole``, also continue with the saved state of the optimizer, the device and random
    numbers.
    """
    spec = session.settings()
    if spec.training != (saved.algorithm is not None):
        raise Error(
            "Invalid file: training programs and inference programs cannot replace each other",
            got=(
                "a training program for an inference model"
                if saved.algorithm is not None
                else "an inference program for a training model"
            ),
            fix=(
                "load it into a model wrapped with poptorch.trainingModel"
                if saved.algorithm is not None
                else "load it into a model wrapped with poptorch.inferenceModel"
            ),
        )
    if session.optimizer is not None:
        _check_algorithm(saved, session.optimizer.given)
    check_saved(
        {path: (shape, None) for path, shape in saved.shapes.items()},
        {path: (shape, None) for path, shape in shapes_of(session.model.module).items()},
    )
    here = _compile.flat_fields(spec.for_cache())
    there = {name: saved.settings.get(name, "absent")[:80] for name in here}
    if there["target.device"] == "offline":  # the model was saved on a machine without devices
        there |= {name: here[name] for name in ("target.device", "target.generation")}
    differences = _compile.differences(here, there)
    if differences:
        log.python.warning(
            "The model is compiled with settings that differ from those in the file: %s",
            "; ".join(differences),
        )
    if saved.trusted:
        store = _compile.store_of(spec.runtime.cache_dir)
        for name, code in saved.parts.items():
            if name.startswith(CODE):
                store.keep(name.removeprefix(CODE), code)
    if whole:
        restore(session, saved, saved.random)
    if saved.arguments is None:
        log.python.info(
            "The file contains no arguments for which the model could be "
            "compiled. The first call compiles it"
        )
        return
    arguments = _arguments(session, saved.arguments)
    try:
        # this is not a call by the user, whose modes of torch would matter
        with without_user_modes(), torch.enable_grad():
            session.compile(arguments, background=True, placeholders=True)
    except Error:
        raise
    except Exception as error:  # forward may raise any error for the arguments from the file
        refuse_saved(f"forward does not take its arguments: {type(error).__name__}: {error}", error)
