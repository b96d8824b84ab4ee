"""Decide what the file of a compiled model contains, write it, and read it without running its
code.

A file consists of JSON and safetensors: shapes of the arguments, weights, and the state of the
optimizer and the device. Reading these runs no code. The program is captured again from the user's
model, and compiled code for the same program is found in the user's own cache. The file also
contains a pickle of the user's objects and compiled code. Both are used only if the user trusts the
file, or saved it, which a signature shows.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from ... import _capture, _compile
from ..._base import archive, json_codec, log, safe_files, signed_code
from ..._base.archive import InvalidFile
from ..._base.errors import AssertionFailure, Error
from ..._base.json_codec import Json
from ..._base.user_modes import without_user_modes
from ..host_changes import replaced_layers
from ..programs import Specialization
from ..session import Session

DEFAULT_NAME = "model.poptorch"
_FACTS, _TENSORS, _OBJECTS, CODE = "facts.json", "tensors.safetensors", "objects.pickle", "code/"
_SIGNATURE = "signature"
MODEL, DEVICE = "model.", "device."


@dataclass(frozen=True, eq=False)
class UserObjects:
    """The user's objects from which a program was compiled."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    loss: Any


@dataclass(frozen=True, eq=False)
class SavedModel:
    """The contents of a file."""

    path: str
    whole: bool  # whether the file contains the model
    algorithm: str | None  # the optimizer's algorithm; None in inference
    has_loss: bool
    options: str  # the executor's options, as lines of calls
    settings: Mapping[str, str]  # settings of the compiled program, as text by name
    # Arguments of forward. None if they have no JSON form, or if their values affected the program.
    arguments: Mapping[str, Any] | None
    shapes: Mapping[str, list[int]]
    hypers: list[dict[str, Any]]  # values of the optimizer itself, then of each parameter group
    steps: Mapping[str, float]  # steps of each weight by path, if the optimizer counts them
    random: list[int] | None
    # under MODEL, DEVICE, and "object." for tensors in the pickle
    tensors: Mapping[str, torch.Tensor]
    parts: Mapping[str, bytes]
    # whether the pickle and the code may be used, because this user trusts or saved the file
    trusted: bool

    def under(self, prefix: str) -> dict[str, torch.Tensor]:
        return {n.removeprefix(prefix): t for n, t in self.tensors.items() if n.startswith(prefix)}

    def objects(self) -> UserObjects:
        """Unpickle the user's objects. This can run any code in the file."""
        assert self.trusted
        if _OBJECTS not in self.parts:
            raise AssertionFailure(
                "The file does not contain the model object",
                got=f"{self.path}, whose model could not be pickled",
                fix="create the model and pass it: poptorch.load(path, model=Net())",
            )
        try:
            content = _Unpickler(io.BytesIO(self.parts[_OBJECTS]), self.tensors).load()
        except Exception as error:  # the pickle can call anything
            raise InvalidFile(
                "Invalid file",
                got=(f"the objects in the file cannot be created: {type(error).__name__}: {error}"),
                fix=(
                    "import the module that defines the model before loading, or create the model "
                    "yourself: poptorch.load(path, model=Net())"
                ),
            ) from error
        try:
            return UserObjects(**content)
        except TypeError as error:
            archive.refuse(self.path, f"its objects are not those of a model ({error})")


# Writing.


def save(
    session: Session,
    filename: str | os.PathLike[str],
    objects: UserObjects | None,
    options: str,
    with_random: bool,
) -> None:
    """Save a compiled model. Of several processes that train together, the first one
    writes the file.
    """
    parts = packed(session, objects, options, with_random)
    if parts is None:
        log.python.info("Process 0 writes %s", filename)
        return
    signature = signed_code.digest(_SIGNATURE, _digests(parts)) or b""
    path = safe_files.followed(_destination(filename))
    archive.write(path, parts | {_SIGNATURE: signature})


def _digests(parts: Mapping[str, bytes]) -> bytes:
    digests = {n: hashlib.sha256(data).hexdigest() for n, data in parts.items() if n != _SIGNATURE}
    return json.dumps(digests, sort_keys=True).encode()


