"""One graph through torch's code generator."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..._base import log, private
from ..._ir.operators import Operator
from .addition import add
from .attention import attention_backward
from .convolution import Convolutions
from .library import code_of, generator
from .lowering import Decompositions, fakes, lower
from .pooling import max_pool, max_pool_backward
from .processor import has_vectors
from .products import choose_library
from .reads import keep_dependencies
from .sources import Sources, run, write
from .strides import stride
from .toolchain import explained
from .updates import place_writes

aten = torch.ops.aten

Compiled = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]

# Random numbers equal the reference backend's. Layouts stay as traced: the generator's switch to
# channels-last leaves few channels as the innermost axis, which cannot be vectorised (the tutorial
# CNN: 0.97 times eager with it, 1.29 without). So does the order, as traced but for ``updates``:
# moved to where they are first used, gradients of weights would follow the whole backward pass, and
# keep its activations till then (without and with: a BERT of 4 layers 40 and 50 MiB, in bfloat16 20
# and 26 and 1.1 times as long; the CNN, 8 micro-batches of 16, 7 and 10 and 1.2 times as long).
# Headers are not compiled in advance: it takes about 6 s, once per machine, and saves 1.1 s in each
# file. Processor time of the first program on a fresh machine, the tutorial's CNN: 25 s as torch is
# set, 20.5 s without trying out vector instructions (``processor``), 15.4 s without headers too.
SETTINGS: Mapping[str, Any] = {
    "fallback_random": True,
    "layout_optimization": False,
    "reorder_for_peak_memory": False,
    "reorder_for_locality": False,
    "cpp_cache_precompile_headers": False,
}


@dataclass(frozen=True)
class Code:
    """A compiled graph.

    Attributes:
        run: from the list of tensors to the list of outputs.
        kept: what ``library.load`` makes the same function from; None where that is not possible.
    """

    run: Compiled
    kept: bytes | None


def rules(graph: fx.Graph) -> Decompositions:
    """Return the faster ways to compute operators of a graph."""
    return {
        **Convolutions(graph).rules,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default: attention_backward,
        aten.max_pool2d_with_indices.default: max_pool,
        aten.max_pool2d_with_indices_backward.default: max_pool_backward,
    }


def compile_graph(module: fx.GraphModule, examples: list[torch.Tensor]) -> Code:
    """Compile a graph of ATen operators with trailing writes into its inputs.

    Args:
        module: takes the tensors one by one, returns a tuple; unchanged afterwards.
        examples: tensors of the sizes and strides to compile for.

    Returns:
        A function from the list of tensors to the list of outputs, whose strides are those of the
        traced outputs, and what it can be loaded from again. It leaves the list as it is.

    Raises:
        Error: the C++ compiler failed.
    """
    compiled, kept = None, None
    if _callable_from_cpp(module):
        try:
            compiled = _compile(module, examples, cpp_wrapper=True)
            kept = code_of(compiled)
        except Exception as error:  # whatever it is, the other wrapper tells whether it is ours
            log.engine.debug("No C++ wrapper: %s", str(error).partition("\n")[0])
            _let_go(error)
    if compiled is None:
        try:
            compiled = _compile(module, examples, cpp_wrapper=False)
        except Exception as error:
            complaint = explained(error)
            if complaint is None:
                raise
            _let_go(error)
            raise complaint from None
    # the generated code empties its list
    return Code(lambda arguments: compiled(list(arguments)), kept)


def _let_go(error: BaseException | None) -> None:
    """Forget where an error passed: torch keeps it, and its frames the user's model and devices."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _callable_from_cpp(module: fx.GraphModule) -> bool:
    """Tell whether all operators are torch's own, or ours that return single tensors.

    The wrapper in C++ calls others through Python, and takes a list of tensors that one returns
    for a tensor, which ends the process. Texts it takes as they are into strings of C++.
    """
    graphs = [part.graph for part in module.modules() if isinstance(part, fx.GraphModule)]
    nodes = [n for graph in graphs for n in graph.nodes if isinstance(n.target, Operator)]
    return all(
        node.target.namespace in ("aten", "prims")
        or (node.target.namespace == "poptorch" and _is_plain(node))
        for node in nodes
    )


def _is_plain(node: fx.Node) -> bool:
    """Tell whether a node returns no list, and its texts are the same between quotes in C++."""
    returns = node.target._schema.returns  # type: ignore[union-attr]
    texts = [repr(argument)[1:-1] for argument in node.args if isinstance(argument, str)]
    return not any(isinstance(value.type, torch.ListType) for value in returns) and not any(
        mark in text for text in texts for mark in ('"', "\\")
    )


