"""Provide the names that scripts and tests import from PopTorch's engine module."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, NoReturn

from ._base.errors import (
    AssertionFailure,
    Error,
    InvalidKey,
    InvalidType,
    InvalidValue,
    OperatorError,
    RecoverableError,
    StateError,
    UnrecoverableError,
    Unsupported,
)
from .options.popart import validate_popart

__all__ = [
    "AssertionFailure", "Error", "InvalidKey", "InvalidType", "InvalidValue", "OperatorError",
    "RecoverableError", "StateError", "TestErrorType", "UnrecoverableError", "Unsupported",
    "createPoptorchError",
]  # fmt: skip


def createPoptorchError(msg: str) -> Error:
    """Return an error of the Python layer, for the caller to raise."""
    return Error(msg, where="")  # without the user's line


class TestErrorType(enum.Enum):
    """The errors that ``_throwTestError`` can raise."""

    __test__ = False  # keeps pytest from collecting this class

    Poptorch = "poptorch_cpp_error"
    Popart = "popart_exception"
    PopartInternal = "popart_internal_exception"
    Poplibs = "poplibs_exception"
    PoplarUnrecoverable = "poplar_unrecoverable_runtime_error"
    PoplarUnknown = "poplar_unknown_runtime_error"
    PoplarRecoverableFullReset = "poplar_recoverable_runtime_error"
    PoplarLinkError = "poplar_link_error"


def _throwTestError(kind: TestErrorType) -> NoReturn:
    parts: dict[str, Any] = {"type": kind.value, "location": "[0] throwTestError::bottom\n[1] top"}
    title = f"This is a test of {kind.name}"
    if kind is TestErrorType.PoplarRecoverableFullReset:
        raise RecoverableError(title, recovery_action="FULL_RESET", **parts)
    if kind is TestErrorType.PoplarUnrecoverable:
        raise UnrecoverableError(title, **parts)
    raise Error(title, **parts)


def _validateOptions(options: Mapping[str, Any]) -> None:
    validate_popart(dict(options))
