"""Store and load compiled graphs as shared libraries.

Torch's own artefacts (``CompiledArtifact.save``) contain source code. They compile it again if
torch's cache is missing (85 to 107 s instead of 2.2 to 2.9 for the tutorial's CNN in a new
process), make calls twice as long, and are pickles.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import inspect
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from .._base import env, private, temporary_folders
from .._ir.conditions import ALWAYS, Conditions
from ..backends import prepare
from ..backends.protocol import Code, Compiled

ENTRY = "inductor_entry_cpp"


@functools.cache
def generator() -> str:
    """Return a digest of everything that generates code. Code is not reused if it would be
    generated differently now.
    """
    digest, package = hashlib.sha256(), Path(__file__).parent
    own = *package.glob("*.py"), *filter(Path.is_file, package.glob("include/**/*"))
    for path in (Path(prepare.__file__), *sorted(own)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class LimitedCode:
    """A function of a library, and the conditions under which it may be called."""

    def __init__(self, run: Compiled, conditions: Conditions) -> None:
        self._run, self.conditions = run, conditions

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return self._run(tensors)


def code_of(compiled: Any, conditions: Conditions = ALWAYS) -> Code:
    """Return the code of a graph that torch compiled: only its library, if the graph needs nothing
    else.

    What torch does around a library takes 3 us of each call.
    """
    # torch empties this list
    whole = Code(_limited(lambda arguments: compiled(list(arguments)), conditions), None)
    entry = entry_of(compiled)
    path = getattr(getattr(entry, "__self__", None), "__file__", None)
    if path is None or getattr(entry, "__name__", None) != ENTRY:
        return whole
    return code_with(entry, conditions)


def entry_of(compiled: Any) -> Any:
    """Return the function that a compiled graph calls with its inputs; None if the graph does more
    than that.
    """
    function = compiled.current_callable
    if not inspect.isfunction(function) or not private.has(private.KEPT_CODE):
        return None
    used = inspect.getclosurevars(function)
    alone = [*used.nonlocals] == ["f"] and [*used.globals] == ["torch"]  # no constants of the graph
    return used.nonlocals["f"] if alone else None


def code_with(entry: Any, conditions: Conditions = ALWAYS) -> Code:
    """Return code whose function is the entry of a library."""
    run = _limited(_calling(entry), conditions)
    try:
        limits = json.dumps(conditions.to_json())
    except TypeError:  # a condition of a kind that cannot be stored
        return Code(run, None)
    library = Path(entry.__self__.__file__).read_bytes()
    return Code(run, b"\n".join((limits.encode(), library)))


def _limited(run: Compiled, conditions: Conditions) -> Compiled:
    return LimitedCode(run, conditions) if conditions.expressions else run


def load(code: bytes) -> Compiled:
    private.demand(private.KEPT_CODE)
    limits, _, library = code.partition(b"\n")
    return _limited(_loaded(library), Conditions.from_json(json.loads(limits)))


def _loaded(library: bytes) -> Compiled:
    # The library finds torch's accessor of tensors in this variable, which torch's own loader sets.
    address = str(private.torchinductor_pyobject_tensor_data_ptr)
    env.put("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", address)
    with temporary_folders.folder_within_block("poptorch-code-") as folder:
        path = folder / "code.so"  # a loaded library needs no name in the file system
        path.write_bytes(library)
        spec = importlib.util.spec_from_file_location(f"poptorch_code.{ENTRY}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return _calling(getattr(module, ENTRY))


def _calling(entry: Callable[[Any], Any]) -> Compiled:
    to_handles = private.unsafe_alloc_void_ptrs_from_tensors
    from_handles = private.alloc_tensors_by_stealing_from_void_ptrs
    return lambda tensors: from_handles(entry(to_handles(tensors)))
