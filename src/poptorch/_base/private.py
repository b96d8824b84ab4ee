"""Torch's private names: the only file that names them, one row each, looked up when used.

``private.make_fx`` is torch's ``make_fx``, wherever this release of torch keeps it. A name that is
gone never fails an import: whoever asks for it gets ``Gone``, which names torch's version, and
either goes on without, with a warning, or raises it. What then does not work stands beside the
names.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from . import log
from .errors import Error

CAPTURE = "no model can be captured"
CONTROL_FLOW = "poptorch.for_loop and poptorch.cond cannot be captured"
RECURRENT = "recurrent layers run one micro-batch after another, and not over packed sequences"
BACKWARD = "operators of the backward pass are placed where their neighbours are"
OPERATORS = "operators of other libraries that give no shapes cannot be called by name"
MEMORY = "every model that is wrapped leaves 0.1 MB of text behind"
COMPILER = "programs run on the reference backend, without compiled code"
KEPT_CODE = "compiled code is not kept for later processes"
QUICK = "compiling takes longer"
UNREAD = "capturing takes longer"
LINES = "errors and stages do not name the lines of forward that operators come from"
GROUPED = "products of groups (mixtures of experts) are captured in bfloat16 only"
INTERPRETED = "calls before optimised code is there take longer with Adam and AdamW"
NESTED = "models with parts that torch.compile has compiled cannot be captured"
CHECKPOINTS = "torch.utils.checkpoint in a model computes wrong gradients"
JOBS = "processes that met before the model was wrapped cannot train it together"

# By what does not work without them; ``module:attribute``.
_NAMES = {
    CAPTURE: (
        "torch._subclasses.fake_tensor:FakeTensorMode",
        "torch._subclasses.fake_tensor:DataDependentOutputException",
        "torch._subclasses.fake_tensor:DynamicOutputShapeException",
        "torch.fx.experimental.proxy_tensor:make_fx",
        "torch.fx.experimental.proxy_tensor:disable_proxy_modes_tracing",
        "torch.fx.experimental.proxy_tensor:get_proxy_mode",
        "torch.fx.experimental.proxy_tensor:get_proxy_slot",
        "torch.fx.experimental.proxy_tensor:has_proxy_slot",
        "torch.fx.experimental.symbolic_shapes:ShapeEnv",
        "torch.utils._python_dispatch:TorchDispatchMode",
        "torch.utils._python_dispatch:_disable_current_modes",
        "torch._C:_functorch.is_batchedtensor",
        "torch._C:_functorch.get_unwrapped",
        "torch._C:_functorch.is_functorch_wrapped_tensor",
        "torch._decomp.decompositions:native_batch_norm_decomposition",
    ),
    CONTROL_FLOW: (
        "torch._higher_order_ops.while_loop:while_loop_op",
        "torch._higher_order_ops.cond:cond_op",
    ),
    RECURRENT: (
        "torch._decomp.decompositions:lstm_impl",
        "torch._decomp.decompositions:gru_impl",
        "torch._decomp.decompositions:rnn_tanh_input",
        "torch._decomp.decompositions:rnn_relu_input",
        "torch._decomp.decompositions:lstm_data_impl",
        "torch._decomp.decompositions:gru_impl_data",
        "torch._decomp.decompositions:rnn_tanh_data",
        "torch._decomp.decompositions:rnn_relu_data",
        "torch._C:_VariableFunctions._pack_padded_sequence",
        "torch._C:_VariableFunctions._pad_packed_sequence",
    ),
    BACKWARD: ("torch._functorch._aot_autograd.logging_utils:setup_stacktrace_preservation_hooks",),
    OPERATORS: ("torch._subclasses.fake_tensor:UnsupportedOperatorException",),
    MEMORY: ("torch.fx.graph_module:_loader",),
    UNREAD: (
        "torch.fx._lazy_graph_module:_get_graph_module_cls",
        "torch.fx._lazy_graph_module:_use_lazy_graph_module",
    ),
    LINES: ("torch.fx.proxy:TracerBase.create_node",),
    GROUPED: ("torch:_grouped_mm",),
    INTERPRETED: ("torch:_fused_adamw_",),
    NESTED: ("torch._dynamo.config:patch",),
    CHECKPOINTS: ("torch.utils.checkpoint:_checkpoint_without_reentrant_generator",),
    JOBS: ("torch.distributed.distributed_c10d:_get_default_store",),
    COMPILER: (
        "torch._functorch.compile_utils:fx_graph_cse",
        "torch._guards:TracingContext",
        "torch._guards:tracing",
        "torch._inductor:config",
        "torch._inductor.compile_fx:compile_fx_inner",
        "torch._inductor.custom_graph_pass:CustomGraphPass",
        "torch._inductor.custom_graph_pass:CustomSchedulerPass",
        "torch._inductor.decomposition:select_decomp_table",
        "torch._inductor.dependencies:StarDep",
        "torch._inductor.dependencies:WeakDep",
        "torch._inductor.exc:CppCompileError",
        "torch._inductor.fx_passes.joint_graph:joint_graph_passes",
        "torch._inductor.ir:ExternKernel",
        "torch._inductor.ir:FixedLayout",
        "torch._inductor.ir:PermuteView",
        "torch._inductor.ir:TensorBox",
        "torch._inductor.lowering:lowerings",
        "torch._inductor.lowering:register_lowering",
        "torch._inductor.mkldnn_ir:LinearUnary",
        "torch._inductor.mkldnn_ir:_create_output_node",
        "torch._inductor.virtualized:V",
        "torch.utils._ordered_set:OrderedSet",
    ),
    KEPT_CODE: (
        "torch._C:_aoti.alloc_tensors_by_stealing_from_void_ptrs",
        "torch._C:_aoti.unsafe_alloc_void_ptrs_from_tensors",
        "torch._C:_dynamo.guards._torchinductor_pyobject_tensor_data_ptr",
    ),
    QUICK: (
        "torch._inductor.codegen.common:DtypePropagationOpsHandler",
        "torch._inductor.codegen.cpp:stride_at_vec_range",
        "torch._inductor.codecache:_worker_compile_cpp",
        "torch._inductor.codecache:write",
        "torch._inductor.cpp_builder:run_compile_cmd",
        "torch._inductor.cpu_vec_isa:VecISA.check_build",
    ),
}
ROWS = {path.replace(":", ".").rpartition(".")[2].lstrip("_"): (path, lost)
        for lost, paths in _NAMES.items() for path in paths}  # fmt: skip

# What a name was called in the oldest releases that are supported.
_EARLIER = {"CustomSchedulerPass": "torch._inductor.custom_graph_pass:CustomGraphPass"}

# Private attributes of torch's values, which have no name to look up.
ATTRIBUTES = {
    "_schema": "of an operator: whether it writes, and whether results share memory",
    "_backward_hooks": "of a tensor: what changes its gradient",
    "_cdata": "of a storage: whether two tensors share it",
    "_check_input_dim": "of a batch norm: which shapes it takes",
    "_forward_hooks": "of a module: what it calls with its results",
    "_forward_pre_hooks": "of a module: the blocks that it begins, and what else it calls before",
    "_get_name": "of a module: what its class calls itself",
    "_modules": "of a module: its layers by name",
    "_opt_called": "of an optimizer: that a step was done, for learning rate schedules",
    "_optimizer_step_post_hooks": "of an optimizer: what it would call after a step",
    "_optimizer_step_pre_hooks": "of an optimizer: what it would call before a step",
    "_post_accumulate_grad_hooks": "of a tensor: what reads its whole gradient",
    "_validate_args": "of distributions: whether values are looked at",
}


class Gone(Error):  # noqa: N818 (as for every Error here)
    """A name that this release of torch does not have."""

    __module__ = "poptorch"


def __getattr__(name: str) -> Any:
    if name not in ROWS:
        raise AttributeError(name)
    path, lost = ROWS[name]
    try:
        return _resolve(path)
    except (ImportError, AttributeError) as error:
        with contextlib.suppress(ImportError, AttributeError, KeyError):
            return _resolve(_EARLIER[name])
        raise Gone(
            f"torch {torch.__version__} has no {path.replace(':', '.')}",
            got=f"{error}; without it {lost}",
            fix="install a release of torch that this release of poptorch names in its metadata",
        ) from error


def _resolve(path: str) -> Any:
    module, _, attributes = path.partition(":")
    return functools.reduce(getattr, attributes.split("."), importlib.import_module(module))


def demand(lost: str) -> None:
    """Look up all names of a subject.

    Args:
        lost: what does not work without them.

    Raises:
        Gone: one of them is missing.
    """
    for name, (_, row_lost) in ROWS.items():
        if row_lost == lost:
            __getattr__(name)


@contextlib.contextmanager
def standing_in(stand_ins: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Within the block torch calls other functions in the place of some of its own.

    A function that is gone, or takes other arguments than the stand-in does, is left alone, with a
    warning.

    Args:
        stand_ins: by the name of a function in the table, what takes its place; its first argument
            is torch's function, then come those of the call.
    """
    with contextlib.ExitStack() as stack:
        for name, stand_in in stand_ins.items():
            path, lost = ROWS[name]
            try:
                usual = __getattr__(name)
            except Gone as gone:
                go_on_without(gone)
                continue
            if not _take_the_same(stand_in, usual):
                _warn(f"torch {torch.__version__} calls {path} in another way; {lost}")
                continue
            stack.enter_context(_replaced(path, usual, stand_in))
        yield