def _compile(module: fx.GraphModule, examples: list[torch.Tensor], cpp_wrapper: bool) -> Any:
    """Compile; the wrapper is the code that allocates and calls kernels, in C++ or in Python.

    In C++ all kernels are one source file, compiled once instead of once per group of kernels
    (processor time of the C++ compiler: 4.2 s instead of 9.5 s for the tutorial's CNN, 17 s instead
    of 42 s for a ResNet-18), and a call costs 0.04 ms less. Not every operator can be called so.
    """
    mode, inputs = fakes(examples)
    passes = {
        "post_grad_custom_post_pass": _of_ours(private.CustomGraphPass, _rewrite),
        "_pre_fusion_custom_pass": _of_ours(private.CustomSchedulerPass, keep_dependencies),
    }
    settings = {**SETTINGS, **_shortcuts(), **passes, "cpp_wrapper": cpp_wrapper}
    # What is one library is kept elsewhere (``library``): torch's own cache need not look it up.
    settings["fx_graph_cache"] = not cpp_wrapper
    sources = Sources()
    with private.config.patch(settings), private.standing_in(_stand_ins(sources)):
        lowered = lower(module, inputs, rules(module.graph), _decompositions())
        tracing = private.tracing(private.TracingContext(mode))
        with tracing, torch.no_grad(), _quiet():
            with private.V.set_fake_mode(mode):
                private.joint_graph_passes(lowered)
            _keep_output_strides(lowered, _output_strides(module))
            with private.config.patch(cpp_wrapper_build_separate=sources.are_two(lowered.graph)):
                return private.compile_fx_inner(
                    lowered,
                    inputs,
                    is_inference=True,
                    static_input_idxs=range(len(inputs)),
                    cpp_wrapper=cpp_wrapper,
                )


def _shortcuts() -> Mapping[str, Any]:
    """Settings for what is known without trying it out.

    Where the C++ compiler does not know the instructions it fails, and the reference backend runs
    the program.
    """
    return {"cpp.vec_isa_ok": True} if has_vectors() else {}


def _stand_ins(sources: Sources) -> Mapping[str, Callable[..., Any]]:
    """What takes the place of functions of torch's while it compiles, by their names."""
    known = {"check_build": _is_known} if has_vectors() else {}
    return {
        "stride_at_vec_range": stride,
        "write": write,
        "run_compile_cmd": run,
        "worker_compile_cpp": sources.compile,
        "DtypePropagationOpsHandler": _made_once(),
        **known,
    }


def _made_once() -> Callable[..., Any]:
    """Torch makes its table of result types, always the same, for every operator of a kernel.

    It is 5% of the generator's processor time for the tutorial's CNN.
    """
    tables: list[Any] = []

    def table(usual: Callable[..., Any]) -> Any:
        if not tables:
            tables.append(usual())
        return tables[0]

    return table


def _is_known(usual: Callable[..., Any], self: Any, code: str) -> bool:
    """Torch asks the processor whether it has an instruction, then tries it out in a library."""
    return True


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Torch 2.12 warns, of every product, about kernels for GPUs that it cannot use here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "CUTLASS backend is not supported")
        yield


def _rewrite(graph: fx.Graph) -> None:
    choose_library(graph)
    place_writes(graph)


def _of_ours(base: Any, work: Callable[[Any], Any]) -> Any:
    """Return a pass for one of torch's settings.

    It has a version, which torch's cache of graphs asks for: nothing is used again that another
    version of this package has compiled.

    Args:
        base: torch's class of such passes.
        work: what is done.
    """

    class Pass(base):  # type: ignore[misc]
        def __call__(self, subject: Any) -> Any:
            return work(subject)

        def uuid(self) -> str:
            return generator()

    return Pass()


def _decompositions() -> Decompositions:
    return {**private.select_decomp_table(), aten.add.Tensor: add}


def _output_strides(module: fx.GraphModule) -> list[tuple[int, ...]]:
    (output,) = module.graph.find_nodes(op="output")
    return [node.meta["val"].stride() for node in output.args[0]]


def _keep_output_strides(lowered: fx.GraphModule, strides: Sequence[tuple[int, ...]]) -> None:
    (output,) = lowered.graph.find_nodes(op="output")
    output.meta["user_visible_output_idxs"] = list(range(len(strides)))
    output.meta["original_output_strides"] = list(strides)
