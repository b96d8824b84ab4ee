"""The faster rules compute what the operators do; compiled graphs do what traced ones do."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import mpmath
import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from helpers.cases import few
from helpers.closeness import near
from helpers.compiled_graphs import Step, Tensors, check, graph
from poptorch._cpu import convolutions
from poptorch._cpu.digamma import digamma
from poptorch._cpu.lowering import OrderedReplay, fakes, lower, memory_order
from poptorch._cpu.norms import group_norm, group_norm_backward
from poptorch._cpu.products import row_product
from poptorch._cpu.windows import batch_first, max_pool, max_pool_backward
from poptorch._cpu.writes import place_writes

pytestmark = pytest.mark.slow
aten = torch.ops.aten
BATCH = 8
ALONE = convolutions.Convolutions(torch.fx.Graph())
convolution, convolution_backward = ALONE.convolution, ALONE.convolution_backward


def same(ours: object, theirs: object) -> None:
    torch.testing.assert_close(ours, theirs, **near(BATCH * 9 * 8), check_stride=False)


GEOMETRIES = [
    ((9, 8), (kernel, kernel + 1), stride, padding, dilation)
    for kernel, stride in itertools.product((1, 2, 3), repeat=2)
    for padding, dilation in itertools.product((0, 1), (1, 2))
]
OTHER_DIMENSIONS = [(space, (3,) * len(space), 2, 1, 1) for space in ((11,), (5, 4, 6))]


@pytest.mark.parametrize("rows, channels", [(BATCH, 3), (2, 3), (2, 8)])
@pytest.mark.parametrize("geometry", GEOMETRIES + OTHER_DIMENSIONS)
def test_convolution(geometry: tuple, rows: int, channels: int) -> None:
    space, kernel, *numbers = geometry
    rank = len(space)
    x, w, b = torch.randn(rows, channels, *space), torch.randn(5, channels, *kernel), torch.randn(5)
    args = (*([number] * rank for number in numbers), False, [0] * rank, 1)
    y = aten.convolution(x, w, b, *args)
    same(convolution(x, w, b, *args), y)
    backward = (torch.randn_like(y), x, w, [5], *args, [True] * 3)
    same(convolution_backward(*backward), tuple(aten.convolution_backward(*backward)))
    dx, dw, db = convolution_backward(*backward[:-1], [True, True, False])
    assert db is None
    same((dx, dw), tuple(aten.convolution_backward(*backward))[:2])
    same(convolution(x, w, None, *args), aten.convolution(x, w, None, *args))


@pytest.mark.parametrize(
    "outputs, size, kernel, is_product",
    [
        (16, 6, 3, True),
        (64, 20, 3, False),
        (8, 40, 3, False),
        (64, 40, 1, True),
        (4096, 1, 1, False),
    ],
)
def test_what_takes_less_than_a_call_of_a_library(
    outputs: int, size: int, kernel: int, is_product: bool
) -> None:
    args = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    traced = make_fx(lambda *inputs: convolution(*inputs, None, *args), tracing_mode="fake")
    found = traced(torch.empty(1, 64, size, size), torch.empty(outputs, 64, kernel, kernel))
    targets = {node.target for node in found.graph.nodes}
    assert (aten.mm.default in targets) is (aten.convolution.default not in targets) is is_product


def test_a_row_with_columns_in_one_piece_is_loops() -> None:
    row, weight = torch.randn(1, 40), torch.randn(24, 40).t()
    same(row_product(row, weight), row @ weight)
    others = [(row.double(), weight), (torch.randn(2, 40), weight), (row, weight.contiguous())]
    assert all(row_product(*each) is NotImplemented for each in others)


@pytest.mark.parametrize("channels,outputs,groups", [(4, 4, 1), (16, 32, 1), (4, 4, 4)])
def test_convolutions_left_to_the_library(
    channels: int, outputs: int, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convolutions, "_FEW_GATHERED", 0)
    x, w = torch.randn(BATCH - 1, channels, 5, 6), torch.randn(outputs, channels // groups, 3, 3)
    args = ([1, 1], [0, 0], [1, 1], False, [0, 0], groups)
    y = convolution(x, w, None, *args)
    same(y, aten.convolution(x, w, None, *args))
    assert memory_order(y) == ((0, 2, 3, 1) if channels == 16 else (0, 1, 2, 3))
    backward = (torch.randn_like(y), x, w, None, *args, [True, True, False])
    same(convolution_backward(*backward)[:2], tuple(aten.convolution_backward(*backward))[:2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_digamma_is_exact_to_the_last_digit(dtype: torch.dtype) -> None:
    x = torch.cat([torch.logspace(-30, 30, 301), torch.linspace(-20.3, 20, 2000)]).to(dtype)
    special = torch.tensor([0.0, -0.0, -1.0, -7.0, math.inf, -math.inf, math.nan], dtype=dtype)
    exact = torch.tensor([float(mpmath.digamma(v)) for v in x.tolist()], dtype=torch.float64)
    assert ((digamma(x) - exact).abs() / (1 + exact.abs())).max() <= 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(digamma(special), torch.digamma(special), equal_nan=True)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    "kernel,stride,padding,dilation",
    [
        ([2, 2], [2, 2], [0, 0], [1, 1]),
        ([3, 2], [2, 1], [1, 0], [1, 1]),
        ([2], [], [1], [2]),
    ],
)
def test_max_pool_picks_the_same_elements(
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    layout: torch.memory_format,
) -> None:
    x = torch.randint(-3, 3, (BATCH, 8, 8, 9)).float()  # many ties
    x[0, 0, 3, 3:5] = float("nan")
    x = x.contiguous(memory_format=layout)
    args = (kernel, stride, padding, dilation)
    best, index = aten.max_pool2d_with_indices(x, *args)
    ours = max_pool(x, *args)
    torch.testing.assert_close(ours, (best, index), check_stride=False, equal_nan=True)
    grad, stride = torch.randn_like(best), stride or kernel
    backward = (grad, x, kernel, stride, padding, dilation, False, index)
    same(max_pool_backward(*backward), aten.max_pool2d_with_indices_backward(*backward))


def test_max_pool_left_alone_where_a_window_reaches_over_the_end() -> None:
    x = torch.randn(BATCH, 1, 5, 5)
    assert max_pool(x, [2, 2], [2, 2], [0, 0], [1, 1], True) is NotImplemented
    assert max_pool(x[:, :, :4, :4], [2, 2], [2, 2], [0, 0], [1, 1], True) is not NotImplemented


def test_memory_order() -> None:
    x = torch.randn(2, 3, 4)
    for order in itertools.permutations(range(3)):
        back = [order.index(d) for d in range(3)]
        assert memory_order(x.permute(order).contiguous().permute(back)) == order
    assert memory_order(x[:, ::2]) is None
    assert memory_order(x.expand(5, 2, 3, 4)) is None


def test_replay_keeps_memory_order_and_restores_it_where_needed() -> None:
    seen: dict[str, tuple[int, ...]] = {}

    def batch_last_relu(x: torch.Tensor) -> torch.Tensor:
        return batch_first(x.relu().permute(1, 2, 0).contiguous())

    def watched(
        name: str, operator: torch._ops.OpOverload
    ) -> dict[Callable[..., Any], Callable[..., Any]]:
        def rule(x: torch.Tensor, *rest: object) -> object:
            seen[name] = x.stride()
            return NotImplemented

        return {operator: rule}

    def step(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = (x.relu() * scale).exp()
        return z, z.sum(0), z.cumsum(0), z.view(BATCH, -1)

    x, scale = torch.randn(BATCH, 3, 7), torch.randn(3, 1)
    module = make_fx(step, tracing_mode="fake")(x, scale)
    rules = {aten.relu.default: batch_last_relu, **watched("exp", aten.exp.default)}
    ours = OrderedReplay(module, rules).run(x, scale)
    same(tuple(ours), step(x, scale))
    assert seen["exp"] == (1, 7 * BATCH, BATCH)
    assert ours[0].stride() == (1, 7 * BATCH, BATCH)
    assert ours[2].stride() == (21, 7, 1)
    traced = make_fx(OrderedReplay(module, rules).run, tracing_mode="fake")(x, scale)
    (exp,) = traced.graph.find_nodes(op="call_function", target=aten.exp.default)
    assert exp.meta["val"].is_contiguous()  # the code generator stores it by its dimensions


def test_what_repeats_in_memory_is_computed_once() -> None:
    def spread(x: torch.Tensor) -> Tensors:
        y = x[:, None].expand(3, 5, 4)
        return y.lgamma(), y.digamma() * y.log(), y.pow(2.5), torch.pow(2.0, y)

    module = make_fx(spread, tracing_mode="fake")(x := torch.rand(3, 4) + 0.1)
    same(OrderedReplay(module, {}).run(x), spread(x))
    traced = make_fx(OrderedReplay(module, {}).run, tracing_mode="fake")(x)
    elements = {n.target: n.meta["val"].numel() for n in traced.graph.nodes if n.users}
    assert {elements[each.default] for each in (aten.lgamma, aten.digamma, aten.log)} == {12}


@pytest.mark.parametrize("groups,space", [(1, ()), (2, ()), (2, (3, 4)), (6, (7,))])
@pytest.mark.parametrize("affine", [True, False])
def test_group_norm_of_what_has_the_batch_innermost(
    groups: int, affine: bool, space: tuple[int, ...]
) -> None:
    x = batch_first(torch.randn(6, *space, BATCH) + 3)
    weights = (torch.randn(6), torch.randn(6)) if affine else (None, None)
    sizes = (BATCH, 6, math.prod(space), groups)
    theirs = aten.native_group_norm(x.contiguous(), *weights, *sizes, 1e-5)
    ours = group_norm(x, *weights, *sizes, 1e-5)
    same(ours, theirs)
    assert memory_order(ours[0]) == memory_order(x)
    grad = torch.randn(x.shape)
    for wanted in ([True, affine, affine], [False, affine, False]):
        backward = (grad, x.contiguous(), *theirs[1:], weights[0], *sizes, wanted)
        expected = aten.native_group_norm_backward(*backward)
        found = group_norm_backward(grad, x, *backward[2:])
        for own, other, needed in zip(found, expected, wanted, strict=True):
            assert (own is not None) == needed
            if needed:
                same(own, other)


def test_group_norm_left_to_torch() -> None:
    sizes = (BATCH, 6, 5, 2, 1e-5)
    assert group_norm(torch.randn(BATCH, 6, 5), None, None, *sizes) is NotImplemented
    narrow = batch_first(torch.randn(6, 5, BATCH)).bfloat16()  # torch adds up in float32
    assert group_norm(narrow, None, None, *sizes) is NotImplemented
    few = batch_first(torch.randn(6, 5, 2))
    assert group_norm(few, None, None, 2, *sizes[1:]) is NotImplemented


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


def reading(w: torch.Tensor, x: torch.Tensor, through_view: bool = True) -> tuple[Tensors, Tensors]:
    """The new value is there at once; the old one is read by the last product."""
    old = w.t() if through_view else w
    hidden = x @ x
    for _ in range(3):
        hidden = hidden @ x
    return [hidden @ old], [w * 2.0 + 1.0]


STEPS: dict[str, tuple[Step, list[tuple[int, ...]]]] = {
    "dropping": (dropping, [(6, 3), (6, 3), (4, 6)]),
    "norm": (norm, [(4, 4), (4,), (4,), (8, 4)]),
    "reading": (reading, [(4, 4), (4, 4)]),
}


def examples(name: str) -> Tensors:
    return [torch.randn(shape) * 0.3 for shape in STEPS[name][1]]


@pytest.mark.parametrize("name", few(STEPS, "norm"))
def test_steps(name: str) -> None:
    check(STEPS[name][0], examples(name))


# State is updated as early as possible, and never before its old value was read.


def placed(step: Step, tensors: Tensors) -> list[fx.Node]:
    found = lower(*graph(step, tensors), fakes(tensors)[1], {}, {}).graph
    place_writes(found)
    before = [node.target for node in found.nodes]
    place_writes(found)
    assert [node.target for node in found.nodes] == before
    return list(found.nodes)


@pytest.mark.parametrize("through_view", [False, True])
def test_old_values_are_read_before(through_view: bool) -> None:
    nodes = placed(lambda w, x: reading(w, x, through_view), examples("reading"))
    targets = [node.target for node in nodes]
    last = max(i for i, target in enumerate(targets) if target is aten.mm.default)
    assert targets.index(aten.copy_.default) > last


def test_a_weight_is_updated_before_the_gradient_of_the_next() -> None:
    nodes = placed(lambda w, v, x: ([], [w - x @ w, v - x @ v]), [*torch.randn(3, 3, 3)])
    heavy = [node.target for node in nodes if node.target in (aten.mm.default, aten.copy_.default)]
    assert heavy == [aten.mm.default, aten.copy_.default] * 2


def test_graphs_without_products_or_writes() -> None:
    for step in (lambda a: ([a + 1], [a * 2]), lambda a: ([a @ a], []), lambda a: ([], [a + 1])):
        assert placed(step, [torch.randn(3, 3)])


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
def test_lazy_conjugates_have_values_of_their_own() -> None:
    """Kernels that compiled code calls directly take a lazy conjugate's memory for its values."""

    def step(x: torch.Tensor, weight: torch.Tensor) -> tuple[Tensors, Tensors]:
        few_modes = torch.fft.rfft(x)[..., :3].permute(0, 3, 1, 2)
        across = few_modes.permute(0, 1, 3, 2).conj().permute(1, 0, 3, 2)
        product = across.reshape(12, 6, 2) @ torch.view_as_complex(weight)
        return [torch.view_as_real(product), across.imag.sum()], []

    torch.manual_seed(0)
    check(step, [torch.randn(4, 2, 6, 16), torch.randn(12, 2, 5, 2)])
