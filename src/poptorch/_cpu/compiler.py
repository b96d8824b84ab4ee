"""Compile one graph with torch's code generator."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from .._base import log, private
from .._ir import symbolic
from .._ir.conditions import ALWAYS, Conditions, expression
from .._ir.graph import copied
from .._ir.operators import Operator
from .._ir.slots import Slot
from ..backends.protocol import Code
from . import chains, compile_speedups
from .attention import attention, attention_backward
from .compiled_code import code_of, code_with, entry_of
from .convolutions import Convolutions
from .corrections import CORRECTIONS
from .digamma import digamma
from .half_roundings import rounds_to_half
from .in_place_writes import keep_dependencies, place_writes
from .kernels import Kernel, Kernels, decompositions
from .lowering import fakes, lower
from .norms import group_norm, group_norm_backward
from .packing import CONVOLUTION, PRODUCT, is_packed, register
from .pooling import max_pool, max_pool_backward
from .product_kernels import choose_library, row_product_and, small_product
from .refusals import refusing
from .repeated_layers import Piece, cut
from .symbolic_sums import in_chunks
from .toolchain import explained

aten = torch.ops.aten

# Random numbers equal those of the reference backend. Layouts stay as traced, because channels-last
# puts few channels innermost, which cannot be vectorised (the tutorial CNN: 0.97 times the speed of
# eager with it, 1.29 without). The order also stays as traced, except for ``in_place_writes``. If
# gradients of weights were moved to their first use, they would keep the activations of the whole
# backward pass (50 MiB instead of 40 for a BERT with 4 layers; 10 instead of 7 for the CNN with 8
# micro-batches of 16, which takes 1.2 times as long).
SETTINGS: Mapping[str, Any] = {
    "fallback_random": True,
    "layout_optimization": False,
    "reorder_for_peak_memory": False,
    "reorder_for_locality": False,
}


def rules(graph: fx.Graph) -> Kernels:
    """Return our kernels that compute operators of a graph faster than torch does."""
    return {
        **_packed_rules(graph),
        **Convolutions(graph).kernels,
        aten._scaled_dot_product_flash_attention_for_cpu.default: attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default: attention_backward,
        aten.addmm.default: row_product_and,
        aten.digamma.default: digamma,
        aten.native_group_norm.default: group_norm,
        aten.native_group_norm_backward.default: group_norm_backward,
        aten.max_pool2d_with_indices.default: max_pool,
        aten.max_pool2d_with_indices_backward.default: max_pool_backward,
        aten.mm.default: small_product,
    }


def _packed_rules(graph: fx.Graph) -> Kernels:
    """Let packed weights be read together with any layout of the other operand."""
    if not is_packed(graph):
        return {}
    register()
    return {PRODUCT: Kernel(PRODUCT), CONVOLUTION: Kernel(CONVOLUTION)}


def compile_graph(
    module: fx.GraphModule,
    places: Sequence[int],
    examples: list[torch.Tensor],
    slots: Sequence[Slot] = (),
) -> Code:
    """Compile a graph whose last results are written to inputs, by number.

    The other results have the strides of the traced ones.

    Args:
        slots: those of its inputs, if some of their sizes are symbolic.
    """
    module = refusing(module)
    if slots:
        return _compile_for_many_sizes(module, places, slots)
    begin = partial(_Source, module, examples)
    return _first_success(
        (_compile_repeats, _compile_with_speedups, _compile_unchanged), begin, places
    )


def _compile_for_many_sizes(
    module: fx.GraphModule, places: Sequence[int], slots: Sequence[Slot]
) -> Code:
    """Compile code for the sizes for which the graph may be used, and some conditions hold."""
    begin = partial(_Source.for_many_sizes, module, slots)
    return _first_success((_compile_repeats, _compile_with_speedups), begin, places)


def _first_success(
    ways: Sequence[_Way], begin: Callable[[], _Source], places: Sequence[int]
) -> Code:
    """Return the code from the first of these ways that succeeds.

    Compiling a graph as it is shows whether our changes caused an error.
    """
    *quick, last = ways
    source = begin()
    for way in quick:
        try:
            code = way(source, places)
        except Exception as error:
            log.engine.debug("Compiling without an optimisation: %s", str(error).partition("\n")[0])
            _clear_error(error)
            source = begin()
        else:
            if code is not None:
                return code
    code = last(source, places)
    assert code is not None
    return code


@dataclass(frozen=True, eq=False)
class _Source:
    """A graph with examples of its inputs. They have no values if some sizes are symbolic."""

    module: fx.GraphModule
    examples: Sequence[torch.Tensor]
    symbols: symbolic.Symbols | None = None
    known: Conditions = ALWAYS  # those of the graph

    @classmethod
    def for_many_sizes(cls, module: fx.GraphModule, slots: Sequence[Slot]) -> _Source:
        symbols, module = symbolic.Symbols(symbolic.example_sizes(slots)), copied(module)
        inputs = [symbols.tensor(slot) for slot in slots]
        symbolic.fill_in(module, inputs, symbols)
        return cls(module, inputs, symbols, symbols.conditions)

    @property
    def conditions(self) -> Conditions:
        """What torch's compiler has assumed about sizes in addition to the graph.

        Raises:
            NotSymbolic: it used a size, or an expression of sizes, as a number.
        """
        if self.symbols is None:
            return ALWAYS
        added = self.symbols.conditions.without(self.known)
        if (fixed := added.fixed()) is not None:
            raise symbolic.NotSymbolic(f"torch's compiler uses {fixed} as a number")
        return added

    def piece(self, piece: Piece) -> _Source:
        with self.symbols.mode if self.symbols is not None else contextlib.nullcontext():
            examples = [
                torch.empty_strided(v.shape, v.stride(), dtype=v.dtype) for v in piece.values
            ]
        return replace(self, module=piece.module, examples=examples)

    def inputs(self) -> tuple[Any, list[torch.Tensor]]:
        """Return a mode and tensors of this mode without values."""
        if self.symbols is None:
            return fakes(self.examples)
        return self.symbols.mode, [*self.examples]


_Way = Callable[[_Source, Sequence[int]], Code | None]


def _compile_repeats(source: _Source, places: Sequence[int]) -> Code | None:
    """Compile repeated pieces once, all in one library; None if this saves too little."""
    if not callable_from_cpp(source.module):
        return None
    chain = cut(source.module, places, source.examples)
    if chain is None or private.optional("load_pybinding_async") is None:
        return None
    log.engine.debug("%s", chain)
    written: list[chains.PieceSource] = []
    for piece in chain.pieces:
        compiled = _compile(source.piece(piece), piece.places, plain=False, written=written)
        is_written = bool(written) and entry_of(compiled) is chains.unbuilt
        if not is_written or not _has_expected_strides(compiled, piece, source.symbols):
            return None
    with (
        private.settings(compile_speedups.settings()),
        private.replacing(compile_speedups.replacements()),
    ):
        return code_with(chains.load(chain, written), source.conditions)


def _compile_with_speedups(source: _Source, places: Sequence[int]) -> Code:
    return code_of(_compile(source, places, plain=False), source.conditions)


def _compile_unchanged(source: _Source, places: Sequence[int]) -> Code:
    try:
        return code_of(_compile(source, places, plain=True))
    except Exception as error:
        complaint = explained(error)
        if complaint is None:
            raise
        _clear_error(error)
        raise complaint from None


def _has_expected_strides(compiled: Any, piece: Piece, symbols: symbolic.Symbols | None) -> bool:
    """Return whether results have the layout that the next piece expects. Random numbers are
    row-major.
    """
    read = int if symbols is None else symbols.read
    results = piece.module.graph.output_node().args[0]
    return all(
        expression(size) == 1 or symbolic.same_sizes([stride], [read(made)])
        for node, strides in zip(results, compiled.output_strides, strict=False)  # type: ignore[arg-type]
        for size, stride, made in zip(
            node.meta["val"].shape, node.meta["val"].stride(), strides, strict=True
        )
    )


def _clear_error(error: BaseException | None) -> None:
    """Drop what torch stores in an error, because its frames refer to the user's model and
    devices.
    """
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _leave_to_eager(usual: Callable[..., None], op: Any, **options: Any) -> None:
    """Call the eager kernel of an operator that has no lowering.

    If the environment variable ``CI`` is set, torch assumes that its own tests are running, and
    raises an error if the operator has a decomposition. Programs must compile in the same way on a
    CI server as elsewhere.
    """
    usual(op, **{**options, "warn": False})


def callable_from_cpp(module: fx.GraphModule) -> bool:
    """Return whether the C++ wrapper can call all operators. A list from Python would end
    the process.
    """
    graphs = [part.graph for part in module.modules() if isinstance(part, fx.GraphModule)]
    nodes = [n for graph in graphs for n in graph.nodes if isinstance(n.target, Operator)]
    return all(
        node.target.namespace in ("aten", "prims")
        or (node.target.namespace == "poptorch" and _is_plain(node))
        for node in nodes
    )


def _is_plain(node: fx.Node) -> bool:
    returns = node.target._schema.returns  # type: ignore[union-attr]
    texts = [repr(argument)[1:-1] for argument in node.args if isinstance(argument, str)]
    return not any(isinstance(value.type, torch.ListType) for value in returns) and not any(
        mark in text for text in texts for mark in ('"', "\\")
    )


def _compile(
    source: _Source,
    places: Sequence[int],
    plain: bool,
    written: list[chains.PieceSource] | None = None,
) -> Any:
    """Compile once, or only write the C++ code to ``written``.

    With ``plain``, nothing replaces torch's functions just to save time.

    Code that allocates and calls kernels is C++ if possible. A call takes 0.04 ms less, and only
    such code can be stored and cut into pieces.
    """
    module, (mode, inputs) = source.module, source.inputs()
    cpp_wrapper = not plain and callable_from_cpp(module)
    settings = {
        **SETTINGS,
        **({} if plain else compile_speedups.settings()),
        # packed weights have no strides
        **({"size_asserts": False} if is_packed(module.graph) else {}),
        "emulate_precision_casts": rounds_to_half(module.graph),
        "cpp_wrapper": cpp_wrapper,
        "fx_graph_cache": False,  # what is one library is cached elsewhere
        "post_grad_custom_post_pass": place_writes if plain else _rewrite,
        "pre_fusion_custom_pass": keep_dependencies,
    }
    replacements: dict[str, Callable[..., Any]] = {
        "make_fallback": _leave_to_eager,
        "need_use_acc_helper": in_chunks,
    }
    if not plain:
        replacements = {**replacements, **compile_speedups.replacements()}
    if written is not None:
        replacements = {**replacements, "load_pybinding_async": chains.collecting(written)}
    with private.settings(settings), private.replacing(replacements):
        table = decompositions(CORRECTIONS, private.select_decomp_table())
        lowered = lower(module, places, inputs, rules(module.graph), table)
        tracing = private.tracing(private.TracingContext(mode))
        with tracing, torch.no_grad():
            joint_graph_passes = private.optional("joint_graph_passes")
            if joint_graph_passes is not None:
                needed = {} if plain else compile_speedups.patterns(lowered.graph)
                with private.V.set_fake_mode(mode), private.replacing(needed):
                    joint_graph_passes(lowered)
            (output,) = lowered.graph.find_nodes(op="output")  # the strides of all results are kept
            output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
            are_two = written is not None or compile_speedups.are_two(lowered.graph)
            with private.settings({"cpp_wrapper_build_separate": are_two}):
                return private.compile_fx_inner(
                    lowered,
                    inputs,
                    is_inference=True,
                    static_input_idxs=range(len(inputs)),
                    cpp_wrapper=cpp_wrapper,
                )


def _rewrite(graph: fx.Graph) -> None:
    choose_library(graph)
    place_writes(graph)
