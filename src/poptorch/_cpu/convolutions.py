"""Compute convolutions as products of gathered windows if this is faster than the library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .._ir.symbolic import has_symbols
from .kernels import Kernel, Kernels
from .product_libraries import LARGE_PRODUCT, LARGE_WEIGHT, SMALLEST
from .windows import (
    LEAST_INNERMOST,
    Windows,
    batch_first,
    batch_last,
    channels_first,
    channels_last,
    stored,
)  # fmt: skip

aten = torch.ops.aten
_FEW_CHANNELS = 8
_BLOCK = 16
# largest number of bytes of windows, for many images and for a few
_GATHERED, _FEW_GATHERED = 8 << 20, 5 << 17


class Convolutions:
    """The kernels for the convolutions of one graph. They apply to all convolutions:
    those that they do not compute as products are passed to the library, in its fastest layout.

    oneDNN works on blocks of 16 channels. With very few channels, most of a block is padding, and
    each call repacks its operands. A product of the weights with the gathered windows wastes
    nothing. Without it, a step of the tutorial's CNN (1 and 5 input channels) takes 1.75 times as
    long with a micro-batch of 16, and 1.45 times with 8 of them. This is lost if the windows are
    larger than the caches (8 channels, batch 128: 60 ms instead of 33), and even earlier with few
    images.

    Convolutions that fill the blocks run channels-last, which needs no repacking (without it, a
    step with the shape of a ResNet-18 takes 1.06 times as long). The first layers of such a network
    do so, too, because operators between two layouts cannot be vectorised (1.29 times).

    A call of oneDNN takes about 40 us before it computes. Small convolutions are therefore also
    products of gathered windows, with channels innermost. This ResNet then takes 0.86 ms instead of
    1.3 for one image, and 4.3 instead of 5.2 for a training step with one.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._follow_blocks = any(
            min(node.args[1].meta["val"].shape[:2]) >= _BLOCK
            for node in graph.find_nodes(op="call_function", target=aten.convolution.default)
        )

    @property
    def kernels(self) -> Kernels:
        return {
            aten.convolution.default: Kernel(self.convolution),
            aten.convolution_backward.default: Kernel(self.convolution_backward),
        }

    def gathered(
        self, x: torch.Tensor, weight: torch.Tensor, *geometry: Any
    ) -> BatchLast | ChannelsLast | None:
        """Return the product that replaces a convolution; None if the library is faster."""
        stride, padding, dilation, transposed, _output_padding, groups = geometry
        if transposed or groups > 1 or not x.dim() == weight.dim() > 2 or x.dtype != torch.float32:
            return None
        if has_symbols(x.shape[2:]):  # windows are views, whose sizes and strides are numbers
            return None
        windows = Windows.of(x.shape[2:], weight.shape[2:], stride, padding, dilation)
        elements = x.shape[0] * torch.Size(windows.count).numel() * weight[0].numel()
        work, size = elements * weight.shape[0], elements * x.element_size()
        if x.shape[1] < _FEW_CHANNELS and not (self._follow_blocks and weight.shape[0] >= _BLOCK):
            many = x.shape[0] >= LEAST_INNERMOST
            if size <= (_GATHERED if many else _FEW_GATHERED):
                return BatchLast(windows)
        if windows.are_elements:
            is_small = work <= LARGE_PRODUCT and weight.numel() < LARGE_WEIGHT
        else:
            is_small = work <= SMALLEST and size <= _FEW_GATHERED
        return ChannelsLast(windows) if is_small else None

    def convolution(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *geometry: Any
    ) -> Any:
        gathered = self.gathered(x, weight, *geometry)
        if gathered is not None:
            return gathered.product(x, weight, bias)
        x, weight = _library_layout(weight, x, weight)
        return aten.convolution.default(x, weight, bias, *geometry)

    def convolution_backward(
        self,
        grad: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias_sizes: Sequence[int] | None,
        *rest: Any,
    ) -> Any:
        *geometry, mask = rest
        gathered = self.gathered(x, weight, *geometry)
        if gathered is None:
            operands = _library_layout(weight, grad, x, weight)
            return aten.convolution_backward.default(*operands, bias_sizes, *rest)
        flat = gathered.flat(grad)
        return (
            gathered.of_source(flat, x, weight) if mask[0] else None,
            gathered.of_weight(flat, x, weight) if mask[1] else None,
            flat.sum(gathered.over) if mask[2] else None,
        )


@dataclass(frozen=True)
class BatchLast:
    """The product with the batch innermost, and its gradients."""

    windows: Windows
    over = 1  # the dimension of a flat gradient that is not the channels

    def product(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        windows, outputs = self.windows, weight.shape[0]
        y = torch.mm(weight.reshape(outputs, -1), windows.columns(batch_last(x)))
        y = batch_first(y.view(outputs, *windows.count, x.shape[0]))
        return y if bias is None else y + bias.view(-1, *(1,) * len(windows.space))

    def flat(self, grad: torch.Tensor) -> torch.Tensor:
        """Reshape (batch, output, *count) to (output, windows * batch)."""
        outputs = grad.shape[1]
        return stored(batch_last(grad), outputs, grad.numel() // outputs)

    def of_weight(self, flat: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.mm(flat, self.windows.columns(batch_last(x)).t()).view(weight.shape)

    def of_source(self, flat: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        outputs, inputs = weight.shape[:2]
        taps = torch.mm(weight.reshape(outputs, -1).t(), flat)
        taps = taps.view(inputs, -1, *self.windows.count, x.shape[0])
        source = self.windows.fold(taps.unbind(1))
        return batch_first(stored(source, *source.shape))


@dataclass(frozen=True)
class ChannelsLast:
    """The product with channels innermost, and its gradients."""

    windows: Windows
    over = 0

    def product(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        y = torch.mm(self.windows.rows(channels_last(x)), _by_tap(weight))
        y = y.view(x.shape[0], *self.windows.count, -1)
        return channels_first(y if bias is None else y + bias)

    def flat(self, grad: torch.Tensor) -> torch.Tensor:
        """Reshape (batch, output, *count) to (batch * windows, output)."""
        outputs = grad.shape[1]
        return stored(channels_last(grad), grad.numel() // outputs, outputs)

    def of_weight(self, flat: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        outputs, inputs = weight.shape[:2]
        taps = torch.mm(flat.t(), self.windows.rows(channels_last(x)))
        return channels_first(taps.view(outputs, *self.windows.kernel, inputs))

    def of_source(self, flat: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        taps = torch.mm(flat, _by_tap(weight).t())
        taps = taps.view(x.shape[0], *self.windows.count, -1, weight.shape[1])
        source = self.windows.fold(taps.unbind(-2))
        return channels_first(stored(source, *source.shape))


def taps_first(dims: int) -> tuple[int, ...]:
    """Return the dimension order in which ``ChannelsLast`` reads a weight with this number of
    dimensions.
    """
    return *range(2, dims), 1, 0


def _by_tap(weight: torch.Tensor) -> torch.Tensor:
    """Reshape (output, input, *kernel) to (taps * input, output)."""
    return weight.permute(taps_first(weight.dim())).reshape(-1, weight.shape[0])


def _library_layout(weight: torch.Tensor, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the operands channels-last if the channels fill blocks, else row-major."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    layout = formats.get(weight.dim()) if weight.shape[0] >= _BLOCK else None
    return tuple(t.contiguous(memory_format=layout or torch.contiguous_format) for t in operands)