@without_user_modes()
def packed(
    session: Session,
    objects: UserObjects | None,
    options: str,
    with_random: bool,
    pickled: bool = True,
) -> dict[str, bytes] | None:
    """Return the parts of a file of a compiled model; None for a process that writes no file.

    Without ``objects``, the file contains no weights and no state of the device. With ``pickled``,
    it also contains the objects themselves if they can be pickled.
    """
    now = session.now
    if objects is not None:
        _refuse_replaced_layers(now)
    state = session.state_to_save() if objects is not None else {}
    if now.spec.target.parts > 1:
        # an exchange between processes, as reading the state may be
        session.weights.bring_host_up_to_date()
    if now.spec.runs_together and now.spec.process > 0:
        return None
    session.weights.bring_host_up_to_date()
    facts: dict[str, Any] = {
        "algorithm": now.task.optim.algorithm if now.task.optim is not None else None,
        "options": options,
        "settings": _compile.flat_fields(now.spec.for_cache()),
        "arguments": _arguments(session, now),
        "shapes": shapes_of(session.model.module),
        "random": session.rng_state if with_random else None,
        "whole": objects is not None,
        "has_loss": objects is not None and objects.loss is not None,
        "hypers": [],
        "steps": {},
    }
    tensors: dict[str, torch.Tensor] = {}
    parts = {f"{CODE}{key}": code for key, code in _compile.code_of(now.compiled.plan).items()}
    if objects is not None:
        own = _capture.tensors_of(objects.model)
        tensors = {f"{MODEL}{path}": tied.tensor for path, tied in own.items()}
        tensors |= _pickle(objects, tensors, parts) if pickled else {}
        tensors |= {f"{DEVICE}{key}": value for key, value in state.items()}
        if objects.optimizer is not None:
            facts["hypers"] = [_plain(group) for group in attributes(objects.optimizer)]
        if session.optimizer is not None:
            facts["steps"] = session.optimizer.count_steps()
    # The format refuses tensors that share storage.
    separate = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    return parts | {_FACTS: json.dumps(facts).encode(), _TENSORS: safetensors.torch.save(separate)}


def _refuse_replaced_layers(now: Specialization) -> None:
    """Refuse a file whose program and weights would be those of different models."""
    replaced = replaced_layers(now.change_checks)
    if replaced:
        raise Error(
            "The model cannot be saved, because its layers were replaced after compilation",
            got=f"since the model was compiled, you replaced {', '.join(replaced)}",
            fix=(
                "compile the model as it is now, then save it: call destroy() on the wrapped "
                "model, "
                "then call the wrapped model with a batch",
                "or save the weights only: torch.save(model.state_dict(), path)",
            ),
        )


def _pickle(
    objects: UserObjects, known: Mapping[str, torch.Tensor], parts: dict[str, bytes]
) -> dict[str, torch.Tensor]:
    """Add a pickle to the parts of a file, and return the tensors to which it refers."""
    buffer = io.BytesIO()
    pickler = _ReferencePickler(buffer, known)
    try:
        pickler.dump(vars(objects))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        log.python.warning(
            "The model cannot be pickled, so poptorch.load will need model=...: %s", error
        )
        return {}
    parts[_OBJECTS] = buffer.getvalue()
    return pickler.tensors


