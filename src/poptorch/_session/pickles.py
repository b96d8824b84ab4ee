"""Objects of the user's in a file that is trusted: a pickle, with its tensors beside it by name.

Reading one runs whatever it says, as Python's ``pickle`` does.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from .._base.archive import InvalidFile

PROTOCOL = 4
_PLAIN = (torch.Tensor, nn.Parameter)
Reference = tuple[str, bool, bool]


def dump(value: Any, known: Mapping[str, torch.Tensor]) -> tuple[bytes, dict[str, torch.Tensor]]:
    """Pickle a value, leaving its tensors out.

    Args:
        value: what is pickled.
        known: tensors that are kept anyway, by name.

    Returns:
        The pickle, and by name the other tensors that it refers to.

    Raises:
        pickle.PicklingError, AttributeError, TypeError: something in it cannot be pickled, a
            locally defined class for instance.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, known)
    pickler.dump(value)
    return buffer.getvalue(), pickler.tensors


def load(data: bytes, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the value that ``dump`` was given. Only for data from trusted sources.

    Raises:
        InvalidFile: it cannot be rebuilt here.
    """
    try:
        return _Unpickler(io.BytesIO(data), tensors).load()
    except Exception as error:  # it comes from whatever the pickle calls
        raise InvalidFile(
            "Invalid file",
            got=f"its objects cannot be rebuilt: {type(error).__name__}: {error}",
            fix="make what defines the model importable, or load into a model of your own: "
            "poptorch.load(path, model=Net())",
        ) from error


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, known: Mapping[str, torch.Tensor]) -> None:
        super().__init__(file, protocol=PROTOCOL)
        self.tensors: dict[str, torch.Tensor] = {}
        self._names = {id(tensor): name for name, tensor in known.items()}

    def persistent_id(self, obj: Any) -> Reference | None:
        if type(obj) not in _PLAIN:
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

    def persistent_load(self, pid: Reference) -> torch.Tensor:
        name, is_parameter, requires_grad = pid
        if name not in self._made:
            tensor = self._stored[name]
            if is_parameter:
                tensor = nn.Parameter(tensor, requires_grad=requires_grad)
            self._made[name] = tensor
        return self._made[name]
