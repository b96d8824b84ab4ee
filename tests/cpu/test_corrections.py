"""Compiled graphs compute what traced graphs do, also where torch's compiler alone would not."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

import poptorch
from helpers.compiled_graphs import Tensors, check
from helpers.wrapping import Calling, options
from poptorch._cpu.corrections import CORRECTIONS, put
from poptorch._cpu.kernels import decompositions
from poptorch._cpu.lowering import fakes, lower

aten = torch.ops.aten


def operators(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> set[object]:
    """Return the operators of the code generator that compute a function."""
    module = make_fx(lambda *given: (function(*given),), tracing_mode="fake")(*inputs)
    made = lower(module, [], fakes(inputs)[1], {}, decompositions(CORRECTIONS))
    return {node.target for node in made.graph.nodes if node.op == "call_function"}


def test_a_lazy_conjugate_is_computed_at_once() -> None:
    found = operators(torch.conj, torch.randn(3, dtype=torch.complex64))
    assert found == {aten._conj_physical.default}


def test_a_factor_of_a_sum_is_a_separate_operator() -> None:
    found = operators(lambda x, y: torch.add(x, y, alpha=0.5), torch.ones(3), torch.ones(3))
    assert found == {aten.mul.Tensor, aten.add.Tensor}


# Functions of integers whose results have the wrong type with torch's compiler alone.
WHOLE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda x: x + 1j,
    "sum with a factor": lambda x: torch.add(x, 1j, alpha=2),
    "difference": lambda x: x - 1j,
    "difference from a number": lambda x: 1j - x,
    "product": lambda x: x * 2j,
    "quotient": lambda x: x / 2j,
    "product of flags": lambda x: (x > 1) * 2j,
    "any byte": lambda x: x.to(torch.uint8).any() * 200 + 100,
    "any byte of a row": lambda x: x.to(torch.uint8).view(1, 3).any(1),
    "a number to the power of integers": lambda x: 2 ** (x.int() - 2),
    "a negative number to the power of integers": lambda x: (-2) ** x.int(),
    "any byte of two dimensions": lambda x: x.to(torch.uint8).view(1, 3).any(dim=(0, 1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_compiled_code_gives_results_of_integers_the_type_that_eager_torch_gives(name: str) -> None:
    x = torch.tensor([1, 2, 3])

    model = poptorch.inferenceModel(Calling(WHOLE[name]), options().backend("optimise"))
    found = model(x)

    assert model._executable.report().backend == "inductor"
    torch.testing.assert_close(found, WHOLE[name](x))


# Functions of operators that are corrected for other operands, and written out by torch for these.
OTHERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "difference from a number": lambda x: 1 - x.float(),
    "a number to the power of numbers": lambda x: 2 ** x.float(),
    "any of two dimensions": lambda x: (x > 1).view(1, 3).any(dim=(0, 1)),
}


@pytest.mark.larger("test_compiled_code_gives_results_of_integers_the_type_that_eager_torch_gives")
@pytest.mark.parametrize("name", OTHERS)
def test_operands_that_need_no_correction_are_compiled(name: str) -> None:
    x = torch.tensor([1, 2, 3])

    model = poptorch.inferenceModel(Calling(OTHERS[name]), options().backend("optimise"))
    found = model(x)

    assert model._executable.report().backend == "inductor"
    torch.testing.assert_close(found, OTHERS[name](x))


@pytest.mark.parametrize("expanded", [True, False])
def test_an_expanded_tensor_is_copied_before_it_is_written_to(expanded: bool) -> None:
    tensor = torch.zeros(1, 4).expand(3, 4) if expanded else torch.zeros(3, 4)
    assert put.applies(tensor, [torch.tensor([0])], torch.ones(1, 4)) == expanded


def dropping(w: torch.Tensor, momentum: torch.Tensor, x: torch.Tensor) -> tuple[Tensors, Tensors]:
    """A training step with state and random numbers; a result has other strides."""
    leaf = w.detach().requires_grad_()
    out = F.dropout(x @ leaf, 0.5)
    (grad,) = torch.autograd.grad(F.cross_entropy(out, torch.zeros_like(out[:, 0]).long()), leaf)
    new = momentum * 0.9 + grad
    return [out.detach(), out.detach().t()], [w - 0.1 * new, new]


def norm(
    w: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, x: torch.Tensor
) -> tuple[Tensors, Tensors]:
    """A dropout's mask is written and read in loops; torch 2.13's ``addmm`` drops ``alpha``."""
    leaves = [value.detach().requires_grad_() for value in (w, scale, shift)]
    normal = F.batch_norm(x @ leaves[0], None, None, *leaves[1:], training=True)
    loss = (F.dropout(F.relu(normal), 0.3) @ leaves[0]).square().mean()
    gradients = torch.autograd.grad(loss, leaves)
    added = torch.add(x, torch.mm(x * 2, w), alpha=0.5)  # a product with one user
    return [loss.detach(), added], [w - 0.1 * g for w, g in zip(leaves, gradients, strict=True)]


@pytest.mark.long
def test_a_step_with_dropout_momentum_and_a_transposed_result_is_as_traced() -> None:
    check(dropping, [torch.randn(shape) * 0.3 for shape in [(6, 3), (6, 3), (4, 6)]])


@pytest.mark.slow
def test_a_step_with_a_norm_dropout_and_a_scaled_product_is_as_traced() -> None:
    check(norm, [torch.randn(shape) * 0.3 for shape in [(4, 4), (4,), (4,), (8, 4)]])


@pytest.mark.larger("test_a_lazy_conjugate_is_computed_at_once")
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
def test_lazy_conjugates_have_their_own_values() -> None:
    """Kernels that compiled code calls directly take a lazy conjugate's memory for its values."""

    def step(x: torch.Tensor, weight: torch.Tensor) -> tuple[Tensors, Tensors]:
        few_modes = torch.fft.rfft(x)[..., :3].permute(0, 2, 1)
        across = few_modes.conj().permute(1, 0, 2)
        product = across.reshape(3, 8) @ torch.view_as_complex(weight)
        return [torch.view_as_real(product), across.imag.sum()], []

    check(step, [torch.randn(4, 2, 6), torch.randn(8, 5, 2)])
