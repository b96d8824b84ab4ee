"""Compiled graphs as shared libraries: what is kept of a compilation, and how it is loaded again.

With the C++ wrapper a compiled graph is one library that Python can import, and a generated Python
function that calls it. Where that function is the same, instruction for instruction, as
``private.calling``, the library is all that has to be kept. Loading it takes milliseconds, because
nothing of torch's compiler has to be imported.

Torch's own artefacts (``torch._inductor.standalone_compile``, ``CompiledArtifact.save`` and
``load``) would replace this file and the direct call of the code generator. Measured side by side
on the tutorial's CNN, micro-batch 16, torch 2.13, a busy machine: a call takes 1.28 ms instead of
0.68 (a wrapper checks each call, our layouts do not apply); compiling takes as long. A new
process needs 85 to 107 s instead of 2.2 to 2.9 for importing and loading, because such a file holds
source code, which is compiled again where torch's cache of libraries is not there. It is a pickle,
too, which nobody should read from others.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

import torch

from ..._base import env, private

ENTRY = "inductor_entry_cpp"
_MEANING = ("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_argcount")


@functools.cache
def generator() -> str:
    """Return a digest of what makes code: code that it would no longer make is not used again."""
    digest, here = hashlib.sha256(), Path(__file__).parent
    for path in (here.parent / "prepare.py", *sorted(here.glob("*.py"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def code_of(compiled: Any) -> bytes | None:
    """Return the library of torch's compiled graph; None if it is more than a library."""
    function = compiled.current_callable
    if not _same(getattr(function, "__code__", None), private.calling(print).__code__):
        return None
    (cell,) = function.__closure__
    path = getattr(getattr(cell.cell_contents, "__self__", None), "__file__", None)
    return None if path is None else Path(path).read_bytes()


def _same(first: object, second: object) -> bool:
    """Tell whether two pieces of compiled Python do the same, wherever they were written."""
    if not isinstance(first, CodeType) or not isinstance(second, CodeType):
        return type(first) is type(second) and first == second
    alike = all(getattr(first, name) == getattr(second, name) for name in _MEANING)
    constants = first.co_consts, second.co_consts
    return alike and len(constants[0]) == len(constants[1]) and all(map(_same, *constants))


def load(code: bytes) -> Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]:
    """Return the function of a library.

    Raises:
        ImportError: it does not fit this machine or this torch.
        Gone: this torch calls libraries in another way.
    """
    private.demand(private.KEPT_CODE)
    # The library finds torch's accessor of tensors by this variable, as torch's own loader sets it.
    address = str(private.torchinductor_pyobject_tensor_data_ptr)
    env.put("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", address)
    with tempfile.TemporaryDirectory(prefix="poptorch-code-") as folder:
        path = Path(folder) / "code.so"  # a loaded library needs no name in the file system
        path.write_bytes(code)
        spec = importlib.util.spec_from_file_location(f"poptorch_code.{ENTRY}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    call = private.calling(getattr(module, ENTRY))
    return lambda tensors: call(list(tensors))  # it empties its list
