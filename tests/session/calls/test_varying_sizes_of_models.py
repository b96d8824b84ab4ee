"""Parts of models that people write every day: one program serves all sizes of each."""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from helpers.cases import slow_but
from helpers.wrapping import EagerPair, Having, compilations, normal, options, runs_compiled

Shape = tuple[int, ...]


class Part(nn.Module):
    """A part of a model, and the mean of the squares of its result as loss."""

    def __init__(self, function: Callable[..., Any], **state: Any) -> None:
        super().__init__()
        self.part = Having(function, **state)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        result = self.part(x)
        return result, poptorch.identity_loss(result.square(), reduction="mean")


def positions(m: Having, x: torch.Tensor) -> torch.Tensor:
    length, width = x.shape[1:]
    table, at = torch.zeros(length, width), torch.arange(length).unsqueeze(1)
    factor = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
    table[:, 0::2] = torch.sin(at * factor)
    table[:, 1::2] = torch.cos(at * factor)
    return m.linear(x) + table  # type: ignore[no-any-return]


def with_future_hidden(m: Having, x: torch.Tensor) -> torch.Tensor:
    length = x.shape[1]
    future = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)
    return m.attention(x, x, x, need_weights=False, attn_mask=future)[0]  # type: ignore[no-any-return]


def attended(m: Having, x: torch.Tensor) -> torch.Tensor:
    return m.attention(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]


def with_padding_and_weights(m: Having, x: torch.Tensor) -> torch.Tensor:
    padded = torch.arange(x.shape[1]) >= torch.tensor([[3], [5], [4]])
    found, weights = m.attention(x, x, x, key_padding_mask=padded)
    return found * weights.sum(1)[..., None]  # type: ignore[no-any-return]


def resized(mode: str) -> Callable[..., torch.Tensor]:
    """A table that is resized to the patches of an image, as in vision transformers."""

    def forward(m: Having, x: torch.Tensor) -> torch.Tensor:
        patches = m.patches(x)
        table = F.interpolate(m.table, size=patches.shape[2:], mode=mode)
        return (patches + table).flatten(2).transpose(1, 2)  # type: ignore[no-any-return]

    return forward


def line(m: Having, x: torch.Tensor) -> torch.Tensor:
    table = F.interpolate(m.table, size=x.shape[1], mode="linear").transpose(1, 2)
    return m.linear(x) + table  # type: ignore[no-any-return]


