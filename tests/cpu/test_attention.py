"""Attention as loops and as products over all heads gives what ATen's operators give."""

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from helpers.compiled_graphs import Tensors
from poptorch._cpu.attention import LONGEST, attention, attention_backward
from poptorch._cpu.compiler import rules
from poptorch._cpu.lowering import fakes, lower

aten = torch.ops.aten
FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
BATCH, HEADS, ROWS, WIDTH = 2, 3, 9, 8


def operands(columns: int = ROWS) -> Tensors:
    """Return query, key and value in bfloat16, in the strides that models give them."""
    torch.manual_seed(0)
    shapes = [(BATCH, rows, HEADS, WIDTH) for rows in (ROWS, columns, columns)]
    return [torch.randn(shape).bfloat16().transpose(1, 2) for shape in shapes]


def one_query(columns: int = 12) -> Tensors:
    """Return one query of each head, and all keys and values, in float32."""
    query, key, value = (tensor.float() for tensor in operands(columns))
    return [query[:, :, 4:5], key, value]


def mask(kind: str, columns: int) -> torch.Tensor | None:
    """Return an additive mask. "nothing to be seen" hides every key from one query."""
    if kind == "none":
        return None
    hidden = torch.zeros(BATCH, 1, ROWS, columns, dtype=torch.bfloat16)
    hidden[0, 0, :, 2] = float("-inf")
    if kind == "nothing to be seen":
        hidden[1, 0, 4, :] = float("-inf")
    return hidden


OPERANDS = ("query", "key", "value")


def distance(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the largest error."""
    return float((got.double() - exact).abs().max())


@pytest.mark.parametrize("columns", [ROWS, 12])
@pytest.mark.parametrize("kind", ["none", "causal", "some", "nothing to be seen"])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_gradients_are_at_most_twice_as_far_from_exact_ones_as_atens(
    columns: int, kind: str, scale: float | None
) -> None:
    causal = kind == "causal"
    shown, tensors = mask("none" if causal else kind, columns), operands(columns)
    options = {"attn_mask": shown, "scale": scale}
    out, logsumexp = FORWARD(*tensors, 0.0, causal, **options)
    grad = torch.randn_like(out)
    arguments = (grad, *tensors, out, logsumexp, 0.0, causal)
    exact = [tensor.double().requires_grad_() for tensor in tensors]
    wide = None if shown is None else shown.double()
    result = F.scaled_dot_product_attention(*exact, attn_mask=wide, is_causal=causal, scale=scale)
    truth = torch.autograd.grad(result, exact, grad.double())

    ours = attention_backward(*arguments, **options)
    theirs = BACKWARD(*arguments, **options)

    assert [each.dtype for each in ours] == [torch.bfloat16] * 3
    assert [each.shape for each in ours] == [each.shape for each in truth]
    for name, one, other, right in zip(OPERANDS, ours, theirs, truth, strict=True):
        assert distance(one, right) <= 2 * distance(other, right), f"gradient of the {name}"


@pytest.mark.parametrize("kind", ["none", "some", "nothing to be seen"])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_one_query_of_each_head_is_computed_with_loops(kind: str, scale: float | None) -> None:
    shown, tensors = mask(kind, 12), one_query()
    row = None if shown is None else shown[:, :, 4:5].float()

    assert attention.applies(*tensors, attn_mask=row, scale=scale)
    found = attention(*tensors, attn_mask=row, scale=scale)

    torch.testing.assert_close(found, FORWARD(*tensors, attn_mask=row, scale=scale))


def test_several_queries_are_left_to_aten() -> None:
    assert not attention.applies(*(tensor.float() for tensor in operands()))


@pytest.mark.parametrize("rest", [(0.0, True), (0.1, False)], ids=["causal", "dropout"])
def test_one_query_with_a_causal_mask_or_dropout_is_left_to_aten(rest: tuple[float, bool]) -> None:
    assert not attention.applies(*one_query(), *rest)


def test_one_query_whose_heads_share_keys_is_left_to_aten() -> None:
    query, key, value = one_query()
    assert not attention.applies(query, key[:, :1], value[:, :1])


def test_one_query_in_bfloat16_is_left_to_aten() -> None:
    assert not attention.applies(*(tensor.bfloat16() for tensor in one_query()))


@pytest.mark.slow
def test_compiled_code_computes_gradients_with_five_products() -> None:
    query, key, value = operands()
    inputs = (query, query, key, value, query, query[..., 0].float())
    given = make_fx(lambda *t: tuple(BACKWARD(*t, 0.0, False)), tracing_mode="fake")(*inputs)
    mode, fake = fakes(inputs)

    with mode:
        lowered = lower(given, [], fake, rules(given.graph), {}).graph

    assert not lowered.find_nodes(op="call_function", target=BACKWARD)
    assert len(lowered.find_nodes(op="call_function", target=aten.bmm.default)) == 5


def test_compiled_code_computes_one_query_with_loops() -> None:
    assert rules(torch.fx.Graph())[FORWARD] is attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_in_wide_types_are_left_to_aten(dtype: torch.dtype) -> None:
    query, key, value = (tensor.to(dtype) for tensor in operands())
    rows = query[:, :, :, 0].float()
    assert not attention_backward.applies(query, query, key, value, query, rows, 0.0, False)


def test_gradients_over_long_sequences_are_left_to_aten() -> None:
    long = torch.zeros(1, 1, LONGEST + 1, WIDTH, dtype=torch.bfloat16)
    rows = long[..., 0].float()
    assert not attention_backward.applies(long, long, long, long, long, rows, 0.0, False)


def test_gradients_of_heads_that_share_keys_are_left_to_aten() -> None:
    query, key, value = operands()
    shared = key[:, :1], value[:, :1]
    rows = query[:, :, :, 0].float()
    assert not attention_backward.applies(query, query, *shared, query, rows, 0.0, False)