def _destination(filename: str | os.PathLike[str]) -> Path:
    path = Path(filename)
    if path.is_dir():
        log.python.warning("%s is a directory: saving to %s in it", path, DEFAULT_NAME)
        return path / DEFAULT_NAME
    check_folder(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def check_folder(path: Path) -> None:
    for parent in path.parents:
        if parent.exists() and not parent.is_dir():
            raise AssertionFailure(
                "Cannot save: a part of the path is a file, not a folder",
                got=str(parent),
                fix="choose another path, or rename this file",
            )


def shapes_of(model: nn.Module) -> dict[str, list[int]]:
    return {path: list(t.tensor.shape) for path, t in _capture.tensors_of(model).items()}


def _arguments(session: Session, now: Specialization) -> Json:
    if now.inputs.looked_at:
        return None
    values = session.model.signature.given(now.inputs.bound)
    try:
        return {name: encode(value) for name, value in values.items()}
    except TypeError as error:
        log.python.info(
            (
                "The arguments of the model are not saved, so a loaded model "
                "compiles at its first call: %s"
            ),
            error,
        )
        return None


def attributes(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the numeric values of an optimizer itself, then the attributes of each group."""
    own = {name: getattr(optimizer, name) for name in getattr(optimizer, "_child_vars", ())}
    return [own, *({k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups)]


def _plain(attributes: Mapping[str, Any]) -> dict[str, Json]:
    kinds = (bool, int, float, str, list, tuple, type(None))
    return {k: encode(v) for k, v in attributes.items() if isinstance(v, kinds)}


# Reading.


def read(filename: str | os.PathLike[str], trusted: bool = False) -> SavedModel:
    """Read a file without running anything in it."""
    parts = archive.read(filename)
    try:
        facts = archive.from_json(parts[_FACTS])
        return SavedModel(
            path=os.fspath(filename),
            whole=_of_type(bool, facts["whole"]),
            algorithm=_of_type((str, type(None)), facts["algorithm"]),
            has_loss=_of_type(bool, facts["has_loss"]),
            options=_of_type(str, facts["options"]),
            settings={str(k): str(v) for k, v in facts["settings"].items()},
            arguments=_of_type((dict, type(None)), facts["arguments"])
            and decode_all(facts["arguments"]),
            shapes={path: _shape(shape) for path, shape in facts["shapes"].items()},
            hypers=[decode_all(entry) for entry in facts["hypers"]],
            steps={str(path): _count_of_steps(n) for path, n in facts["steps"].items()},
            random=random_state(facts["random"]),
            tensors=safetensors.torch.load(parts[_TENSORS]),
            parts=parts,
            trusted=trusted
            or signed_code.is_own(_SIGNATURE, _digests(parts), parts.get(_SIGNATURE, b"")),
        )
    except Exception as error:  # any error here is caused by the contents of the file
        archive.refuse(filename, f"{type(error).__name__}: {error}")


def _of_type(kind: Any, value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is not a {kind}")
    return value


def _count_of_steps(value: Any) -> float:
    if not isinstance(value, int | float) or not 0 <= value < 1 << 53:
        raise ValueError(f"{value!r:.40} is not a valid number of steps")
    return float(value)


def random_state(state: Any) -> list[int] | None:
    numbers: list[Any] | None = _of_type((list, type(None)), state)
    for number in numbers or ():
        if type(number) is not int or not -(1 << 63) <= number < 1 << 63:
            raise ValueError(f"{number!r} is not a valid number in a random state")
    return numbers


# Arguments of ``forward`` as JSON: structure, shapes and dtypes, but no values of tensors.

LARGEST = 1 << 48
"""The largest number of elements of a tensor in a file."""
DEEPEST = 64
"""The largest number of dimensions of a tensor in a file; torch's loops support no more."""
MOST = 50_000
"""The largest number of values in the arguments of a file; the capture visits each of them
many times.
"""


def encode(value: Any) -> Json:
    return json_codec.encode(value, _tensor_form)


def _tensor_form(value: Any) -> Json:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"a value of type {type(value).__qualname__} cannot be stored as JSON")
    return {"tensor": [json_codec.encode(value.dtype), list(value.shape)]}


def decode(data: Json) -> Any:
    """Return the value that was passed to ``encode``, with zeros that use no memory in place of
    tensors.
    """
    return json_codec.decode(data, readers={"tensor": _zeros})


def decode_all(data: Json) -> dict[str, Any]:
    if not isinstance(data, Mapping):
        raise ValueError("the values are not stored by name")
    if _count(data) > MOST:
        raise ValueError(f"the arguments have more than {MOST} values")
    return {str(name): decode(value) for name, value in data.items()}


def _count(data: Json) -> int:
    count, waiting = 0, [data]
    while waiting and count <= MOST:
        count += 1
        inside = waiting.pop()
        if isinstance(inside, Mapping):
            waiting += inside.values()
        elif isinstance(inside, list):
            waiting += inside
    return count


def _zeros(content: Json) -> torch.Tensor:
    kind, shape = content
    dtype = json_codec.decode(kind)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"this is not a dtype: {kind!s:.80}")
    if len(_shape(shape)) > DEEPEST or math.prod(shape) > LARGEST:
        raise ValueError(f"this shape is too large: {shape!s:.80}")
    return torch.zeros((), dtype=dtype, device="cpu").expand(shape)


def _shape(value: Any) -> list[int]:
    if not isinstance(value, list) or not all(type(n) is int and n >= 0 for n in value):
        raise ValueError(f"this is not a shape: {value!s:.80}")
    return value


# The user's objects as a pickle, for users who trust the file; its tensors are stored by name.

_PROTOCOL = 4
_PICKLED = (torch.Tensor, nn.Parameter)
TensorReference = tuple[str, bool, bool]


class _ReferencePickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, known: Mapping[str, torch.Tensor]) -> None:
        super().__init__(file, protocol=_PROTOCOL)
        self.tensors: dict[str, torch.Tensor] = {}
        self._names = {id(tensor): name for name, tensor in known.items()}

    def persistent_id(self, obj: Any) -> TensorReference | None:
        if type(obj) not in _PICKLED:
            return None
        if id(obj) not in self._names:
            name = self._names[id(obj)] = f"object.{len(self.tensors)}"
            self.tensors[name] = obj
        return self._names[id(obj)], isinstance(obj, nn.Parameter), obj.requires_grad


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(file)
        self._stored = tensors
        self._made: dict[str, torch.Tensor] = {}

    def persistent_load(self, pid: TensorReference) -> torch.Tensor:
        name, is_parameter, requires_grad = pid
        if name not in self._made:
            tensor = self._stored[name]
            if is_parameter:
                tensor = nn.Parameter(tensor, requires_grad=requires_grad)
            self._made[name] = tensor
        return self._made[name]
