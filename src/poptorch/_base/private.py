"""Torch's private names, one row each, looked up when used: ``private.make_fx`` is torch's.

Without a required name nothing is captured, or nothing compiled; an optional one costs only what
stands beside it. A name that is gone never fails an import.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from . import log
from .errors import Error

COMPILER = "programs run on the reference backend, without compiled code"

# By what does not work without them; ``module:attribute``.
REQUIRED = {
    "no model can be captured": (
        "torch._subclasses.fake_tensor:FakeTensorMode",
        "torch.fx.experimental.proxy_tensor:make_fx",
        "torch.fx.experimental.proxy_tensor:disable_proxy_modes_tracing",
        "torch.fx.experimental.proxy_tensor:get_proxy_mode",
        "torch.fx.experimental.proxy_tensor:get_proxy_slot",
        "torch.fx.experimental.symbolic_shapes:ShapeEnv",
        "torch.utils._python_dispatch:TorchDispatchMode",
        "torch._C:_functorch.is_batchedtensor",
        "torch._C:_functorch.get_unwrapped",
        "torch._decomp.decompositions:native_batch_norm_decomposition",
    ),
    COMPILER: (
        "torch._guards:TracingContext",
        "torch._guards:tracing",
        "torch._inductor.compile_fx:compile_fx_inner",
        "torch._inductor.config:_pre_fusion_custom_pass",
        "torch._inductor.config:fallback_random",
        "torch._inductor.config:post_grad_custom_post_pass",
        "torch._inductor.decomposition:select_decomp_table",
        "torch._inductor.scheduler:SchedulerNode.recompute_size_and_body",
        "torch._inductor.scheduler:SchedulerNode.set_read_writes",
        "torch._inductor.virtualized:V",
    ),
}

BACKWARD = "operators of the backward pass are placed where their neighbours are"
LINES = "errors and stages do not name the lines of forward that operators come from"
OPERATORS = "operators of other libraries that give no shapes cannot be called by name"
BESIDE = "weights cannot be read while a model is captured"
GROUPED = "products of groups (mixtures of experts) are captured in bfloat16 only"
INTERPRETED = "calls before optimised code is there take longer"
NESTED = "models with parts that torch.compile has compiled cannot be captured"
CHECKPOINTS = "models with torch.utils.checkpoint cannot be captured"
JOBS = "processes that met before the model was wrapped cannot train it together"
KEPT_CODE = "compiled code is not kept for later processes"
PRODUCTS = "products call the library that torch asks, on AMD's processors too"

OPTIONAL = {
    "poptorch.for_loop and poptorch.cond cannot be captured": (
        "torch._higher_order_ops.while_loop:while_loop_op",
        "torch._higher_order_ops.cond:cond_op",
    ),
    "errors about values that are read while capturing are torch's own": (
        "torch._subclasses.fake_tensor:DataDependentOutputException",
        "torch._subclasses.fake_tensor:DynamicOutputShapeException",
    ),
    "recurrent layers do not run over packed sequences": (
        "torch._decomp.decompositions:lstm_data_impl",
        "torch._decomp.decompositions:gru_impl_data",
        "torch._decomp.decompositions:rnn_tanh_data",
        "torch._decomp.decompositions:rnn_relu_data",
        "torch._C:_VariableFunctions._pack_padded_sequence",
        "torch._C:_VariableFunctions._pad_packed_sequence",
    ),
    "operators that torch cannot run on several micro-batches at once are unrolled": (
        "torch._C:_functorch._is_vmap_fallback_enabled",
        "torch._C:_functorch._set_vmap_fallback_enabled",
    ),
    BACKWARD: ("torch._functorch._aot_autograd.logging_utils:setup_stacktrace_preservation_hooks",),
    OPERATORS: ("torch._subclasses.fake_tensor:UnsupportedOperatorException",),
    BESIDE: ("torch.utils._python_dispatch:_disable_current_modes",),
    "every model that is wrapped leaves 0.1 MB of text behind": ("torch.fx.graph_module:_loader",),
    "capturing takes longer": (
        "torch.fx._lazy_graph_module:_get_graph_module_cls",
        "torch.fx._lazy_graph_module:_use_lazy_graph_module",
    ),
    LINES: ("torch.fx.proxy:TracerBase.create_node",),
    GROUPED: ("torch:_grouped_mm",),
    INTERPRETED: (
        "torch:_fused_adamw_",
        "torch:_foreach_add_",
        "torch:_foreach_addcmul_",
        "torch:_foreach_mul_",
        "torch._C:_AutoDispatchBelowAutograd",
    ),
    NESTED: ("torch._dynamo.config:error_on_nested_fx_trace",),
    CHECKPOINTS: ("torch.utils.checkpoint:_checkpoint_without_reentrant_generator_impl",),
    JOBS: ("torch.distributed.distributed_c10d:_get_default_store",),
    KEPT_CODE: (
        "torch._C:_aoti.alloc_tensors_by_stealing_from_void_ptrs",
        "torch._C:_aoti.unsafe_alloc_void_ptrs_from_tensors",
        "torch._C:_dynamo.guards._torchinductor_pyobject_tensor_data_ptr",
    ),
    "a C++ compiler's complaint is not cut short": ("torch._inductor.exc:CppCompileError",),
    PRODUCTS: (
        "torch._inductor.ir:ExternKernel",
        "torch._inductor.ir:FixedLayout",
        "torch._inductor.ir:PermuteView",
        "torch._inductor.ir:TensorBox",
        "torch._inductor.lowering:lowerings",
        "torch._inductor.lowering:register_lowering",
        "torch._inductor.mkldnn_ir:LinearUnary",
        "torch._inductor.mkldnn_ir:_create_output_node",
    ),
    "compiled code takes longer": (
        "torch._functorch.compile_utils:fx_graph_cse",
        "torch._inductor.config:layout_optimization",
        "torch._inductor.config:reorder_for_locality",
        "torch._inductor.config:reorder_for_peak_memory",
        "torch._inductor.fx_passes.joint_graph:joint_graph_passes",
    ),
    "compiling takes longer": (
        "torch._inductor.config:cpp.vec_isa_ok",
        "torch._inductor.config:cpp_cache_precompile_headers",
        "torch._inductor.config:cpp_wrapper",
        "torch._inductor.config:cpp_wrapper_build_separate",
        "torch._inductor.config:fx_graph_cache",
        "torch._inductor.async_compile:AsyncCompile.cpp_pybinding",
        "torch._inductor.async_compile:get_compile_threads",
        "torch._inductor.codecache:CppPythonBindingsCodeCache",
        "torch._inductor.codecache:CppWrapperCodeCache.load_pybinding_async",
        "torch._inductor.codecache:LambdaFuture",
        "torch._inductor.codecache:_worker_compile_cpp",
        "torch._inductor.codegen.common:DtypePropagationOpsHandler",
        "torch._inductor.codegen.cpp:stride_at_vec_range",
        "torch._inductor.codegen.cpp_wrapper_cpu:CppWrapperCpu._write_entry_point_signature",
        "torch._inductor.cpu_vec_isa:VecISA.check_build",
        "torch._inductor.fx_passes.joint_graph:lazy_init",
        "torch._inductor.sizevars:SizeVarAllocator._simplify_with_ranges",
    ),
}
# What a name was called in the oldest releases that are supported.
FORMER = {
    "torch.utils.checkpoint:_checkpoint_without_reentrant_generator_impl":
        "torch.utils.checkpoint:_checkpoint_without_reentrant_generator",  # torch 2.13
}  # fmt: skip
ROWS = {path.replace(":", ".").rpartition(".")[2].lstrip("_"): (path, lost)
        for lost, paths in (REQUIRED | OPTIONAL).items() for path in paths}  # fmt: skip

# Attributes of torch's values, which have no name to look up: private ones, and what else is
# nobody's contract.
ATTRIBUTES = {
    "_schema": "of an operator: whether it writes, and whether results share memory",
    "_backward_hooks": "of a tensor or module: what changes its gradient",
    "_backward_pre_hooks": "of a module: what changes the gradient of its results",
    "_cdata": "of a storage: whether two tensors share it",
    "_cflags_args": "of what builds a C++ source: its options",
    "_check_input_dim": "of a batch norm: which shapes it takes",
    "_forward_hooks": "of a module: what it calls with its results",
    "_forward_pre_hooks": "of a module: the blocks that it begins, and what else it calls before",
    "_compiler": "of what builds a C++ source: its command",
    "_get_name": "of a module: what its class calls itself",
    "_include_dirs_args": "of what builds a C++ source: folders of headers",
    "_libraries_args": "of what builds a C++ source: what is linked",
    "_modules": "of a module: its layers by name",
    "_op": "of an operator: what it calls, without a Python function between",
    "_opt_called": "of an optimizer: that a step was done, for learning rate schedules",
    "_optimizer_step_post_hooks": "of an optimizer: what it would call after a step",
    "_optimizer_step_pre_hooks": "of an optimizer: what it would call before a step",
    "_post_accumulate_grad_hooks": "of a tensor: what reads its whole gradient",
    "_sources_args": "of what builds a C++ source: where that is",
    "_version": "of a tensor: how often it was written",
}
UNDOCUMENTED = {
    "current_callable": "of a compiled graph: the function around its library",
    "eval_cache": "of torch.fx's loader: the text of all graphs",
    "mutation_renames": "of a scheduler's node: names of what was written into",
    "load_async": "of a cache of C++ code: what compiles a source",
    "suffix_template": "of a cache of C++ code: what Python calls it by",
    "read_writes": "of a scheduler's node: what it depends on",
    "_validate_args": "of distributions: whether values are looked at",
    "user_visible_output_idxs": "of an output node: which values keep their strides",
}


_said = set[str]()  # first lines of warnings


class Gone(Error):  # noqa: N818 (as for every Error here)
    """A name that this release of torch does not have."""


def __getattr__(name: str) -> Any:
    if name not in ROWS:
        raise AttributeError(name)
    path, lost = ROWS[name]
    try:
        return pkgutil.resolve_name(_path_here(path))
    except (ImportError, AttributeError) as error:
        raise Gone(
            f"torch {torch.__version__} has no {path.replace(':', '.')}",
            got=f"{error}; without it {lost}",
            fix="install a release of torch that this release of poptorch names in its metadata",
        ) from error


def _path_here(path: str) -> str:
    """Return where a name is in this release of torch, if only its former place is there."""
    if path not in FORMER:
        return path
    try:
        pkgutil.resolve_name(path)
    except AttributeError:
        return FORMER[path]
    return path


def demand(lost: str) -> None:
    for name, (_, without_it) in ROWS.items():
        if without_it == lost:
            __getattr__(name)


def has(lost: str) -> bool:
    try:
        demand(lost)
    except Gone as gone:
        go_on_without(gone)
        return False
    return True


def optional(name: str) -> Any:
    try:
        return __getattr__(name)
    except Gone as gone:
        go_on_without(gone)
        return None


def go_on_without(gone: Gone) -> None:
    _warn(gone.message)


def _warn(message: str) -> None:
    first = message.partition("\n")[0]
    if first not in _said:
        _said.add(first)
        log.python.warning("%s", message)


def traced(
    function: Callable[..., Any],
    inputs: Any,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
    **options: Any,
) -> Any:
    make_fx = __getattr__("make_fx")
    return make_fx(
        function, dict(decompositions or {}), "real", _allow_non_fake_inputs=True, **options
    )(*inputs)


@contextlib.contextmanager
def settings(wanted: Mapping[str, Any]) -> Iterator[None]:
    """Change settings of torch's compilers, by names of rows; optional ones may be gone."""
    with contextlib.ExitStack() as stack:
        for name, value in wanted.items():
            path, lost = ROWS[name]
            module, _, key = path.partition(":")
            try:
                __getattr__(name)
            except Gone as gone:
                if lost in REQUIRED:
                    raise
                go_on_without(gone)
                continue
            stack.enter_context(pkgutil.resolve_name(module).patch({key: value}))
        yield


