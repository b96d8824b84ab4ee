"""Convolutions in the memory layout and by the method that suit their sizes.

oneDNN's kernels, which ATen calls, work on blocks of 16 channels: with very few of them most of a
block is padding, and each call repacks its operands. A product of the weights with the gathered
windows, batch innermost, wastes nothing, and the windows gathered for the forward pass serve the
weights' gradient too. Measured on the tutorial's CNN (1 and 5 input channels): without
windows a step takes 1.75 times as long with a micro-batch of 16, 1.45 times with 8 of them (medians
of 400 and 150 alternating steps on one thread, torch 2.13). Once the gathered windows outgrow the
caches the gain is lost (8 channels, batch 128: 33 ms by the library, 60 ms by products).

Convolutions that fill the blocks run channels-last, where the library needs no repacking: a step of
a ResNet-18's shape takes 1.06 times as long without. Where the two layouts meet, what stands
between cannot be vectorised: the first layers of a network of such convolutions follow it, without
which the same step takes 1.29 times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from .windows import LEAST_INNERMOST, Windows, batch_first, batch_last, stored

aten = torch.ops.aten
_FEW_CHANNELS = 8
_BLOCK = 16
_MOST_GATHERED = 8 << 20  # bytes


class Convolutions:
    """The rules for one graph.

    Args:
        graph: whose nodes carry traced values.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._follow_blocks = any(
            _fills_blocks(node.args[1].meta["val"])
            for node in graph.find_nodes(op="call_function", target=aten.convolution.default)
        )

    @property
    def rules(self) -> dict[Any, Callable[..., Any]]:
        """By operator, the function that computes it."""
        return {
            aten.convolution.default: self.convolution,
            aten.convolution_backward.default: self.convolution_backward,
        }

    def _windows(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        transposed: bool,
        groups: int,
    ) -> Windows | None:
        """Return the windows to gather, or None if the library does better."""
        if transposed or groups > 1 or not x.dim() == weight.dim() > 2 or x.dtype != torch.float32:
            return None
        if x.shape[0] < LEAST_INNERMOST or x.shape[1] >= _FEW_CHANNELS:
            return None
        if self._follow_blocks and weight.shape[0] >= _BLOCK:
            return None
        windows = Windows.of(x.shape[2:], weight.shape[2:], stride, padding, dilation)
        elements = x.shape[0] * torch.Size(windows.count).numel() * weight[0].numel()
        return windows if elements * x.element_size() <= _MOST_GATHERED else None

    def convolution(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        transposed: bool,
        output_padding: Sequence[int],
        groups: int,
    ) -> Any:
        """Rule for ``aten.convolution``."""
        windows = self._windows(x, weight, stride, padding, dilation, transposed, groups)
        if windows is None:
            x, weight = _library_layout(weight, x, weight)
            geometry = (stride, padding, dilation, transposed, output_padding, groups)
            return aten.convolution.default(x, weight, bias, *geometry)
        columns = windows.columns(batch_last(x))
        flat = torch.mm(weight.reshape(weight.shape[0], -1), columns)
        y = batch_first(flat.view(weight.shape[0], *windows.count, x.shape[0]))
        return y if bias is None else y + bias.view(-1, *(1,) * len(windows.space))

    def convolution_backward(
        self,
        grad: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias_sizes: Sequence[int] | None,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        transposed: bool,
        output_padding: Sequence[int],
        groups: int,
        mask: Sequence[bool],
    ) -> Any:
        """Rule for ``aten.convolution_backward``."""
        windows = self._windows(x, weight, stride, padding, dilation, transposed, groups)
        if windows is None:
            operands = _library_layout(weight, grad, x, weight)
            geometry = (stride, padding, dilation, transposed, output_padding, groups)
            return aten.convolution_backward.default(*operands, bias_sizes, *geometry, mask)
        outputs, inputs = weight.shape[:2]
        flat = stored(batch_last(grad), outputs, grad.numel() // outputs)
        x_grad = weight_grad = bias_grad = None
        if mask[1]:
            columns = windows.columns(batch_last(x))
            weight_grad = torch.mm(flat, columns.t()).view(weight.shape)
        if mask[2]:
            bias_grad = flat.sum(1)
        if mask[0]:
            products = torch.mm(weight.reshape(outputs, -1).t(), flat)
            products = products.view(inputs, -1, *windows.count, x.shape[0])
            x_last = products[:, 0] if windows.trivial else windows.fold(products.unbind(1))
            x_grad = batch_first(stored(x_last, *x_last.shape))
        return x_grad, weight_grad, bias_grad


def _fills_blocks(weight: torch.Tensor) -> bool:
    return min(weight.shape[:2]) >= _BLOCK


def _library_layout(weight: torch.Tensor, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the operands channels-last if the channels fill blocks, else row-major."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    wide = weight.shape[0] >= _BLOCK
    layout = formats.get(weight.dim()) if wide else None
    return tuple(t.contiguous(memory_format=layout or torch.contiguous_format) for t in operands)
