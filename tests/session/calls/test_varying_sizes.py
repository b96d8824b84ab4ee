"""Inputs that differ in sizes alone: one program for all of them, or the reason why not."""

import copy
import math
import sys
from collections.abc import Callable
from math import sqrt
from numbers import Integral
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import poptorch
from helpers import exported, programs
from helpers.cases import slow_but, slow_but_the_first
from helpers.closeness import FUNCTION, near, relative
from helpers.patience import eventually
from helpers.wrapping import Having, compilations, infer, normal, options, runs_compiled
from poptorch._compile import cache, tiers
from poptorch._compile.cache import key_of
from poptorch._cpu import Inductor, compiler
from poptorch._ir.symbolic import NotSymbolic

LENGTHS = (5, 9, 12, 3, 20, 39, 2, 31, 17, 6, 7, 8, 10, 11, 13, 14, 15, 16, 18, 19)


class Attention(nn.Module):
    """Embeddings, a buffer of positions that is cut to the length, and an attention layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.linear = nn.Embedding(50, 16), nn.Linear(16, 16)
        self.register_buffer("positions", normal(40, 16))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, length = x.shape
        values = self.embedding(x) + self.positions[:length]
        heads = self.linear(values).view(rows, length, 2, 8).transpose(1, 2)
        found = nn.functional.scaled_dot_product_attention(heads, heads, heads)
        found = found.transpose(1, 2).reshape(rows, length, 16)
        return found.softmax(-1), found.mean(1) / length**0.5


def tokens(rows: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * 100 + length)
    return torch.randint(0, 50, (rows, length), generator=generator)


def wrapped(
    model: nn.Module, programs: int = 4, backend: str = "reference"
) -> poptorch.PoplarExecutor:
    opts = options(backend).programs(programs).checkAgainstEager("error")
    return poptorch.inferenceModel(model, opts)


def of(function: Callable[..., Any], **state: Any) -> nn.Module:
    """A model that computes with a linear layer, and a function of it and its input."""
    return Having(function, linear=nn.Linear(8, 8), **state).eval()


def equal_to_eager(
    model: nn.Module, *shapes: tuple[int, ...], programs: int = 4
) -> poptorch.PoplarExecutor:
    """Call a wrapped model with inputs of several shapes; return the executor."""
    executor = wrapped(model, programs)
    for shape in shapes:
        x = normal(*shape)
        with torch.no_grad():
            expected = copy.deepcopy(model)(x.clone())
        torch.testing.assert_close(executor(x), expected)
    return executor


def test_the_second_size_is_the_last_that_is_compiled() -> None:
    model = Attention().eval()
    executor = wrapped(model)
    with compilations() as compiled:
        found = [executor(tokens(4, length)) for length in LENGTHS]
    with torch.no_grad():
        expected = [model(tokens(4, length)) for length in LENGTHS]

    assert len(compiled) == 2
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_compiled_code_serves_all_sizes() -> None:
    model = of(lambda m, x: m.linear(x).softmax(1))
    executor = wrapped(model, backend="inductor")
    with compilations() as compiled:
        found = [executor(normal(2, length, 8)) for length in LENGTHS]
    with torch.no_grad():
        expected = [model(normal(2, length, 8)) for length in LENGTHS]

    assert len(compiled) == 2
    assert runs_compiled(executor)
    torch.testing.assert_close(found, expected)


@pytest.mark.larger("test_compiled_code_serves_all_sizes")
def test_compiled_attention_serves_all_sizes() -> None:
    model = Attention().eval()
    executor = wrapped(model, backend="inductor")
    with compilations() as compiled:
        found = [executor(tokens(4, length)) for length in LENGTHS]
    with torch.no_grad():
        expected = [model(tokens(4, length)) for length in LENGTHS]

    assert len(compiled) == 2
    assert runs_compiled(executor)
    torch.testing.assert_close(found, expected)


class Summing(nn.Module):
    """Torch's compiler adds more than 4096 numbers in another way than fewer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sum(0)


def lengths_served(executor: poptorch.PoplarExecutor, *lengths: int) -> None:
    """Call with inputs of some lengths, and compare with eager PyTorch."""
    for length in lengths:
        x = normal(length, 8)
        expected = executor._session.model.module(x).detach()
        torch.testing.assert_close(executor(x), expected, **near(length + FUNCTION, size=4.0))


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Use an empty cache of compiled code; return the keys of what is compiled from now on."""
    keys, build = list[str](), cache.Store.build
    monkeypatch.setattr(cache, "default_store", lambda: cache.Store(tmp_path))
    monkeypatch.setattr(cache, "_loaded", {})

    def building(self: cache.Store, key: str, *rest: Any) -> Any:
        keys.append(key)
        return build(self, key, *rest)

    monkeypatch.setattr(cache.Store, "build", building)
    return keys


@pytest.mark.larger("test_compiled_code_serves_all_sizes")
def test_an_assumption_of_the_compiler_is_a_condition_of_its_code(built: list[str]) -> None:
    executor = wrapped(Summing().eval(), backend="inductor")
    lengths_served(executor, 5, 9, 4000, 30)

    assert len(built) == 2  # for 5 rows, and for up to 4096
    lengths_served(executor, 5000, 4096, 9000, 12)
    assert len(built) == 3
    assert runs_compiled(executor)
    assert executor._session.now.inputs.symbols


@pytest.mark.larger("test_compiled_code_serves_all_sizes")
def test_stored_code_keeps_its_conditions(built: list[str]) -> None:
    lengths_served(wrapped(Summing().eval(), backend="inductor"), 5, 9, 5000)
    before = len(built)
    cache._loaded.clear()
    executor = wrapped(Summing().eval(), backend="inductor")
    lengths_served(executor, 5, 9, 5000, 4096, 4097)

    assert len(built) == before
    assert runs_compiled(executor)


@pytest.mark.larger("test_compiled_code_serves_all_sizes")
def test_sizes_beyond_those_of_the_code_are_interpreted_until_theirs_is_compiled(
    built: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "SHARE", 0.0)
    executor = wrapped(Summing().eval(), backend="auto")
    lengths_served(executor, 5, 9)
    assert eventually(lambda: lengths_served(executor, 9) or not executor._executable.waiting)

    lengths_served(executor, 5000)
    assert executor._executable.waiting
    assert eventually(lambda: lengths_served(executor, 5000) or not executor._executable.waiting)
    lengths_served(executor, 9, 5000)
    assert not executor._executable.waiting


def key_after(*lengths: int) -> str | None:
    executor = wrapped(Attention().eval())
    for length in lengths:
        executor(tokens(4, length))
    (graph,) = executor._session.now.compiled.plan.program.graphs.values()
    return key_of(graph, Inductor())


def test_one_entry_of_the_cache_serves_all_sizes_in_any_order() -> None:
    assert key_after(5, 9) == key_after(31, 12)


WITH_CACHE = """
import sys
import torch
from torch import nn
import poptorch

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.Softmax(1)).eval()
opts = poptorch.Options().backend("inductor").programs(3).enableExecutableCaching(sys.argv[1])
executor = poptorch.inferenceModel(model, opts)
for length in map(int, sys.argv[2:]):
    x = torch.randn(2, length, 8)
    torch.testing.assert_close(executor(x), model(x).detach())
