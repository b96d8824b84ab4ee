"""Compiled graphs as shared libraries: what is kept of a compilation, and how it is loaded again.

With the C++ wrapper a compiled graph is one library that Python can import; the Python around it is
the same for every plain graph and stands here once more. Loading one takes milliseconds, because
none of torch's compiler has to be imported for it.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..._base import env

ENTRY = "inductor_entry_cpp"
# The generated Python of a graph without constants or other particularities, white space removed.
_PLAIN = (
    "def_wrap_func(f):defg(args):input_tensors=[argifisinstance(arg,torch.Tensor)else"
    "torch.tensor(arg,device='cpu')forarginargs]input_handles=torch._C._aoti."
    "unsafe_alloc_void_ptrs_from_tensors(input_tensors)args.clear()delinput_tensors"
    "output_handles=f(input_handles)output_tensors=torch._C._aoti."
    "alloc_tensors_by_stealing_from_void_ptrs(output_handles)returnoutput_tensorsreturng"
    "call=_wrap_func(inductor_entry)"
)
_PARTICULARITIES = (
    *("constants", "frozen_param_names", "torchbind_constants", "partition_maps"),
    "inputs_to_check",
)


@functools.cache
def generator() -> str:
    """Return a digest of what makes code: code that it would no longer make is not used again."""
    digest, here = hashlib.sha256(), Path(__file__).parent
    for path in (here.parent / "prepare.py", *sorted(here.glob("*.py"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def code_of(compiled: Any) -> bytes | None:
    """Return the library of torch's compiled graph; None if it is more than a library."""
    source = "".join(str(compiled.source_code).split())
    entry = getattr(compiled.current_callable, "__globals__", {}).get("inductor_entry")
    path = getattr(getattr(entry, "__self__", None), "__file__", None)
    particular = any(getattr(compiled, name, None) for name in _PARTICULARITIES)
    if path is None or particular or _PLAIN not in source:
        return None
    return Path(path).read_bytes()


def load(code: bytes) -> Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]:
    """Return the function of a library.

    Raises:
        ImportError: it does not fit this machine or this torch.
    """
    # The library finds torch's accessor of tensors by this variable, as torch's own loader sets it.
    address = torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]
    env.put("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", str(address))
    with tempfile.TemporaryDirectory(prefix="poptorch-code-") as folder:
        path = Path(folder) / "code.so"  # a loaded library needs no name in the file system
        path.write_bytes(code)
        spec = importlib.util.spec_from_file_location(f"poptorch_code.{ENTRY}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    entry = getattr(module, ENTRY)
    aoti = torch._C._aoti

    def run(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        handles = aoti.unsafe_alloc_void_ptrs_from_tensors(list(tensors))
        results: Sequence[torch.Tensor] = aoti.alloc_tensors_by_stealing_from_void_ptrs(
            entry(handles)
        )
        return results

    return run
