"""Attention's backward pass by products over all heads is as exact as ATen's, and taken."""

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from poptorch.backends.inductor.compiler import rules
from poptorch.backends.inductor.lowering import fakes, lower
from poptorch.backends.inductor.products import LONGEST, attention_backward

aten = torch.ops.aten
THEIRS = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
BATCH, HEADS, ROWS, WIDTH = 2, 3, 9, 8


def operands(columns: int) -> list[torch.Tensor]:
    """Query, key and value in the strides that models give them."""
    torch.manual_seed(0)
    shapes = [(BATCH, rows, HEADS, WIDTH) for rows in (ROWS, columns, columns)]
    return [torch.randn(shape).bfloat16().transpose(1, 2) for shape in shapes]


def mask(kind: str | None, columns: int) -> torch.Tensor | None:
    if kind is None:
        return None
    hidden = torch.zeros(BATCH, 1, ROWS, columns, dtype=torch.bfloat16)
    hidden[0, 0, :, 2] = float("-inf")
    if kind == "nothing to be seen":
        hidden[1, 0, 4, :] = float("-inf")
    return hidden


@pytest.mark.parametrize("columns", [ROWS, 12])
@pytest.mark.parametrize("kind", [None, "causal", "some", "nothing to be seen"])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_gradients(columns: int, kind: str | None, scale: float | None) -> None:
    causal = kind == "causal"
    shown = mask(None if causal else kind, columns)
    tensors = operands(columns)
    options = {"attn_mask": shown, "scale": scale}
    forward = aten._scaled_dot_product_flash_attention_for_cpu
    out, logsumexp = forward(*tensors, 0.0, causal, **options)
    grad = torch.randn_like(out)
    args = (grad, *tensors, out, logsumexp, 0.0, causal)
    ours, theirs = attention_backward(*args, **options), THEIRS(*args, **options)
    exact = [tensor.double().requires_grad_() for tensor in tensors]
    wide = None if shown is None else shown.double()
    result = F.scaled_dot_product_attention(*exact, attn_mask=wide, is_causal=causal, scale=scale)
    truth = torch.autograd.grad(result, exact, grad.double())
    for one, other, right in zip(ours, theirs, truth, strict=True):
        assert (one.dtype, one.shape) == (torch.bfloat16, right.shape)
        furthest = (other.double() - right).abs().max()
        assert (one.double() - right).abs().max() <= 2 * furthest


@pytest.mark.slow
def test_compiled_code_has_it() -> None:
    query, key, value = operands(ROWS)
    inputs = (query, query, key, value, query, query[..., 0].float())
    given = make_fx(lambda *t: tuple(THEIRS(*t, 0.0, False)), tracing_mode="fake")(*inputs)
    mode, fake = fakes(inputs)
    with mode:
        lowered = lower(given, [], fake, rules(given.graph), {})
    assert not lowered.graph.find_nodes(op="call_function", target=THEIRS)
    assert len(lowered.graph.find_nodes(op="call_function", target=aten.bmm.default)) == 5


def test_what_is_left_to_the_library() -> None:
    query, key, value = operands(ROWS)
    rows = query[:, :, :, 0].float()
    for dtype in (torch.float32, torch.float64):
        wide = [tensor.to(dtype) for tensor in (query, query, key, value, query)]
        assert attention_backward(*wide, rows, 0.0, False) is NotImplemented
    long = torch.zeros(1, 1, LONGEST + 1, WIDTH, dtype=torch.bfloat16)
    rest = (long, long, long[..., 0].float(), 0.0, False)
    assert attention_backward(long, long, long, *rest) is NotImplemented
    fewer = (query, key[:, :1], value[:, :1], query, rows, 0.0, False)
    assert attention_backward(query, *fewer) is NotImplemented