assert "for all sizes" in str(executor.plan())
assert executor._executable.report().backend == "inductor"
"""


@pytest.mark.larger("test_compiled_code_serves_all_sizes")
def test_one_entry_of_the_cache_serves_all_sizes_in_another_process(tmp_path: Path) -> None:
    cached = tmp_path / "cache"
    cached.mkdir(mode=0o700)
    environment = programs.with_ours()
    first = programs.run("-c", WITH_CACHE, cached, 5, 9, environment=environment)
    entries = {path.name: path.stat().st_ino for path in cached.iterdir()}

    second = programs.run("-c", WITH_CACHE, cached, 5, 31, 12, 7, environment=environment)

    assert first.returncode == 0, first.stderr
    assert second.returncode == 0, second.stderr
    assert len(entries) >= 2  # for the first length, and for all
    # A file that is written again is another file with the same name.
    assert {path.name: path.stat().st_ino for path in cached.iterdir()} == entries


def test_a_program_for_all_sizes_takes_the_place_of_that_for_the_first_size() -> None:
    executor = wrapped(Attention().eval())
    executor(tokens(4, 5))
    executor(tokens(4, 9))
    with compilations() as compiled:
        executor(tokens(4, 5))

    assert compiled == []
    assert len(executor._session.programs.all) == 1


def test_a_size_of_one_has_its_own_program() -> None:
    executor = wrapped(Attention().eval())
    with compilations() as compiled:
        for length in (1, 2, 3, 1, 4):
            executor(tokens(4, length))

    assert len(compiled) == 2


def test_a_branch_on_a_size_has_a_program_for_each_side() -> None:
    model = of(lambda m, x: m.linear(x) * 2 if x.shape[1] > 16 else m.linear(x))
    with compilations() as compiled:
        equal_to_eager(model, *((4, length, 8) for length in (5, 30, 7, 16, 17, 40, 5)))

    assert len(compiled) == 3


def test_sizes_that_follow_each_other_are_followed() -> None:
    """A mask and the cache to which it belongs have such sizes."""
    executor = wrapped(Having(lambda m, x, mask: x.sum(1) + mask[:, 1:].sum(1)))
    with compilations() as compiled:
        for length in range(1, 30):
            executor(normal(2, length), normal(2, length + 1))

    assert len(compiled) == 2


def test_a_cache_that_grows_is_compiled_twice() -> None:
    def step(
        model: Having, x: torch.Tensor, cache: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cache = torch.cat([cache, model.linear(x)], 1)
        weights = (x @ cache.mT).softmax(-1)
        return weights @ cache, cache

    model = of(step)
    executor, cache, expected = wrapped(model), normal(2, 1, 8), normal(2, 1, 8)
    with compilations() as compiled, torch.no_grad():
        for position in range(127):
            x = normal(2, 1, 8, seed=position)
            found, cache = executor(x, cache)
            expected_values, expected = model(x, expected)
            torch.testing.assert_close(found, expected_values)

    assert cache.shape == (2, 128, 8)
    assert len(compiled) == 2


def in_heads(model: Having, x: torch.Tensor) -> torch.Tensor:
    """Attention with 4 heads, each with its own factor."""
    heads = model.linear(x).unflatten(-1, (4, 2)).transpose(1, 2)
    scores = heads @ heads.mT * model.linear.bias[:4, None, None]
    return (scores.softmax(-1) @ heads).transpose(1, 2).flatten(2)


EQUAL_BY_CHANCE = {
    "rows and heads": ((3, 7, 8), (4, 12, 8), (5, 9, 8), (4, 6, 8)),
    "rows and heads, at first": ((4, 7, 8), (3, 12, 8), (4, 9, 8), (7, 5, 8)),
    "length and features": ((3, 7, 8), (3, 8, 8), (3, 6, 8), (3, 4, 8)),
    "rows and length": ((3, 7, 8), (5, 5, 8), (4, 9, 8), (8, 4, 8)),
    "one and the other": ((8, 5, 8), (4, 8, 8), (7, 6, 8), (4, 4, 8)),
}


@pytest.mark.parametrize("shapes", EQUAL_BY_CHANCE.values(), ids=EQUAL_BY_CHANCE)
def test_a_size_may_equal_one_that_is_fixed(shapes: tuple[tuple[int, ...], ...]) -> None:
    with compilations() as compiled:
        executor = equal_to_eager(of(in_heads), *shapes)

    assert executor._session.sizes.reasons == {}
    assert len(compiled) == 2


@pytest.mark.larger("test_compiled_code_serves_all_sizes")
@pytest.mark.parametrize("shapes", EQUAL_BY_CHANCE.values(), ids=EQUAL_BY_CHANCE)
def test_compiled_code_serves_sizes_that_equal_fixed_ones(
    shapes: tuple[tuple[int, ...], ...],
) -> None:
    model = of(in_heads)
    executor = wrapped(model, backend="inductor")
    for shape in shapes:
        x = normal(*shape)
        torch.testing.assert_close(executor(x), model(x).detach())

    assert runs_compiled(executor)
    assert len(executor._session.programs.all) == 1


@pytest.mark.larger("test_a_size_may_equal_one_that_is_fixed")
def test_two_sizes_that_were_equal_in_the_first_calls_may_differ_later() -> None:
    shapes = ((8, 8, 8), (4, 4, 8), (5, 7, 8), (3, 9, 8), (6, 6, 8))
    with compilations() as compiled:
        executor = equal_to_eager(of(in_heads), *shapes)

    assert len(compiled) == 3
    assert "float32[s0, s1, 8]" in str(executor.plan())


def is_compared(model: Having, x: torch.Tensor) -> torch.Tensor:
    return model.linear(x) * (3.0 if x.shape[0] == 4 else 2.0)


@pytest.mark.parametrize("first", [3, 4, 8])
def test_a_size_that_is_compared_with_a_number_may_equal_it(first: int) -> None:
    executor = equal_to_eager(of(is_compared), *((rows, 5, 8) for rows in (first, 4, 7)))
    with compilations() as compiled:
        for rows in (2, 9, 4):
            x = normal(rows, 5, 8)
            torch.testing.assert_close(executor(x), executor._session.model.module(x).detach())

    assert compiled == []
    assert len(executor._session.programs.all) == 2


def test_without_an_option_a_size_that_is_compared_with_a_number_may_equal_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    executor = by_default(is_compared, caplog)
    for rows in (3, 4, 7, 2, 4):
        x = normal(rows, 5, 8)
        torch.testing.assert_close(executor(x), executor._session.model.module(x).detach())

    (message,) = caplog.messages
    assert "float32[4, 5, 8]" in message
    assert executor._session.sizes.reasons == {}


def test_the_plan_says_which_condition_excludes_the_sizes_at_hand() -> None:
    executor = equal_to_eager(of(is_compared), (3, 5, 8), (4, 5, 8))

    assert "do not satisfy Ne(s0, 4)" in str(executor.plan())


@pytest.mark.larger("test_two_dimensions_that_vary_have_two_symbols")
def test_the_sides_of_square_images_vary() -> None:
    def forward(model: Having, x: torch.Tensor) -> torch.Tensor:
        return model.linear(x.permute(0, 2, 3, 1)).relu()

    with compilations() as compiled:
        executor = equal_to_eager(of(forward), *((2, 8, side, side) for side in (6, 4, 9, 8)))

    assert executor._session.sizes.reasons == {}
    assert len(compiled) == 2


DERIVED = {
    "a convolution without padding": lambda m, x: m.convolution(x),
    "a convolution with a stride": lambda m, x: m.strided(x) * 2,
    "all but the ends": lambda m, x: x[:, :, 1:-1] * 2,
    "neighbours": lambda m, x: x[:, :, 1:] - x[:, :, :-1],
    "pooling": lambda m, x: nn.functional.avg_pool1d(x * 2, 2) + 1,
    "both": lambda m, x: nn.functional.max_pool2d(m.convolution(x), (1, 2)) * 2,
}


def convolutional(function: Callable[..., Any]) -> nn.Module:
    torch.manual_seed(0)
    layers = {"convolution": nn.Conv1d(4, 6, 3), "strided": nn.Conv1d(4, 6, 3, stride=2)}
    return Having(function, **layers).eval()


interpolate = nn.functional.interpolate
NUMBERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "float": lambda x: float(x.shape[1]),
    "a quotient": lambda x: 1 / x.shape[1],
    "a quotient of a float": lambda x: 1.0 / float(x.shape[1]),
    "math.sqrt": lambda x: math.sqrt(x.shape[1]),
    "sqrt": lambda x: 1 / sqrt(x.shape[1]),
    "a power": lambda x: x.shape[1] ** -0.5,
    "a power of a float": lambda x: float(x.shape[1]) ** 0.5,
    "a sum": lambda x: float(x.shape[1]) + 0.5,
    "the larger one": lambda x: max(float(x.shape[1]), 1.0),
    "len": lambda x: len(x[0]),
    "numel": lambda x: x.numel(),
    "a half": lambda x: int(x.shape[1] / 2),
    "a part": lambda x: int(x.shape[1] * 0.75),
    "rounded up": lambda x: math.ceil(x.shape[1] / 2),
    "rounded down": lambda x: math.floor(x.shape[1] / 2),
    "rounded": lambda x: round(x.shape[1] * 0.6),
    "a quotient and a remainder": lambda x: sum(divmod(x.shape[1], 4)),
}


@pytest.mark.parametrize("number", NUMBERS.values(), ids=NUMBERS)
def test_python_arithmetic_of_sizes_is_that_of_every_size(
    number: Callable[[torch.Tensor], Any],
) -> None:
    model = of(lambda m, x: m.linear(x) * number(x))
    with compilations() as compiled:
        executor = equal_to_eager(model, *((2, length, 8) for length in (5, 9, 4, 12, 31, 7)))

    assert executor._session.sizes.reasons == {}
    assert len(compiled) == 2


@pytest.mark.larger("test_compiled_code_serves_all_sizes")
def test_compiled_code_computes_with_sizes_as_python_does() -> None:
    def forward(m: Having, x: torch.Tensor) -> list[torch.Tensor]:
        return [m.linear(x) * number(x) for number in NUMBERS.values()]

    model = of(forward)
    executor = wrapped(model, backend="inductor")
    for length in (5, 9, 4, 12, 31):
        x = normal(2, length, 8)
        with torch.no_grad():
            torch.testing.assert_close(executor(x), model(x))

    assert runs_compiled(executor)
    assert executor._session.now.inputs.symbols


@pytest.mark.larger("test_python_arithmetic_of_sizes_is_that_of_every_size")
@pytest.mark.parametrize("accumulation", [1, 2])
def test_training_divides_by_the_root_of_the_length(accumulation: int) -> None:
    part = Classifier()
    part.layer = Having(lambda m, v: m.linear(v) / math.sqrt(v.shape[1]), linear=nn.Linear(16, 16))
    with compilations() as compiled:
        _, found, expected = train(
            part, *((2, length) for length in (5, 9, 12, 3)), accumulation=accumulation
        )

    assert len(compiled) == 2
    torch.testing.assert_close(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 2])
def test_training_with_an_lstm_serves_all_sizes(accumulation: int) -> None:
    part = Classifier()
    part.layer = Having(lambda m, v: m.lstm(v)[0], lstm=nn.LSTM(16, 16, batch_first=True))
    with compilations() as compiled:
        _, found, expected = train(
            part, *((2, length) for length in (5, 9, 12, 3)), accumulation=accumulation
        )

    assert len(compiled) == 2
    torch.testing.assert_close(found, expected)


KINDS_OF_NUMBERS = {float: 2.0}
TYPES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a type for torch": lambda x: x.to(float).to(torch.float32) * x.shape[1],
    "a key": lambda x: x * KINDS_OF_NUMBERS.get(float, 3.0),
    "a class in a tuple": lambda x: x * (2.0 if isinstance(0.5, (int, float)) else 3.0),
    "text": lambda x: x.clamp(min=float("-inf"), max=int("7")) * x.shape[1],
}


@pytest.mark.parametrize("function", TYPES.values(), ids=TYPES)
def test_float_and_int_are_still_types(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    model = of(lambda m, x: function(m.linear(x)))

    executor = equal_to_eager(model, (2, 5, 8), (2, 9, 8), (2, 4, 8), (2, 12, 8))

    assert executor._session.now.inputs.symbols


def test_a_class_of_numbers_that_forward_keeps_is_python_s_own() -> None:
    def forward(model: Having, x: torch.Tensor) -> torch.Tensor:
        model.kind = float
        return model.linear(x)

    model = of(forward)
    executor = equal_to_eager(model, (2, 5, 8), (2, 9, 8), (2, 4, 8))

    assert executor._session.model.module.kind is float


def test_python_s_functions_are_back_after_a_capture() -> None:
    before = dict(vars(math))
    equal_to_eager(of(lambda m, x: m.linear(x) * math.sqrt(x.shape[1])), (2, 5, 8), (2, 9, 8))

    assert {"float", "int", "len"}.isdisjoint(globals())
    assert sqrt is math.sqrt
    assert vars(math) == before


RESAMPLED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "max_pool1d": nn.MaxPool1d(3, 2, padding=1),
    "max_pool1d with indices": lambda x: nn.functional.max_pool1d(x, 2, return_indices=True)[0],
    "nearest": lambda x: interpolate(x.unsqueeze(3), scale_factor=2.0),
    "nearest, half as large again": lambda x: interpolate(x.unsqueeze(3), scale_factor=1.5),
    "linear, half as large again": lambda x: interpolate(x, scale_factor=1.5, mode="linear"),
    "nearest, half as large": lambda x: interpolate(x.unsqueeze(3), scale_factor=(0.5, 1)),
    "nearest, to a size": lambda x: interpolate(x.unsqueeze(3), size=(2 * x.shape[2], 3)),
    "linear": lambda x: interpolate(x, scale_factor=2, mode="linear"),
    "bilinear": lambda x: interpolate(x.unsqueeze(3), scale_factor=(3, 2), mode="bilinear"),
    "with corners": lambda x: interpolate(x, scale_factor=2, mode="linear", align_corners=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(RESAMPLED, "max_pool1d", "nearest"))
def test_sizes_may_be_pooled_and_interpolated(name: str) -> None:
    model = convolutional(lambda m, x: RESAMPLED[name](m.convolution(x)) * 2)
    with compilations() as compiled:
        executor = equal_to_eager(model, *((2, 4, length) for length in (12, 9, 20, 8)))

    assert executor._session.sizes.reasons == {}
    assert len(compiled) == 2


@pytest.mark.larger("test_compiled_code_serves_all_sizes")
@pytest.mark.parametrize("name", ["max_pool1d", "nearest", "bilinear"])
def test_compiled_code_pools_and_interpolates_all_sizes(name: str) -> None:
    model = convolutional(lambda m, x: RESAMPLED[name](m.convolution(x)) * 2)
    executor = wrapped(model, backend="inductor")
    for length in (12, 9, 20, 8):
        x = normal(2, 4, length)
        torch.testing.assert_close(executor(x), model(x).detach())

    assert runs_compiled(executor)
    assert executor._session.now.inputs.symbols


def test_a_factor_that_is_not_exact_has_a_program_for_each_size() -> None:
    model = of(lambda m, x: interpolate(x, scale_factor=1.3) * 2)
    executor = equal_to_eager(model, *((2, length, 8) for length in (5, 9, 5)))

    assert not executor._session.now.inputs.symbols


@pytest.mark.parametrize("function", DERIVED.values(), ids=DERIVED)
def test_sizes_may_be_differences_or_quotients_of_others(function: Callable[..., Any]) -> None:
    with compilations() as compiled:
        executor = equal_to_eager(
            convolutional(function), *((2, 4, length) for length in (12, 9, 20, 7))
        )

    assert executor._session.sizes.reasons == {}
    assert len(compiled) == 2


@pytest.mark.larger("test_compiled_code_serves_all_sizes")
@pytest.mark.parametrize("function", DERIVED.values(), ids=DERIVED)
def test_compiled_code_serves_sizes_that_are_derived_from_others(
    function: Callable[..., Any],
) -> None:
    model = convolutional(function)
    executor = wrapped(model, backend="inductor")
    with compilations() as compiled:
        for length in (12, 9, 20, 7):
            x = normal(2, 4, length)
            torch.testing.assert_close(executor(x), model(x).detach())

    assert len(compiled) == 2
    assert runs_compiled(executor)


def test_a_size_for_which_a_tensor_is_empty_has_its_own_program() -> None:
    model = of(lambda m, x: (x[:, 2:] * 2).flatten(1).sum(1))
    executor = equal_to_eager(model, *((4, length, 8) for length in (5, 9, 2, 7)))

    assert executor._session.now.inputs.symbols
    assert len(executor._session.programs.all) == 2


def test_a_short_last_batch_needs_a_second_compilation_and_no_third() -> None:
    executor = wrapped(of(lambda m, x: m.linear(x).relu()))
    with compilations() as compiled:
        for rows in (8, 8, 3, 8, 8, 5, 8, 7):
            assert executor(normal(rows, 8)).shape == (rows, 8)

    assert len(compiled) == 2


def test_two_dimensions_that_vary_have_two_symbols() -> None:
    executor = wrapped(Attention().eval())
    for shape in ((4, 5), (3, 9), (7, 11), (2, 2)):
        executor(tokens(*shape))

    assert str(executor._session.now.inputs) == "x int64[s0, s1]"
    assert len(executor._session.programs.all) == 1


def test_dimensions_that_vary_together_have_one_symbol() -> None:
    model = Having(lambda m, x, y: x + y)
    executor = wrapped(model)
    for length in (5, 9, 4):
        executor(normal(2, length), normal(length))

    assert str(executor._session.now.inputs) == "*args[0] float32[2, s0], *args[1] float32[s0]"


def test_inputs_that_a_condition_excludes_are_refused_as_by_eager_torch() -> None:
    executor = wrapped(Attention().eval())
    for length in (5, 9):
        executor(tokens(4, length))
    with pytest.raises(RuntimeError, match="40"):
        executor(tokens(4, 41))

    with compilations() as compiled:
        executor(tokens(4, 11))
    assert compiled == []


KEEPING = {
    "returns a size": lambda m, x: (m.linear(x), x.shape[1]),
    "as a number": lambda m, x: sum(m.linear(x)[:, at] for at in range(x.shape[1])),
    "treats symbolic sizes differently": lambda m, x: m.linear(x) * len(type(x.shape[1]).__name__),
    "branches on the values": lambda m, x: m.linear(x) if x.sum() > 1e9 else x * 2,
    "changes its inputs in place": lambda m, x: m.linear(x.mul_(2.0)),
    "reads indices": lambda m, x: m.linear(x).index_select(1, (x[0, :, 0] > 9).long()),
    "another type": lambda m, x: m.linear(x) * (2.0 if type(x.shape[1]) is int else 3.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("reason", [each for each in KEEPING if each != "another type"])
@pytest.mark.filterwarnings("ignore")
def test_where_sizes_cannot_be_symbolic_the_plan_says_why(reason: str) -> None:
    executor = equal_to_eager(of(KEEPING[reason]), (2, 5, 8), (2, 9, 8), (2, 4, 8), (2, 9, 8))

    assert reason in str(executor.plan())
    assert len(executor._session.programs.all) == 3


def in_windows(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Shift an image, divide both of its sides into windows of 4, and attend within each."""
    rows, height, width, channels = x.shape
    below, right = -height % 4, -width % 4
    x = nn.functional.pad(x, (0, 0, 0, right, 0, below)).roll((-2, -2), (1, 2))
    x = x.view(rows, (height + below) // 4, 4, (width + right) // 4, 4, channels)
    x = x.transpose(2, 3).reshape(-1, 16, channels)
    x = (model.linear(x) @ x.transpose(1, 2)).softmax(-1) @ x
    x = x.view(rows, (height + below) // 4, (width + right) // 4, 4, 4, channels).transpose(2, 3)
    x = x.reshape(rows, height + below, width + right, channels).roll((2, 2), (1, 2))
    return x[:, :height, :width].contiguous()


@pytest.mark.larger("test_conditions_with_too_many_terms_are_not_examined")
@pytest.mark.filterwarnings("ignore")
def test_windows_over_two_sides_have_a_program_for_each_size() -> None:
    executor = equal_to_eager(of(in_windows), (2, 5, 12, 8), (2, 9, 16, 8), (2, 12, 19, 8))

    assert "too long to be examined" in str(executor.plan())


@pytest.mark.filterwarnings("ignore")
def test_conditions_with_too_many_terms_are_not_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poptorch._capture.micro_batch.LONGEST_CONDITIONS", 20)
    model = of(lambda m, x: m.linear(x.view(2, x.shape[1] // 2, 2, 8)))

    executor = equal_to_eager(model, (2, 4, 8), (2, 8, 8), (2, 12, 8))

    plan = str(executor.plan())
    assert "too long to be examined" in plan
    assert "test_varying_sizes.py" in plan


def test_python_code_that_asks_for_the_exact_type_of_a_size_has_a_program_for_each_size() -> None:
    executor = equal_to_eager(of(KEEPING["another type"]), (2, 5, 8), (2, 9, 8), (2, 4, 8))

    assert "treats symbolic sizes differently" in str(executor.plan())


def kept_in(where: str, executor: poptorch.PoplarExecutor) -> None:
    assert f"keeps a size in {where}" in str(executor.plan())


def test_attributes_that_forward_sets_to_a_size_hold_numbers() -> None:
    def forward(model: Having, x: torch.Tensor) -> torch.Tensor:
        model.length = x.shape[1]
        return model.linear(x)

    layer = of(forward)
    executor = equal_to_eager(Having(lambda m, x: m.layer(x), layer=layer), (2, 5, 8), (2, 9, 8))

    assert type(layer.length) is int
    kept_in("the attribute layer.length", executor)


def test_objects_in_attributes_in_which_forward_keeps_a_size_hold_numbers() -> None:
    def forward(model: Having, x: torch.Tensor) -> torch.Tensor:
        model.settings.length = x.shape[1]
        return model.linear(x) * model.settings.length

    model = of(forward, settings=SimpleNamespace(length=0))
    executor = equal_to_eager(model, (2, 5, 8), (2, 9, 8), (2, 4, 8))

    assert type(executor._session.model.module.settings.length) is int
    kept_in("the attribute settings", executor)


LENGTH = {"of the last call": 0}


class InGlobal(nn.Module):
    """Keeps the length in a global variable."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        LENGTH["of the last call"] = x.shape[1]
        return x * LENGTH["of the last call"]


def test_global_variables_in_which_forward_keeps_a_size_hold_numbers() -> None:
    executor = equal_to_eager(InGlobal(), (2, 5, 8), (2, 9, 8))

    assert type(LENGTH["of the last call"]) is int
    assert "forward of InGlobal keeps a size in a variable outside of it" in str(executor.plan())


def test_variables_of_an_enclosing_function_hold_numbers() -> None:
    length = 0

    def forward(model: Having, x: torch.Tensor) -> torch.Tensor:
        nonlocal length
        length = x.shape[1]
        return model.linear(x) * length

    executor = equal_to_eager(of(forward), (2, 5, 8), (2, 9, 8))

    assert type(length) is int
    kept_in("the attribute function", executor)


AS_TEXT: dict[str, Callable[[int], str]] = {
    "str": str,
    "repr": repr,
    "an f-string": lambda size: f"{size}",
    "format": "{}".format,
    "percent": lambda size: "%s" % size,  # noqa: UP031
    "a part of a shape": lambda size: str(torch.Size([1, size])),
}


@pytest.mark.parametrize("text", AS_TEXT.values(), ids=AS_TEXT)
def test_a_size_that_becomes_text_is_the_number(text: Callable[[int], str]) -> None:
    """The first two sizes have texts of the same length, which are no keys."""
    known = {text(7): 2.0}
    model = of(lambda m, x: m.linear(x) * (known.get(text(x.shape[1]), 3.0)))

    equal_to_eager(model, (2, 120, 8), (2, 130, 8), (2, 7, 8))


KINDS: dict[str, Callable[[Any], bool]] = {
    "int": lambda size: isinstance(size, int),
    "one of several": lambda size: isinstance(size, (str, int)),
    "an abstract class": lambda size: isinstance(size, Integral),
    "no symbol": lambda size: not isinstance(size, torch.SymInt),
    "a quotient": lambda size: isinstance(size / 2, float),
    "a comparison": lambda size: isinstance(size > 4, bool),
}


@pytest.mark.slow
@pytest.mark.parametrize("is_number", KINDS.values(), ids=KINDS)
def test_a_size_is_an_instance_of_the_classes_of_a_number(
    is_number: Callable[[Any], bool],
) -> None:
    """The first two sizes take the same branch, and the third one takes the other."""

    def forward(model: Having, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        factor = 2.0 if is_number(length) and length > 10 else 3.0
        return model.linear(x) * factor

    executor = equal_to_eager(of(forward), (2, 5, 8), (2, 9, 8), (2, 12, 8), (2, 13, 8))

    assert executor._session.now.inputs.symbols


def test_sizes_are_symbolic_if_a_module_of_the_user_has_two_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "second_name", sys.modules[__name__])

    executor = equal_to_eager(of(lambda m, x: m.linear(x) * x.shape[1]), (2, 5, 8), (2, 9, 8))

    assert executor._session.now.inputs.symbols


def test_python_s_isinstance_is_back_after_a_capture() -> None:
    equal_to_eager(of(lambda m, x: m.linear(x) * x.shape[1]), (2, 5, 8), (2, 9, 8))

    assert "isinstance" not in globals()


def test_a_size_in_a_message_of_torch_stays_symbolic() -> None:
    executor = equal_to_eager(
        of(lambda m, x: m.linear(x)[:, : min(x.shape[1], 64)]), (2, 5, 8), (2, 9, 8)
    )

    assert executor._session.now.inputs.symbols


class Classifier(nn.Module):
    """A layer over tokens with positions, and a loss."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(50, 16), nn.Linear(16, 3)
        self.layer = self.new_layer(dropout)
        self.register_buffer("positions", normal(40, 16))

    def new_layer(self, dropout: float) -> nn.Module:
        return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(dropout))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        values = self.layer(self.embedding(x) + self.positions[: x.shape[1]])
        return nn.functional.cross_entropy(self.head(values.mean(1)), labels)


class WithTransformer(Classifier):
    """A layer of a transformer, which takes ten times as long to capture."""

    def new_layer(self, dropout: float) -> nn.Module:
        return nn.TransformerEncoderLayer(16, 2, 32, dropout=dropout, batch_first=True)


LossesAndState = tuple[list[torch.Tensor], dict[str, torch.Tensor]]
Trained = tuple[poptorch.PoplarExecutor, LossesAndState, LossesAndState]


def train(
    model: nn.Module,
    *shapes: tuple[int, int],
    backend: str = "reference",
    lanes: int = 0,
    **counts: int,
) -> Trained:
    """Train a model and its eager copy; return the executor and both lists of losses.

    Shapes are those of micro-batches. Counts: iterations, accumulation, replicas.
    """
    eager = copy.deepcopy(model)
    plain = torch.optim.SGD(eager.parameters(), lr=0.1, momentum=0.9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    opts = options(backend, **counts).programs(4).checkAgainstEager("error")
    opts.outputMode(poptorch.OutputMode.All).lanes(lanes)
    executor = poptorch.trainingModel(model, opts, optimizer)
    of_update = counts.get("accumulation", 1) * counts.get("replicas", 1)
    found, expected = [], []
    for rows, length in shapes:
        batches = []
        for update in range(counts.get("iterations", 1)):
            plain.zero_grad()
            for at in range(of_update):
                x = (tokens(rows, length) + update * of_update + at) % 50
                labels = torch.arange(rows) % 3
                batches.append((x, labels))
                loss = eager(x, labels)
                (loss / of_update).backward()
                expected.append(loss.detach())
            plain.step()
        losses = executor(*map(torch.cat, zip(*batches, strict=True)))
        found += losses.reshape(-1)
    return executor, (found, model.state_dict()), (expected, eager.state_dict())


@pytest.mark.parametrize("kind", [Classifier, WithTransformer])
def test_training_serves_all_sizes_with_the_numbers_of_eager_torch(kind: type[Classifier]) -> None:
    with compilations() as compiled:
        _, found, expected = train(kind(), *((4, length) for length in LENGTHS))

    assert len(compiled) == 2
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.larger("test_a_short_last_batch_needs_a_second_compilation_and_no_third")
def test_a_short_last_batch_is_trained_by_the_program_for_all_sizes() -> None:
    with compilations() as compiled:
        _, found, expected = train(Classifier(), (8, 5), (8, 5), (3, 5), (8, 5), (7, 5), (2, 5))

    assert len(compiled) == 2
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.larger("test_compiled_code_serves_all_sizes")
def test_compiled_training_serves_all_sizes() -> None:
    executor, found, expected = train(
        WithTransformer(), (4, 5), (4, 9), (4, 12), (4, 3), backend="inductor"
    )

    assert runs_compiled(executor)
    assert str(executor._session.now.inputs) == "x int64[4, s0], labels int64[4]"
    torch.testing.assert_close(found, expected)


class PerToken(Classifier):
    """Returns scores for each token, and the mean over all of them."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.head(self.layer(self.embedding(x)))
        each = labels[:, None].expand(x.shape)
        return scores, nn.functional.cross_entropy(scores.flatten(0, 1), each.flatten())


class Resampled(Classifier):
    """Pools the positions of a sequence, and interpolates between them."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        values = nn.functional.max_pool1d(self.layer(self.embedding(x)).mT, 2)
        values = interpolate(values[..., None], scale_factor=2.0)
        return nn.functional.cross_entropy(self.head(values.mean((2, 3))), labels)


UPSAMPLED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "linear": lambda x: interpolate(x, scale_factor=1.5, mode="linear"),
    "nearest": lambda x: interpolate(x, scale_factor=2.0),
    "bilinear": lambda x: interpolate(x[..., None], scale_factor=2.0, mode="bilinear"),
    "bicubic": lambda x: interpolate(x[..., None], scale_factor=1.5, mode="bicubic"),
}


@pytest.mark.larger("test_training_pools_and_interpolates_all_sizes")
@pytest.mark.parametrize("name", slow_but_the_first(UPSAMPLED))
def test_training_interpolates_all_sizes(name: str) -> None:
    model = OfPart(lambda values: UPSAMPLED[name](values.mT).flatten(2)[:, :3].mean(2))
    with compilations() as compiled:
        _, found, expected = train(model, (2, 6), (2, 9), (2, 12), (2, 4))

    assert len(compiled) == 2
    torch.testing.assert_close(found, expected)


def test_training_pools_and_interpolates_all_sizes() -> None:
    with compilations() as compiled:
        _, found, expected = train(Resampled(), (2, 5), (2, 9), (2, 12), (2, 4))

    assert len(compiled) == 2
    torch.testing.assert_close(found, expected)


PARTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "the first features": lambda values: values[:, :, :3].mean(1),
    "the first position": lambda values: values[:, 0, :3],
    "all but the last position": lambda values: values[:, :-1, :3].sum(1),
}


class OfPart(Classifier):
    """Classifies by a part of the values."""

    def __init__(self, part: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.part(self.layer(self.embedding(x))), labels)


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_gradients_of_parts_serve_all_sizes(part: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with compilations() as compiled:
        _, found, expected = train(OfPart(part), (2, 5), (4, 9), (3, 12), (4, 3))

    assert len(compiled) == 2
    torch.testing.assert_close(found, expected)


@pytest.mark.larger("test_training_serves_all_sizes_with_the_numbers_of_eager_torch")
@pytest.mark.parametrize("accumulation", [1, 2])
def test_training_returns_results_of_all_sizes(accumulation: int) -> None:
    model = PerToken()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    opts = options(accumulation=accumulation).programs(4).checkAgainstEager("error")
    opts.outputMode(poptorch.OutputMode.All)
    executor = poptorch.trainingModel(model, opts, optimizer)
    labels = torch.arange(2 * accumulation) % 3
    with compilations() as compiled:
        for length in (5, 9, 12, 3):
            x = tokens(2 * accumulation, length)
            scores, _ = executor(x, labels)
            torch.testing.assert_close(scores, model.forward(x, labels)[0].detach())

    assert len(compiled) == 2


def test_draws_of_a_dropout_are_compared_for_the_size_at_hand() -> None:
    executor, _, _ = train(Classifier(dropout=0.1), (4, 5), (4, 9), (4, 12))

    assert executor._session.now.inputs.symbols
    assert executor._session.sizes.reasons == {}


SEVERAL = {
    "accumulation": {"accumulation": 2},
    "accumulation, one after another": {"accumulation": 3, "lanes": 1},
    "accumulation, in chunks": {"accumulation": 4, "lanes": 2},
    "replicas": {"replicas": 2},
    "device iterations": {"iterations": 2},
    "all": {"iterations": 2, "accumulation": 2, "replicas": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(SEVERAL, "accumulation, in chunks", "all"))
def test_training_with_several_micro_batches_serves_all_sizes(name: str) -> None:
    counts = SEVERAL[name]
    with compilations() as compiled:
        _, found, expected = train(Classifier(), (2, 5), (2, 9), (2, 12), (2, 3), **counts)

    assert len(compiled) == 2
    torch.testing.assert_close(found, expected)


PADDED = {
    "to a length": lambda length: 40 - length,
    "to a multiple": lambda length: -length % 8,
}


@pytest.mark.parametrize("missing", PADDED.values(), ids=PADDED)
def test_inputs_are_padded_by_a_number_that_depends_on_their_size(
    missing: Callable[[int], int],
) -> None:
    model = of(lambda m, x: m.linear(nn.functional.pad(x, (0, 0, 0, missing(x.shape[1])))))
    with compilations() as compiled:
        executor = equal_to_eager(model, *((2, length, 8) for length in (5, 9, 12, 3, 31)))

    assert len(compiled) == 2
    assert executor._session.now.inputs.symbols


class Padded(Classifier):
    """Pads the values of a sequence to 40 positions."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        values = nn.functional.pad(self.embedding(x), (0, 0, 0, 40 - x.shape[1]))
        return nn.functional.cross_entropy(self.head(self.layer(values).mean(1)), labels)


@pytest.mark.larger("test_inputs_are_padded_by_a_number_that_depends_on_their_size")
@pytest.mark.parametrize("accumulation", [1, 2])
def test_training_pads_by_a_number_that_depends_on_the_size(accumulation: int) -> None:
    with compilations() as compiled:
        _, found, expected = train(
            Padded(), *((2, length) for length in (5, 9, 12, 3)), accumulation=accumulation
        )

    assert len(compiled) == 2
    torch.testing.assert_close(found, expected)


@pytest.mark.larger("test_training_with_several_micro_batches_serves_all_sizes")
def test_micro_batches_of_all_sizes_run_side_by_side() -> None:
    executor, _, _ = train(Classifier(), (2, 5), (2, 9), accumulation=4)

    assert executor.plan().program.lanes.count == 4
    assert str(executor._session.now.inputs) == "x int64[8, s0], labels int64[8]"


@pytest.mark.larger("test_compiled_code_serves_all_sizes")
def test_compiled_lanes_serve_all_sizes() -> None:
    executor, found, expected = train(
        Classifier(), (2, 5), (2, 9), (2, 12), (2, 3), backend="inductor", accumulation=2
    )

    assert runs_compiled(executor)
    assert executor.plan().program.lanes.count == 2
    torch.testing.assert_close(found, expected)


@pytest.mark.larger("test_training_with_several_micro_batches_serves_all_sizes")
def test_the_rows_of_several_micro_batches_vary_together() -> None:
    with compilations() as compiled:
        _, found, expected = train(
            Classifier(), (4, 5), (2, 5), (3, 5), (5, 5), accumulation=2, lanes=1
        )

    assert len(compiled) == 2
    torch.testing.assert_close(found, expected)


@pytest.mark.larger("test_two_dimensions_that_vary_have_two_symbols")
def test_rows_and_lengths_that_are_equal_in_a_whole_batch_only_have_two_symbols() -> None:
    executor, found, expected = train(Classifier(), (3, 6), (4, 8), (2, 8), accumulation=2)

    assert "int64[s0, s1]" in str(executor._session.now.inputs)
    torch.testing.assert_close(found, expected)


@pytest.mark.larger("test_output_modes_are_those_of_one_micro_batch")
@pytest.mark.parametrize("counts", [{"iterations": 2}, {"replicas": 2}], ids=str)
@pytest.mark.parametrize("mode", ["All", "Final", "Sum"])
def test_results_of_several_micro_batches_of_all_sizes(mode: str, counts: dict[str, int]) -> None:
    model = of(lambda m, x: m.linear(x).sum(1))
    executor, fixed = (
        poptorch.inferenceModel(
            model, options(**counts).programs(n).outputMode(getattr(poptorch.OutputMode, mode))
        )
        for n in (2, 1)
    )
    for length in (5, 9, 4):
        x = normal(4, length, 8)
        fixed.destroy()
        torch.testing.assert_close(executor(x), fixed(x))

    assert executor._session.now.inputs.symbols


def test_the_plan_names_the_sizes_that_are_symbolic() -> None:
    executor = wrapped(Attention().eval())
    for length in (5, 9):
        executor(tokens(4, length))

    assert "for all sizes of x int64[4, s0], if s0 <= 40" in str(executor.plan())


def test_one_program_is_for_one_size() -> None:
    executor = wrapped(Attention().eval(), programs=1)
    executor(tokens(4, 5))
    with pytest.raises(poptorch.Error, match="Shape mismatch for x"):
        executor(tokens(4, 6))


def by_default(
    function: Callable[..., Any], caplog: pytest.LogCaptureFixture, **counts: int
) -> poptorch.PoplarExecutor:
    """Wrap a function of a linear layer without the option."""
    caplog.set_level("WARNING", "poptorch::python")
    opts = options(**counts).checkAgainstEager("error")
    return poptorch.inferenceModel(of(function), opts)


def test_without_an_option_one_program_serves_other_sizes_after_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    executor = by_default(lambda m, x: m.linear(x).relu(), caplog)
    with compilations() as compiled:
        for length in (5, 9, 12, 3, 40):
            x = normal(2, length, 8)
            torch.testing.assert_close(executor(x), executor._session.model.module(x).detach())

    (message,) = caplog.messages
    assert "*args[0] float32[2, s0, 8]" in message
    assert "options.programs(1)" in message
    assert len(compiled) == 2


@pytest.mark.larger("test_without_an_option_one_program_serves_other_sizes_after_a_warning")
def test_without_an_option_training_serves_other_sizes() -> None:
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    executor = poptorch.trainingModel(model, options(accumulation=2), optimizer)
    with compilations() as compiled:
        for length in (5, 9, 12):
            executor(tokens(4, length), torch.arange(4) % 3)

    assert len(compiled) == 2


def test_without_an_option_a_size_of_one_has_its_own_program(
    caplog: pytest.LogCaptureFixture,
) -> None:
    executor = by_default(lambda m, x: m.linear(x).relu(), caplog)
    with compilations() as compiled:
        for length in (5, 9, 1, 7, 1):
            assert executor(normal(2, length, 8)).shape == (2, length, 8)

    assert len(compiled) == 3


def test_without_an_option_other_kinds_of_inputs_are_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    executor = by_default(lambda m, x: m.linear(x.float()), caplog)
    for length in (5, 9):
        executor(normal(2, length, 8))
    with pytest.raises(poptorch.Error, match="Data type mismatch"):
        executor(normal(2, 7, 8).half())
    with pytest.raises(poptorch.Error, match="Shape mismatch"):
        executor(normal(2, 8))

    assert executor(normal(2, 7, 8)).shape == (2, 7, 8)


def test_without_an_option_sizes_that_need_their_own_programs_are_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    executor = by_default(KEEPING["returns a size"], caplog)
    executor(normal(2, 5, 8))
    with pytest.raises(
        poptorch.Error, match=r"Shape mismatch .*\n.*because forward returns a size"
    ):
        executor(normal(2, 9, 8))

    assert executor(normal(2, 5, 8))[1] == 5
    assert caplog.messages == []


def test_without_an_option_shorter_batches_keep_the_size_of_micro_batches(
    caplog: pytest.LogCaptureFixture,
) -> None:
    executor = by_default(lambda m, x: m.linear(x).mean((0, 1))[None], caplog, iterations=2)
    rows = [executor(normal(*shape, 8)).shape[0] for shape in ((4, 5), (4, 9), (3, 5), (4, 7))]

    assert rows == [2, 2, 2, 2]


@pytest.mark.parametrize("mode", ["All", "Final", "Sum"])
def test_output_modes_are_those_of_one_micro_batch(mode: str) -> None:
    opts = options().programs(2).outputMode(getattr(poptorch.OutputMode, mode))
    model = of(lambda m, x: m.linear(x).sum(1))
    executor = poptorch.inferenceModel(model, opts)
    for length in (5, 9, 4):
        x = normal(2, length, 8)
        torch.testing.assert_close(executor(x), model(x).detach())


def test_weights_that_are_copied_reach_the_program_for_all_sizes() -> None:
    model = of(lambda m, x: m.linear(x))
    executor = wrapped(model)
    for length in (5, 9):
        executor(normal(2, length, 8))
    with torch.no_grad():
        model.linear.weight.mul_(2.0)
    executor.copyWeightsToDevice()

    x = normal(2, 4, 8)
    torch.testing.assert_close(executor(x), model(x).detach())


def test_indices_are_checked_for_every_size() -> None:
    executor = wrapped(Attention().eval())
    for length in (5, 9):
        executor(tokens(4, length))
    with pytest.raises(poptorch.Error, match="Index out of range"):
        executor(torch.full((4, 7), 50))


@pytest.mark.parametrize("programs", [0, 1, 4])
@pytest.mark.parametrize("iterations", [1, 2])
@pytest.mark.parametrize("earlier", [(5,), (5, 9)], ids=["the first size", "all sizes"])
@pytest.mark.parametrize("shape", [(0, 5, 8), (4, 0, 8), (0, 9, 8)], ids=str)
def test_an_empty_batch_is_refused_and_no_option_is_suggested(
    shape: tuple[int, ...], earlier: tuple[int, ...], iterations: int, programs: int
) -> None:
    opts = options(iterations=iterations)
    opts = opts.programs(programs) if programs else opts
    executor = poptorch.inferenceModel(of(lambda m, x: m.linear(x)), opts)
    for length in earlier[: 1 if programs == 1 else None]:
        executor(normal(4, length, 8))

    with pytest.raises(poptorch.Error, match="Zero-sized tensors are unsupported") as caught:
        executor(normal(*shape))

    assert str(shape) in str(caught.value)
    assert "if x.numel() > 0" in str(caught.value)
    assert "options.programs" not in str(caught.value)
    assert executor(normal(4, 5, 8)).shape == (4, 5, 8)


@pytest.mark.larger("test_an_empty_batch_is_refused_and_no_option_is_suggested")
@pytest.mark.parametrize("rows", [4, 3])
def test_an_empty_batch_is_refused_in_training(rows: int) -> None:
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    executor = poptorch.trainingModel(model, options(accumulation=2), optimizer)
    for count in (4, rows):
        executor(tokens(count, 5), torch.arange(count) % 3)
    before = copy.deepcopy(model.state_dict())

    with pytest.raises(poptorch.Error, match="Zero-sized tensors are unsupported"):
        executor(tokens(0, 5), torch.arange(0))

    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_a_program_without_sizes_that_vary_is_unchanged() -> None:
    assert torch.equal(infer(torch.relu, normal(3)), normal(3).relu())


def test_a_batch_that_does_not_divide_does_not_change_the_iterations_of_others() -> None:
    opts = options(iterations=4).programs(3)
    model = of(lambda m, x: m.linear(x).mean(0, keepdim=True))
    executor = poptorch.inferenceModel(model, opts)
    rows = [executor(normal(rows, 8)).shape[0] for rows in (8, 3, 8, 5, 12)]

    assert rows == [4, 2, 4, 3, 4]
    assert "for all sizes of *args[0] float32[s0, 8]" in str(executor.plan())


@pytest.mark.larger("test_compiled_code_serves_all_sizes")
def test_where_compiling_needs_numbers_each_size_has_its_own_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise NotSymbolic("an operator has no rule for symbols")

    monkeypatch.setattr(compiler, "_compile_for_many_sizes", refuse)
    executor = wrapped(of(lambda m, x: m.linear(x)), backend="inductor")
    for length in (5, 9):
        executor(normal(2, length, 8))

    assert runs_compiled(executor)
    assert "an operator has no rule for symbols" in str(executor.plan())


def test_if_code_fails_later_each_size_gets_its_own_program() -> None:
    executor = wrapped(of(lambda m, x: m.linear(x)))
    for length in (5, 9):
        executor(normal(2, length, 8))
    executor._session.now.compiled.executable.unsuitable = "a kernel has no rule for symbols"
    x = normal(2, 4, 8)
    found = executor(x)

    torch.testing.assert_close(found, executor._session.model.module.linear(x).detach())
    assert "because a kernel has no rule for symbols" in str(executor.plan())
    assert len(executor._session.programs.all) == 1


class Positions(nn.Module):
    """Adds positions between 0 and 1."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(8, 8), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.function(x))


def every_position(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x[:, at] for at in range(x.shape[1])], 1)


NAMED = {
    "Python's code": (every_position, "in range(x.shape[1])"),
    "a function of torch": (lambda x: x + torch.logspace(0, 1, x.shape[1])[:, None], "logspace"),
    "an operator": (lambda x: torch.stack(x.unbind(1), 1), "aten.unbind.int in test_varying"),
    "a function of numbers": (lambda x: x * math.exp(-float(x.shape[1])), "math.exp(-float("),
    "indices": (lambda x: x.index_select(1, (x[0, :, 0] > 9).long()), "self.function(x)"),
    "something else": (lambda x: x * len(type(x.shape[1]).__name__), "self.function(x)"),
}


@pytest.mark.parametrize(("function", "place"), NAMED.values(), ids=NAMED)
def test_the_plan_names_the_line_that_needs_a_program_for_each_size(
    function: Callable[[torch.Tensor], torch.Tensor], place: str
) -> None:
    executor = equal_to_eager(Positions(function).eval(), (2, 5, 8), (2, 9, 8))
    (reason,) = executor._session.sizes.reasons.values()

    assert place in reason
    assert "test_varying_sizes.py:" in reason
    assert f"for one size, because {reason}" in str(executor.plan())


def test_the_error_of_another_size_names_the_line_and_the_remedy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    executor = by_default(lambda m, x: m.linear(every_position(x)), caplog)
    executor(normal(2, 5, 8))
    with pytest.raises(poptorch.Error, match="Shape mismatch") as caught:
        executor(normal(2, 9, 8))

    assert "in range(x.shape[1])" in str(caught.value)
    assert "poptorch.PadToSizes" in str(caught.value)


def test_one_line_says_why_a_program_has_no_symbols() -> None:
    executor = wrapped(of(lambda m, x: x.diagonal() + x.trace()))
    for length in (5, 7):
        executor(normal(length, length))

    plan = str(executor.plan())

    assert "because torch cannot trace forward with symbolic sizes (RuntimeError:" in plan
    assert "frame #0" not in plan


@pytest.mark.larger("test_compiled_code_serves_all_sizes")
def test_weights_in_layouts_of_a_library_serve_all_sizes() -> None:
    layers = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256), nn.LayerNorm(256))
    executor = wrapped(layers.eval(), backend="inductor")
    with compilations() as compiled:
        for length in (5, 9, 64, 300, 2):
            x = normal(2, length, 256)
            torch.testing.assert_close(executor(x), layers(x).detach())

    assert len(compiled) == 2
    assert runs_compiled(executor)


def test_python_code_is_written_for_the_size_that_was_compiled(tmp_path: Path) -> None:
    executor = wrapped(of(lambda m, x: m.linear(x) / x.shape[1]))
    for length in (5, 9, 4):
        executor(normal(2, length, 8))
    executor.export(tmp_path / "step.py")
    module = exported.loaded(tmp_path / "step.py")
    state, _ = module.load(tmp_path / "step.safetensors")

    found = module.step(*state, normal(2, 9, 8))

    torch.testing.assert_close(found, executor(normal(2, 9, 8)))
    assert "sym_size" not in (tmp_path / "step.py").read_text()


@pytest.mark.larger("test_python_code_is_written_for_the_size_that_was_compiled")
def test_python_code_of_a_training_step_with_lanes_is_written(tmp_path: Path) -> None:
    executor, _, _ = train(Classifier(), (2, 5), (2, 9), accumulation=2)
    executor.export(tmp_path / "step.py")
    module = exported.loaded(tmp_path / "step.py")
    state, _ = module.load(tmp_path / "step.safetensors")
    x, labels = tokens(4, 9), torch.arange(4) % 3

    found = module.step(*state, x, labels)

    torch.testing.assert_close(found, executor(x, labels))


def test_files_keep_the_program_for_the_latest_size(tmp_path: Path) -> None:
    model = Attention().eval()
    executor = wrapped(model)
    for length in (5, 9):
        executor(tokens(4, length))
    executor.compileAndExport(str(tmp_path / "model.poptorch"), tokens(4, 9))
    loaded = poptorch.load(str(tmp_path / "model.poptorch"))

    torch.testing.assert_close(loaded(tokens(4, 9)), executor(tokens(4, 9)))


def resumable(folder: Path, batches: list[list[torch.Tensor]]) -> poptorch.Checkpoints:
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    executor = poptorch.trainingModel(model, options().programs(4), optimizer)
    return poptorch.Checkpoints(folder, executor, batches)


def losses_of(checkpoints: poptorch.Checkpoints, saved_at: int | None = None) -> list[float]:
    losses = []
    for step, batch in enumerate(checkpoints.batches(1), 1):
        losses.append(checkpoints._executor(*batch).item())
        if step == saved_at:
            checkpoints.save()
            break
    return losses


@pytest.mark.larger("test_training_serves_all_sizes_with_the_numbers_of_eager_torch")
@pytest.mark.parametrize("saved_at", [1, 2, 3])
def test_a_run_that_is_resumed_at_another_size_goes_on_as_if_it_had_not_stopped(
    saved_at: int, tmp_path: Path
) -> None:
    batches = [[tokens(4, length), torch.arange(4) % 3] for length in (5, 9, 12, 3, 20)]
    expected = losses_of(resumable(tmp_path / "whole", batches))
    found = losses_of(resumable(tmp_path / "stopped", batches), saved_at)
    resumed = resumable(tmp_path / "stopped", batches)

    assert resumed.resume()
    found += losses_of(resumed)

    assert found == pytest.approx(expected, rel=relative(64, 5))
