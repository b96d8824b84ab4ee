"""Torch's private names, where each was seen; one that is gone costs a warning, never an import."""

import functools
import logging
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributions import Distribution
from torch.optim import Adam
from torch.utils.checkpoint import checkpoint

import poptorch
from helpers import programs
from helpers.cases import long
from helpers.wrapping import Having, infer, normal, options, runs_compiled, training
from poptorch._base import private
from poptorch._capture import replaced_functions
from poptorch._compile import cache as code
from poptorch._compile import tiers
from poptorch._cpu import Inductor, compile_speedups, compiled_code

VERSION = f"torch {torch.__version__} has no torch."


def name_of(path: str) -> str:
    return next(name for name, (of_row, _) in private.ROWS.items() if of_row == path)


def lost_without(name: str) -> str:
    return private.ROWS[name][1]


REQUIRED, OPTIONAL = (
    {lost: [name_of(path) for path in paths] for lost, paths in table.items()}
    for table in (private.REQUIRED, private.OPTIONAL)
)
IN_COMPILER = (
    private.KEPT_CODE,
    private.PRODUCTS,
    lost_without("CppCompileError"),
    lost_without("layout_optimization"),
    lost_without("vec_isa_ok"),
)


def remove(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a name be gone, as after torch has renamed it and all its own uses."""
    path, lost = private.ROWS[name]
    monkeypatch.setitem(private.ROWS, name, (f"{path}_renamed", lost))


@pytest.fixture(autouse=True)
def _warnings_are_repeated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    private._warned_about.clear()
    replaced_functions.substitutes.cache_clear()
    yield
    replaced_functions.substitutes.cache_clear()


def net() -> Having:
    """Return a model with batch norm and a recurrent layer."""

    def forward(
        model: Having, x: torch.Tensor, y: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = model.norm(model.rnn(x)[0][:, -1])
        return out, torch.nn.functional.mse_loss(out, y)

    return Having(forward, rnn=torch.nn.GRU(3, 4, batch_first=True), norm=torch.nn.BatchNorm1d(4))


def small() -> Having:
    """Compiles soon, has a product that oneDNN may compute and draws numbers."""

    def forward(model: Having, x: torch.Tensor, y: torch.Tensor) -> Any:
        out = torch.nn.functional.dropout(model.layer(x), 0.1).relu()[:, -1]
        return out, torch.nn.functional.mse_loss(out, y)

    return Having(forward, layer=torch.nn.Linear(3, 4))


def losses(make: Callable[..., Any], backend: str = "reference") -> torch.Tensor:
    """Train a little with lanes."""
    torch.manual_seed(0)
    model = make()
    optimizer = (torch.optim.Adam if make is net else torch.optim.SGD)(model.parameters(), lr=0.1)
    opts = options(accumulation=2).backend(backend).randomSeed(1)
    training = poptorch.trainingModel(model, opts, optimizer)
    taken = torch.stack([training(normal(8, 2, 3), normal(8, 4))[1] for _ in range(2)])
    assert runs_compiled(training) == (backend != "reference")
    return taken


usual = functools.cache(losses)  # with all names
IMPORT = """
import importlib
usual = importlib.import_module
def without_torchs(name, *rest):
    if name.startswith("torch."):
        raise ImportError(f"No module named {name!r}")
    return usual(name, *rest)
importlib.import_module = without_torchs
import torch, poptorch
model = poptorch.inferenceModel(torch.nn.Linear(1, 1))
try:
    model(torch.ones(1, 1))
except poptorch.Error as error:
    print(error.message)
"""


@pytest.mark.slow
def test_importing_needs_no_private_name() -> None:
    done = programs.run("-W", "error", "-c", IMPORT)
    assert done.returncode == 0, done.stderr
    assert VERSION in done.stdout


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """C++ that is the same is compiled once."""
    return tmp_path_factory.mktemp("torch")


ELSEWHERE = (private.COMPILER, lost_without("while_loop_op"))  # a test of their own, below
_REPORTED = (
    "setup_stacktrace_preservation_hooks loader get_graph_module_cls create_node "
    "engine_run_backward"
)
ALWAYS_REPORTED = set(map(lost_without, _REPORTED.split()))
ALONE = [n for lost, names in (REQUIRED | OPTIONAL).items() for n in names if lost not in ELSEWHERE]
IN_CAPTURE = [name for name in ALONE if lost_without(name) not in (*REQUIRED, *IN_COMPILER)]
TOGETHER = [name for lost in IN_COMPILER[:-1] for name in OPTIONAL[lost]]  # the last are settings


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [["FakeTensorMode"], IN_CAPTURE, TOGETHER, *(long([name]) for name in ALONE)],
    ids=lambda names: names[0] if len(names) == 1 else f"{len(names)} names",
)
def test_training_without_a_private_name_warns_or_is_refused(
    names: list[str], cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The usual numbers and warnings of what is lost, or an error with the version."""
    lost = {lost_without(name) for name in names}
    model, backend = net, "reference"
    if lost <= set(IN_COMPILER):
        model, backend = small, "optimise"
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
        monkeypatch.setattr(tiers._cores, "idle", lambda: 0.0)  # in this process
    expected = usual(model)
    for name in names:
        remove(name, monkeypatch)
    monkeypatch.setattr(code, "_loaded", {})
    monkeypatch.setattr(code.Store, "read", lambda self, key: None)
    refusal = ""
    try:
        torch.testing.assert_close(losses(model, backend), expected)
    except poptorch.Error as error:
        refusal = error.message
    assert not refusal or (lost <= set(REQUIRED) and VERSION in refusal and "Fix:" in refusal)
    warnings = [r.message for r in caplog.records if r.name == "poptorch::python"]
    assert len(warnings) <= len(names)
    assert all(VERSION in text and any(each in text for each in lost) for text in warnings)
    assert all(any(each in text for text in warnings) for each in lost & ALWAYS_REPORTED)


torch.library.define("without_shapes::plain", "(Tensor x) -> Tensor")
torch.library.impl("without_shapes::plain", "cpu", lambda x: x * 2)


@pytest.mark.parametrize(
    "name, function",
    [
        ("while_loop_op", lambda x: poptorch.for_loop(3, lambda x: x * 2, [x])[0]),
        ("cond_op", lambda x: poptorch.cond(x.sum() > 0, lambda: x * 2, [], lambda: x, [])[0]),
        (
            "UnsupportedOperatorException",
            lambda x: poptorch.custom_op([x], "plain", "without_shapes", 1, [x])[0],
        ),
    ],
)
def test_operators_without_their_private_name_are_refused(
    name: str, function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    remove(name, monkeypatch)
    with pytest.raises(poptorch.Error, match="has no torch") as caught:
        infer(function, torch.ones(2))
    assert lost_without(name) in caught.value.message


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, use",
    [
        *((name, lambda: Inductor().build(None)) for name in REQUIRED[private.COMPILER]),
        *((name, lambda: compiled_code.load(b"")) for name in OPTIONAL[private.KEPT_CODE]),
    ],
)
def test_compiling_and_loading_code_without_a_private_name_is_refused(
    name: str, use: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    remove(name, monkeypatch)
    with pytest.raises(private.MissingName, match="has no torch"):
        use()


@pytest.mark.slow
@pytest.mark.compiling_fails
@pytest.mark.parametrize("backend", ["optimise", "inductor"])
def test_the_interpreter_takes_the_place_of_compiled_code(
    backend: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    remove(REQUIRED[private.COMPILER][0], monkeypatch)
    monkeypatch.setattr(code, "_loaded", {})
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model = poptorch.inferenceModel(torch.nn.Linear(4, 2), options().backend(backend))
    x = normal(3, 4)
    torch.testing.assert_close(model(x), model.model(x))
    assert not runs_compiled(model)
    (warning,) = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert VERSION in warning


def test_settings_that_torch_removed_are_left_out_unless_they_are_needed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import torch._inductor.config as config

    for name in ("reorder_for_locality", "vec_isa_ok", "fallback_random"):
        remove(name, monkeypatch)
    with private.settings({"reorder_for_locality": "other", "cpp_wrapper": "another"}):
        assert config.cpp_wrapper == "another"
        assert config.reorder_for_locality != "other"
    assert config.cpp_wrapper != "another"
    assert lost_without("layout_optimization") in caplog.text
    with pytest.raises(private.MissingName, match="fallback_random"):
        private.settings({"fallback_random": True}).__enter__()


@pytest.mark.parametrize("way", ["there", "gone", "other arguments"])
def test_a_replacement_exists_only_within_the_block(
    way: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usual, asked = private.check_build, []

    def replacement(usual: Callable[..., Any], self, code: str) -> None:
        asked.append((usual, self, code))

    if way == "gone":
        remove("check_build", monkeypatch)
    function = (lambda usual, self, source: None) if way == "other arguments" else replacement
    with pytest.raises(KeyError), private.replacing({"check_build": function}):
        now = pkgutil.resolve_name("torch._inductor.cpu_vec_isa:VecISA.check_build")
        if way == "there":
            now("isa", code="text")
        assert (now is usual) == (way != "there")
        raise KeyError
    assert asked == ([(usual, "isa", "text")] if way == "there" else [])
    assert pkgutil.resolve_name("torch._inductor.cpu_vec_isa:VecISA.check_build") is usual
    warnings = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert ["check_build" in text for text in warnings] == [True] * (way != "there")
    assert all(lost_without("vec_isa_ok") in text for text in warnings)


RELEASES = ("2.13.0", "2.14.1", "2.15.0")
IN_ALL = """
torch: _foreach_add_ _foreach_addcmul_ _foreach_mul_ _fused_adamw_ _grouped_mm
torch: ops.mkldnn._convolution_pointwise ops.mkldnn._linear_pointwise
torch: ops.mkldnn._reorder_convolution_weight ops.mkldnn._reorder_linear_weight
torch._C: _VariableFunctions._pack_padded_sequence _VariableFunctions._pad_packed_sequence
torch._C: _aoti.alloc_tensors_by_stealing_from_void_ptrs _aoti.unsafe_alloc_void_ptrs_from_tensors
torch._C: _dynamo.guards._torchinductor_pyobject_tensor_data_ptr _functorch.get_unwrapped
torch._C: _functorch.is_batchedtensor
torch._C: _functorch._is_vmap_fallback_enabled _functorch._set_vmap_fallback_enabled
torch._C: _AutoDispatchBelowAutograd _is_any_autocast_enabled _is_torch_function_enabled
torch._C: _set_grad_enabled
torch._C: _dynamo.guards.TensorGuards _swap_tensor_impl
torch._C: _DisableTorchDispatch DisableTorchFunction ScriptMethod TensorBase._make_subclass
torch._C: TensorBase._make_wrapper_subclass
torch._C: _set_throw_on_mutable_data_ptr
torch._decomp.decompositions: gru_impl_data lstm_data_impl native_batch_norm_decomposition
torch._decomp.decompositions: rnn_relu_data rnn_tanh_data
torch._dispatch.python: enable_python_dispatcher
torch._dynamo.config: error_on_nested_fx_trace
torch._functorch._aot_autograd.logging_utils: setup_stacktrace_preservation_hooks
torch._functorch.compile_utils: fx_graph_cse
torch._functorch.eager_transforms: _wrap_tensor_for_grad
torch._functorch.vmap: _create_batched_inputs
torch._guards: Source TracingContext tracing
torch.autograd: _engine_run_backward
torch._higher_order_ops.cond: cond_op
torch._higher_order_ops.flex_attention: math_attention
torch._higher_order_ops.while_loop: while_loop_op
torch._inductor.async_compile: AsyncCompile.cpp_pybinding get_compile_threads
torch._inductor.codecache: CppPythonBindingsCodeCache LambdaFuture _worker_compile_cpp
torch._inductor.codecache: CppWrapperCodeCache.load_pybinding_async
torch._inductor.codegen.common: DtypePropagationOpsHandler
torch._inductor.codegen.common: KernelTemplate._template_from_string
torch._inductor.codegen.cpp: CppKernel.need_use_acc_helper CppScheduling.try_loop_split
torch._inductor.codegen.cpp: stride_at_vec_range
torch._inductor.codegen.cpp_wrapper_cpu: CppWrapperCpu._write_entry_point_signature
torch._inductor.compile_fx: compile_fx_inner
torch._inductor.config: _pre_fusion_custom_pass cpp.vec_isa_ok cpp_cache_precompile_headers
torch._inductor.config: cpp_wrapper cpp_wrapper_build_separate fallback_random fx_graph_cache
torch._inductor.config: emulate_precision_casts layout_optimization post_grad_custom_post_pass
torch._inductor.config: reorder_for_locality reorder_for_peak_memory size_asserts
torch._inductor.cpp_builder: _get_torch_related_args get_cpp_torch_device_options
torch._inductor.cpu_vec_isa: VecISA.check_build
torch._inductor.decomposition: select_decomp_table
torch._inductor.exc: CppCompileError
torch._inductor.fx_passes.joint_graph: joint_graph_passes lazy_init
torch._inductor.fx_utils: FakeTensorUpdater.incremental_update
torch._inductor.graph: make_fallback
torch._inductor.ir: ExternKernel FixedLayout PermuteView TensorBox
torch._inductor.lowering: lowerings register_lowering
torch._inductor.mkldnn_ir: LinearUnary _create_output_node
torch._inductor.scheduler: SchedulerNode.codegen SchedulerNode.recompute_size_and_body
torch._inductor.scheduler: SchedulerNode.set_read_writes
torch._inductor.sizevars: SizeVarAllocator._simplify_with_ranges SizeVarAllocator.simplify
torch._inductor.virtualized: V
torch._subclasses.fake_tensor: DataDependentOutputException DynamicOutputShapeException
torch._subclasses.fake_tensor: FakeTensor FakeTensorMode UnsupportedOperatorException
torch._subclasses.fake_tensor: in_kernel_invocation_manager
torch.autograd.grad_mode: _unsafe_preserve_version_counter
torch.distributed.distributed_c10d: _get_default_store
torch.fx._lazy_graph_module: _get_graph_module_cls _use_lazy_graph_module
torch.fx.experimental.proxy_tensor: disable_proxy_modes_tracing get_proxy_mode get_proxy_slot
torch.fx.experimental.proxy_tensor: make_fx proxy_call set_proxy_slot track_tensor
torch.fx.experimental.symbolic_shapes: DimDynamic ShapeEnv
torch.fx.graph_module: _loader
torch.fx.proxy: TracerBase.create_node
torch.nn.modules.module: _global_backward_hooks _global_backward_pre_hooks
torch.nn.modules.module: _global_forward_hooks _global_forward_pre_hooks
torch.random: _manual_seed_impl
torch.utils._sympy.functions: FloorDiv Max ModularIndexing
torch.fx.passes.shape_prop: _extract_tensor_metadata
torch.utils._sympy.interp: sympy_interp
torch.utils._sympy.reference: PythonReferenceAnalysis
torch.utils._sympy.value_ranges: ValueRanges.tighten
torch.utils._python_dispatch: TorchDispatchMode _disable_current_modes
torch.utils.checkpoint: _checkpoint_without_reentrant_generator
"""
SEEN = {
    f"{module}:{name}": RELEASES
    for module, _, names in (line.partition(": ") for line in IN_ALL.split("\n") if line)
    for name in names.split()
} | {"torch.utils.checkpoint:_checkpoint_without_reentrant_generator_impl": RELEASES[1:]}
# Attributes of what torch makes; those of compiling are met by the tests that compile.
OF = [
    (lambda: torch.ops.aten.add.Tensor, "_schema"),
    (lambda: torch.ones(1), "_backward_hooks _post_accumulate_grad_hooks _version"),
    (lambda: torch.ones(1).untyped_storage(), "_cdata"),
    (lambda: torch.nn.BatchNorm1d(1), "_check_input_dim _get_name _modules"),
    (lambda: torch.nn.BatchNorm1d(1), "_forward_hooks _forward_pre_hooks"),
    (lambda: torch.nn.GRU(1, 1), "_flat_weights"),
    (lambda: Adam([torch.ones(1)]), "_optimizer_step_post_hooks _optimizer_step_pre_hooks"),
    (lambda: Distribution, "_validate_args"),
    (lambda: private.loader, "eval_cache"),
]


def test_every_name_is_listed() -> None:
    assert set(SEEN) == {path for path, _ in private.ROWS.values()} | set(private.FORMER.values())


@pytest.mark.slow
def test_private_names_exist_in_the_releases_where_they_were_found() -> None:
    """In a newer release, the names of the newest tested release must exist."""
    version = torch.__version__.partition("+")[0]
    release = version if version in RELEASES else RELEASES[-1]
    expected = {path for path, releases in SEEN.items() if release in releases}
    assert {path for path in SEEN if _exists(path)} == expected
    assert all(map(private.has, private.REQUIRED | private.OPTIONAL))
    assert [n for make, names in OF for n in names.split() if not hasattr(make(), n)] == []


def _exists(path: str) -> bool:
    try:
        pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        return False
    return True


@pytest.mark.slow
def test_no_replacement_is_called_with_unexpected_arguments(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def forward(model: Having, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(checkpoint(model.layer, x, use_reentrant=False), x)

    monkeypatch.setattr(private, "_warned_about", set())
    model = Having(forward, layer=torch.nn.Linear(2, 2))
    training(model)(normal(2, 2))
    with private.replacing(compile_speedups.replacements()) as replaced_names:
        assert replaced_names == set(compile_speedups.replacements())
    assert [r.message for r in caplog.records if r.levelno >= logging.WARNING] == []