@contextlib.contextmanager
def standing_in(stand_ins: Mapping[str, Callable[..., Any]]) -> Iterator[set[str]]:
    """Let stand-ins take the place of torch's functions, unless these are gone or changed.

    A stand-in that takes any arguments names those that it reads, which come first.

    Yields:
        The names whose stand-ins are there.
    """
    standing = set[str]()
    with contextlib.ExitStack() as stack:
        for name, stand_in in stand_ins.items():
            path, lost = ROWS[name]
            usual = optional(name)
            if usual is None:
                continue
            if not _takes(stand_in, list(inspect.signature(usual).parameters)):
                _warn(f"torch {torch.__version__} calls {path} in another way; {lost}")
                continue
            module, _, attributes = _path_here(path).partition(":")
            owners, _, attribute = attributes.rpartition(".")
            owner = pkgutil.resolve_name(f"{module}:{owners}")
            stack.enter_context(replaced(owner, attribute, stand_in))
            standing.add(name)
        yield standing


def _takes(stand_in: Callable[..., Any], names: list[str]) -> bool:
    _, *own = inspect.signature(stand_in).parameters.values()
    read = [each.name for each in own if each.kind is each.POSITIONAL_OR_KEYWORD]
    return names[: len(read)] == read and (len(read) < len(own) or len(names) == len(read))


@contextlib.contextmanager
def replaced(owner: Any, name: str, stand_in: Callable[..., Any]) -> Iterator[None]:
    """Let a stand-in take the place of a function or method, which it gets as first argument."""
    usual = getattr(owner, name)

    @functools.wraps(usual)
    def function(*arguments: Any, **options: Any) -> Any:
        return stand_in(usual, *arguments, **options)

    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, usual)
