"""What operators cost: their products, loops, and what nothing is known of."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from helpers.pricing import meta, priced
from helpers.wrapping import Calling
from poptorch import Estimate

ONES = torch.ones(64, 256)


def cost(function: Callable[..., Any], *shape: int, dtype: torch.dtype = torch.float32) -> Estimate:
    """The estimate of a function of one tensor of this shape."""
    return priced(lambda: Calling(function), meta(*shape, dtype=dtype), system="bow:1")


def flops(estimate: Estimate) -> int:
    return sum(row.flops for row in estimate.operators)


def cycles(estimate: Estimate) -> float:
    return sum(row.cycles for row in estimate.operators)


def count(estimate: Estimate, part_of_name: str) -> int:
    """How many operators of an estimate have this in their name."""
    return sum(part_of_name in row.name for row in estimate.operators)


def attention(dtype: torch.dtype) -> Estimate:
    """Attention of 2 samples and 4 heads over 32 places of 16 numbers."""
    return cost(lambda x: F.scaled_dot_product_attention(x, x, x), 2, 4, 32, 16, dtype=dtype)


def test_attention_is_its_two_products_and_the_softmax() -> None:
    estimate = attention(torch.float16)

    one_product = 2 * (2 * 4 * 32 * 32 * 16)
    assert flops(estimate) == 2 * one_product
    assert count(estimate, "softmax") > 0


def test_attention_of_halves_takes_less_time_than_of_floats() -> None:
    assert cycles(attention(torch.float16)) < cycles(attention(torch.float32))


def lstm(steps: int, dtype: torch.dtype) -> Estimate:
    """An LSTM from 8 to 16 numbers, of 4 samples."""
    with torch.device("meta"):
        layer = nn.LSTM(8, 16, batch_first=True, dtype=dtype)
    return cost(lambda x: layer(x)[0], 4, steps, 8, dtype=dtype)


both_types = pytest.mark.parametrize("dtype", [torch.float32, torch.float16])


@both_types
@pytest.mark.parametrize("steps", [5, 9])
def test_an_lstm_has_the_products_of_four_gates_at_every_step(
    dtype: torch.dtype, steps: int
) -> None:
    samples, gates, hidden, inputs = 4, 4, 16, 8

    estimate = lstm(steps, dtype)

    assert flops(estimate) == 2 * samples * steps * gates * hidden * (inputs + hidden)


@both_types
def test_an_lstm_is_one_operator_whose_steps_are_sequential(dtype: torch.dtype) -> None:
    five, nine = lstm(5, dtype), lstm(9, dtype)

    assert count(five, "lstm_layer") == 1
    assert 1.5 < cycles(nine) / cycles(five) <= 9 / 5


def test_a_product_of_groups_is_one_product() -> None:
    rows, wide, out, groups = 8, 4, 16, 2
    weights = torch.empty(groups, wide, out, device="meta")
    ends = torch.empty(groups, dtype=torch.int32, device="meta")

    estimate = cost(lambda x: F.grouped_mm(x, weights, offs=ends), rows, wide)

    assert flops(estimate) == 2 * rows * wide * out
    assert count(estimate, "grouped_product") == 1


def test_a_product_in_pieces_is_the_same_work_and_takes_longer() -> None:
    by_columns = poptorch.MatMulSerializationMode.OutputChannels

    whole = cost(lambda x: x @ x.T, 64, 32)
    in_pieces = cost(lambda x: poptorch.serializedMatMul(x, x.T, by_columns, 4), 64, 32)

    assert flops(whole) == 2 * 64 * 64 * 32
    assert flops(in_pieces) == flops(whole)
    assert cycles(in_pieces) > 2 * cycles(whole)


def test_a_loop_costs_its_body_as_often_as_it_runs() -> None:
    def looped(times: int) -> Estimate:
        return cost(lambda x: poptorch.for_loop(times, lambda y: torch.tanh(y @ y), [x])[0], 16, 16)

    three, thirty = looped(3), looped(30)

    assert flops(three) == 3 * 2 * 16**3
    assert flops(thirty) == 30 * 2 * 16**3
    assert 8 * cycles(three) < cycles(thirty) < 10 * cycles(three)


@pytest.fixture(scope="module")
def addition() -> float:
    """Cycles of adding a number to a tensor of 64 x 256."""
    return cycles(cost(lambda x: x + 1, 64, 256))


@pytest.mark.parametrize(
    "function, times",
    [
        pytest.param(lambda x: torch.sort(x)[0], 3, id="sort"),
        pytest.param(lambda x: torch.topk(x, 16)[0], 3, id="topk"),
        pytest.param(lambda x: torch.fft.rfft(x).real, 3, id="rfft"),
        pytest.param(lambda x: torch.cdist(x, x), 3, id="cdist"),
        pytest.param(lambda x: F.bilinear(x, x, torch.ones(8, 256, 256)), 3, id="bilinear"),
        pytest.param(
            lambda x: F.ctc_loss(x[:, None], torch.ones(1, 9, dtype=torch.long), (64,), (9,)),
            3,
            id="ctc_loss",
        ),
        pytest.param(F.glu, 1, id="glu"),
        pytest.param(F.mish, 1, id="mish"),
        pytest.param(F.hardsigmoid, 1, id="hardsigmoid"),
        pytest.param(lambda x: torch.atan2(x, ONES), 1, id="atan2"),
        pytest.param(lambda x: F.prelu(x, ONES[0, :1]), 1, id="prelu"),
    ],
)
def test_a_known_operator_costs_more_than_an_addition_and_is_not_a_guess(
    function: Callable[..., Any], times: int, addition: float
) -> None:
    estimate = cost(function, 64, 256)

    assert cycles(estimate) > times * addition
    assert [guess.name for guess in estimate.guesses if "operator" in guess.name] == []


def test_an_operator_of_which_nothing_is_known_is_a_guess() -> None:
    estimate = cost(torch.digamma, 64, 256)

    (guess,) = [guess for guess in estimate.guesses if "operator" in guess.name]
    assert guess.name == "operator digamma"
    assert 0 < guess.share <= 1


def test_an_operator_that_only_marks_something_is_free() -> None:
    marked = cost(lambda x: torch.tanh(poptorch.nop(x)), 64, 256)
    plain = cost(torch.tanh, 64, 256)

    assert cycles(marked) == cycles(plain)


def test_dropout_is_a_loop_that_draws_and_one_that_multiplies() -> None:
    estimate = cost(lambda x: F.dropout(x, training=True), 64, 256)

    loops = {row.name: row.cycles for row in estimate.operators if row.cycles}
    assert len(loops) == 2, loops


def gathered(index: Callable[[], torch.Tensor]) -> float:
    """Cycles of gathering from 64 rows of 256 by an index that the model makes itself."""
    return cycles(cost(lambda x: torch.gather(x, 0, index()), 64, 256))


@pytest.fixture(scope="module")
def looking_up_rows() -> float:
    """Cycles of taking 64 of 64 rows of 256."""

    def look_up(x: torch.Tensor) -> torch.Tensor:
        return x.index_select(0, torch.zeros(64, dtype=torch.long))

    return cycles(cost(look_up, 64, 256))


def test_gathering_by_an_index_that_is_repeated_over_rows_looks_up_rows(
    looking_up_rows: float,
) -> None:
    by_row = gathered(lambda: torch.zeros(64, 1, dtype=torch.long).expand(-1, 256))

    assert by_row == looking_up_rows


def test_gathering_single_elements_takes_longer_than_rows(looking_up_rows: float) -> None:
    by_element = gathered(lambda: torch.zeros(64, 256, dtype=torch.long))

    assert by_element > 2 * looking_up_rows


# How much of a tile products may use.


class TwoProducts(nn.Module):
    """A product on each of two chips; the share of a tile can be set for the first."""

    def __init__(self, share: float | None) -> None:
        super().__init__()
        self.first = nn.Linear(1024, 1024)
        self.second = poptorch.BeginBlock(nn.Linear(1024, 1024), "second", ipu_id=1)
        self.share = share

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.share is not None:
            x = poptorch.set_available_memory(x, self.share)
        return self.second(x)


class TemporaryBytes(NamedTuple):
    """Bytes of temporaries on each chip at its fullest moment."""

    chip0: float
    chip1: float


def temporary_bytes(share: float | None = None, **proportions: float) -> TemporaryBytes:
    """Return the temporary bytes of two products, limited for the first one or for whole chips."""
    options = poptorch.Options().setAvailableMemoryProportion(proportions)
    batch = meta(2 * 8192, 1024)
    estimate = priced(lambda: TwoProducts(share), batch, steps=2, options=options)
    return TemporaryBytes(*(chip.peak["temporary"] for chip in estimate.chips))


@pytest.fixture(scope="module")
def usual() -> TemporaryBytes:
    return temporary_bytes()


def test_equal_products_on_two_chips_have_equal_temporaries(usual: TemporaryBytes) -> None:
    assert usual.chip0 == usual.chip1


def test_a_smaller_memory_share_shrinks_temporaries_on_that_chip_only(
    usual: TemporaryBytes,
) -> None:
    limited = temporary_bytes(IPU1=0.05)

    assert limited.chip0 == usual.chip0
    assert limited.chip1 < usual.chip1 / 2


def test_a_smaller_memory_share_of_one_product_shrinks_its_temporaries_only(
    usual: TemporaryBytes,
) -> None:
    limited = temporary_bytes(share=0.05)

    assert limited.chip0 < usual.chip0 / 2
    assert limited.chip1 == usual.chip1