def windows(m: Having, x: torch.Tensor) -> torch.Tensor:
    """Attention in windows of 4 positions, for which the input is padded."""
    rows, length, width = x.shape
    padding = (4 - length % 4) % 4
    parts = F.pad(x, (0, 0, 0, padding)).view(rows, (length + padding) // 4, 4, width)
    found = (m.linear(parts) @ parts.transpose(2, 3)).softmax(-1) @ parts
    whole = found.reshape(rows, length + padding, width)
    return whole[:, :length].contiguous()


def quarters(m: Having, x: torch.Tensor) -> torch.Tensor:
    count, rest = divmod(x.shape[1], 4)
    return m.linear(x)[:, : count * 4] * (rest + 1)  # type: ignore[no-any-return]


def parts_of_half(m: Having, x: torch.Tensor) -> torch.Tensor:
    return m.linear(x).split(x.shape[1] // 2, 1)[0]  # type: ignore[no-any-return]


def smaller(m: Having, x: torch.Tensor) -> torch.Tensor:
    return F.pixel_unshuffle(m.convolution(x), 2)


def mean(m: Having, x: torch.Tensor) -> torch.Tensor:
    return m.linear(x).sum(1) / torch.tensor(x.shape[1])  # type: ignore[no-any-return]


def scaled(m: Having, x: torch.Tensor) -> torch.Tensor:
    """Factors from tensors of sizes and other numbers, of which only some are symbolic."""
    rows, length, width = x.shape
    root = torch.sqrt(torch.tensor(length, dtype=torch.float32))
    others = torch.as_tensor([float(length), 2.0, width]).sum() + torch.tensor([1.0, 2.0]).sum()
    return m.linear(x) * root / others / x.new_tensor([rows, length]).sum()  # type: ignore[no-any-return]


def steps(m: Having, x: torch.Tensor) -> torch.Tensor:
    length = x.shape[1]
    along = torch.linspace(-1, 1, length) + torch.linspace(0, length - 1, length)
    return m.linear(x) * along[:, None] + torch.linspace(0, 1, 8)  # type: ignore[no-any-return]


def filtered(m: Having, x: torch.Tensor) -> torch.Tensor:
    """A filter of frequencies along the length, and Fourier transforms of both dimensions."""
    length = x.shape[1]
    spectrum = torch.fft.rfft(m.linear(x), n=length, dim=1)
    kept = torch.fft.irfft(spectrum * torch.arange(length // 2 + 1)[:, None], n=length, dim=1)
    return kept + torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real


def ordered(m: Having, x: torch.Tensor) -> torch.Tensor:
    """Values in the order of others, and running maxima."""
    values = m.linear(x)
    return values.gather(1, x.argsort(1)) + values.cummax(1)[0]  # type: ignore[no-any-return]


def patchwork(m: Having, x: torch.Tensor) -> torch.Tensor:
    """Overlapping patches of a picture, which are put together again."""
    patches = F.unfold(m.linear(x)[:, None], (2, 2))
    return F.fold(patches.square(), x.shape[1:], (2, 2))


def rotated(m: Having, x: torch.Tensor) -> torch.Tensor:
    """Rotary embeddings with complex numbers."""
    rows, length, width = x.shape
    frequencies = 1.0 / (10000 ** (torch.arange(0, width, 2).float() / width))
    angles = torch.outer(torch.arange(length), frequencies)
    pairs = torch.view_as_complex(m.linear(x).reshape(rows, length, -1, 2))
    rotations = torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(pairs * rotations).flatten(2)


def products(m: Having, x: torch.Tensor) -> torch.Tensor:
    return m.bilinear(x, x)  # type: ignore[no-any-return]


def recurrent(m: Having, x: torch.Tensor) -> torch.Tensor:
    y, last = m.layer(x)
    return y + (last[0] if isinstance(last, tuple) else last).mean()  # type: ignore[no-any-return]


def with_linear(**state: Any) -> dict[str, Any]:
    return {"linear": nn.Linear(8, 8), **state}


def with_bilinear() -> dict[str, Any]:
    return {"bilinear": nn.Bilinear(8, 8, 4)}


def with_patches() -> dict[str, Any]:
    return {"patches": nn.Conv2d(3, 8, 4, 4), "table": nn.Parameter(normal(1, 8, 6, 6))}


def with_convolution() -> dict[str, Any]:
    return {"convolution": nn.Conv2d(3, 8, 3, padding=1)}


def with_recurrent(kind: type[nn.Module]) -> Callable[[], dict[str, Any]]:
    return lambda: {"layer": kind(8, 8, num_layers=2, bidirectional=True, batch_first=True)}


def with_attention() -> dict[str, Any]:
    return {"attention": nn.MultiheadAttention(8, 2, batch_first=True)}


def with_table() -> dict[str, Any]:
    return with_linear(table=nn.Parameter(normal(1, 8, 16)))


LENGTHS: tuple[Shape, ...] = tuple((3, length, 8) for length in (5, 9, 12, 20, 31, 40))
SIDES: tuple[Shape, ...] = tuple(
    (2, 3, 4 * one, 4 * two) for one, two in ((3, 4), (5, 8), (7, 9), (4, 6), (8, 11), (10, 12))
)
# The number of rows is the length.
SQUARES: tuple[Shape, ...] = tuple((side, side, 8) for side in (5, 7, 9, 12, 20, 31))
Model = tuple[Callable[..., torch.Tensor], Callable[[], dict[str, Any]], Sequence[Shape]]
MODELS: dict[str, Model] = {
    "sinusoidal positions": (positions, with_linear, LENGTHS),
    "attention with a mask": (with_future_hidden, with_attention, LENGTHS),
    "attention with padding and weights": (with_padding_and_weights, with_attention, LENGTHS),
    "attention in squares": (attended, with_attention, SQUARES),
    "a bicubic table": (resized("bicubic"), with_patches, SIDES),
    "a bilinear table": (resized("bilinear"), with_patches, SIDES),
    "a nearest table": (resized("nearest"), with_patches, SIDES),
    "a nearest-exact table": (resized("nearest-exact"), with_patches, SIDES),
    "a linear table": (line, with_table, LENGTHS),
    "a tensor with the length": (mean, with_linear, LENGTHS),
    "tensors with sizes": (scaled, with_linear, LENGTHS),
    "linspace": (steps, with_linear, LENGTHS),
    "spectra": (filtered, with_linear, LENGTHS),
    "sorted positions": (ordered, with_linear, LENGTHS),
    "overlapping patches": (patchwork, with_linear, LENGTHS),
    "complex rotations": (rotated, with_linear, LENGTHS),
    "an LSTM": (recurrent, with_recurrent(nn.LSTM), LENGTHS),
    "a GRU": (recurrent, with_recurrent(nn.GRU), LENGTHS),
    "a simple recurrent layer": (recurrent, with_recurrent(nn.RNN), LENGTHS),
    "products of two inputs": (products, with_bilinear, LENGTHS),
    "windows": (windows, with_linear, LENGTHS),
    "quotients and remainders": (quarters, with_linear, LENGTHS),
    "parts of half the length": (parts_of_half, with_linear, LENGTHS),
    "pixels that become channels": (smaller, with_convolution, SIDES),
}
# Multiples of 4 are not padded or cut, and even lengths have no rest: these have another program.
CASES_OF_SIZES = {"windows": 3, "quotients and remainders": 3, "parts of half the length": 3}
# Torch's compiler uses sizes of these as numbers, so the code for each size is its own.
INTERPRETED = {"parts of half the length"}
WITH_NUMBERS_IN_TRAINING = {*INTERPRETED, "a nearest table", "a nearest-exact table"}


def part(name: str) -> tuple[Part, list[Shape]]:
    """Return a model, and shapes of its inputs."""
    torch.manual_seed(0)
    function, state, shapes = MODELS[name]
    return Part(function, **state()), [*shapes]


def orders(shapes: list[Shape], order: str) -> list[Shape]:
    """Return shapes with the smallest first, or with the largest first."""
    return shapes if order == "small first" else [shapes[-1], *shapes[:-1]]


def compared_with_eager(
    name: str, order: str, backend: str = "reference"
) -> tuple[poptorch.PoplarExecutor, int]:
    """Infer at all sizes next to eager PyTorch; return the executor and the number of programs."""
    model, shapes = part(name)
    model.eval()
    eager = copy.deepcopy(model)
    executor = poptorch.inferenceModel(model, options(backend).programs(4))
    with compilations() as compiled, torch.no_grad():
        for shape in orders(shapes, order):
            x = normal(*shape)
            torch.testing.assert_close(executor(x), eager(x))
    return executor, len(compiled)


def trained_with_eager(name: str, order: str, backend: str = "reference") -> tuple[EagerPair, int]:
    """Train at all sizes next to eager PyTorch; return both and the number of programs."""
    model, shapes = part(name)
    close = {"rtol": 1.3e-6, "atol": 1e-5}
    pair = EagerPair(
        model, lambda p: torch.optim.SGD(p, lr=0.05), options(backend).programs(4), **close
    )
    with compilations() as compiled:
        for shape in orders(shapes, order):
            pair.step(normal(*shape))
    pair.compare()
    return pair, len(compiled)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["small first", "large first"])
@pytest.mark.parametrize("name", slow_but(MODELS, "sinusoidal positions", "a bicubic table"))
def test_one_program_infers_at_all_sizes(name: str, order: str) -> None:
    executor, compiled = compared_with_eager(name, order)

    assert executor._session.sizes.reasons == {}
    assert compiled == CASES_OF_SIZES.get(name, 2)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["small first", "large first"])
@pytest.mark.parametrize("name", slow_but(MODELS, "sinusoidal positions", "a bicubic table"))
def test_one_program_trains_at_all_sizes(name: str, order: str) -> None:
    pair, compiled = trained_with_eager(name, order)

    assert pair.wrapped._session.sizes.reasons == {}
    assert compiled == CASES_OF_SIZES.get(name, 2)


@pytest.mark.larger("test_one_program_infers_at_all_sizes")
@pytest.mark.parametrize("name", [name for name in MODELS if name not in INTERPRETED])
def test_compiled_code_infers_at_all_sizes(name: str) -> None:
    executor, compiled = compared_with_eager(name, "small first", "inductor")

    assert compiled == CASES_OF_SIZES.get(name, 2)
    assert runs_compiled(executor)


@pytest.mark.larger("test_one_program_trains_at_all_sizes")
@pytest.mark.parametrize("name", [n for n in MODELS if n not in WITH_NUMBERS_IN_TRAINING])
def test_compiled_code_trains_at_all_sizes(name: str) -> None:
    pair, compiled = trained_with_eager(name, "small first", "inductor")

    assert compiled == CASES_OF_SIZES.get(name, 2)
    assert runs_compiled(pair.wrapped)
