"""Torch's private names, and in which releases each was seen; a newer one may have lost some."""

import logging
import pkgutil

import pytest
import torch
from torch.distributions import Distribution
from torch.optim import Adam
from torch.utils.checkpoint import checkpoint

from helpers.wrapping import Having, normal, training
from poptorch._base import private
from poptorch.backends.inductor import shortcuts

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
torch._C: _AutoDispatchBelowAutograd
torch._decomp.decompositions: gru_impl_data lstm_data_impl native_batch_norm_decomposition
torch._decomp.decompositions: rnn_relu_data rnn_tanh_data
torch._dynamo.config: error_on_nested_fx_trace
torch._functorch._aot_autograd.logging_utils: setup_stacktrace_preservation_hooks
torch._functorch.compile_utils: fx_graph_cse
torch._guards: TracingContext tracing
torch._higher_order_ops.cond: cond_op
torch._higher_order_ops.while_loop: while_loop_op
torch._inductor.async_compile: AsyncCompile.cpp_pybinding get_compile_threads
torch._inductor.codecache: CppPythonBindingsCodeCache LambdaFuture _worker_compile_cpp
torch._inductor.codecache: CppWrapperCodeCache.load_pybinding_async
torch._inductor.codegen.common: DtypePropagationOpsHandler
torch._inductor.codegen.cpp: stride_at_vec_range
torch._inductor.codegen.cpp_wrapper_cpu: CppWrapperCpu._write_entry_point_signature
torch._inductor.compile_fx: compile_fx_inner
torch._inductor.config: _pre_fusion_custom_pass cpp.vec_isa_ok cpp_cache_precompile_headers
torch._inductor.config: cpp_wrapper cpp_wrapper_build_separate fallback_random fx_graph_cache
torch._inductor.config: layout_optimization post_grad_custom_post_pass reorder_for_locality
torch._inductor.config: reorder_for_peak_memory size_asserts
torch._inductor.cpp_builder: _get_torch_related_args
torch._inductor.cpu_vec_isa: VecISA.check_build
torch._inductor.decomposition: select_decomp_table
torch._inductor.exc: CppCompileError
torch._inductor.fx_passes.joint_graph: joint_graph_passes lazy_init
torch._inductor.ir: ExternKernel FixedLayout PermuteView TensorBox
torch._inductor.lowering: lowerings register_lowering
torch._inductor.mkldnn_ir: LinearUnary _create_output_node
torch._inductor.scheduler: SchedulerNode.recompute_size_and_body SchedulerNode.set_read_writes
torch._inductor.sizevars: SizeVarAllocator._simplify_with_ranges
torch._inductor.virtualized: V
torch._subclasses.fake_tensor: DataDependentOutputException DynamicOutputShapeException
torch._subclasses.fake_tensor: FakeTensorMode UnsupportedOperatorException
torch.distributed.distributed_c10d: _get_default_store
torch.fx._lazy_graph_module: _get_graph_module_cls _use_lazy_graph_module
torch.fx.experimental.proxy_tensor: disable_proxy_modes_tracing get_proxy_mode get_proxy_slot
torch.fx.experimental.proxy_tensor: make_fx
torch.fx.experimental.symbolic_shapes: ShapeEnv
torch.fx.graph_module: _loader
torch.fx.proxy: TracerBase.create_node
torch.utils._sympy.functions: FloorDiv ModularIndexing
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
    (lambda: Adam([torch.ones(1)]), "_optimizer_step_post_hooks _optimizer_step_pre_hooks"),
    (lambda: Distribution, "_validate_args"),
    (lambda: private.loader, "eval_cache"),
]


def test_every_name_is_listed() -> None:
    assert set(SEEN) == {path for path, _ in private.ROWS.values()} | set(private.FORMER.values())


@pytest.mark.slow
def test_names_are_where_they_were_seen() -> None:
    """Those of the newest release that was tried, in one that is newer."""
    version = torch.__version__.partition("+")[0]
    release = version if version in RELEASES else RELEASES[-1]
    wanted = {path for path, releases in SEEN.items() if release in releases}
    assert {path for path in SEEN if _is_there(path)} == wanted
    assert all(map(private.has, private.REQUIRED | private.OPTIONAL))
    assert [n for make, names in OF for n in names.split() if not hasattr(make(), n)] == []


def _is_there(path: str) -> bool:
    try:
        pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        return False
    return True


@pytest.mark.slow
def test_no_stand_in_is_called_in_another_way(monkeypatch, caplog) -> None:
    def forward(model, x):
        return torch.nn.functional.mse_loss(checkpoint(model.layer, x, use_reentrant=False), x)

    monkeypatch.setattr(private, "_said", set())
    model = Having(forward, layer=torch.nn.Linear(2, 2))
    training(model)(normal(2, 2))
    with private.standing_in(shortcuts.stand_ins()) as standing:
        assert standing == set(shortcuts.stand_ins())
    assert [r.message for r in caplog.records if r.levelno >= logging.WARNING] == []