@contextlib.contextmanager
def _replaced(path: str, usual: Any, stand_in: Callable[..., Any]) -> Iterator[None]:
    module, _, attributes = path.partition(":")
    *owners, name = attributes.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))

    @functools.wraps(usual)
    def function(*arguments: Any, **options: Any) -> Any:
        return stand_in(usual, *arguments, **options)

    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, usual)


def _take_the_same(stand_in: Callable[..., Any], usual: Callable[..., Any]) -> bool:
    _, *names = inspect.signature(stand_in).parameters
    return names == list(inspect.signature(usual).parameters)


def go_on_without(gone: Gone) -> None:
    """Say what does not work from now on; once for each name."""
    _warn(gone.message)


@functools.cache
def _warn(message: str) -> None:
    log.python.warning("%s", message)


def calling(f: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    """Return what calls a compiled library, on a list of tensors that it empties.

    This is, to the instruction, the function that torch generates around the library of a graph
    without constants or other particularities; see ``backends/inductor/library.py``.

    Args:
        f: the library's entry, from handles of tensors to handles of results.
    """

    # fmt: off
    def g(args):  # type: ignore[no-untyped-def]
        input_tensors = [arg if isinstance(arg, torch.Tensor) else torch.tensor(arg, device="cpu") for arg in args]  # noqa: E501
        input_handles = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(input_tensors)
        args.clear()
        del input_tensors
        output_handles = f(input_handles)
        output_tensors = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs(output_handles)
        return output_tensors
    # fmt: on

    return g
