"""Masks that are the same in every run, as indices."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapping import Having, normal, options, trains_alike, unchecked

MASK = torch.tensor([True, False, True, True])
OF_ELEMENTS = torch.arange(16).reshape(4, 4) % 3 == 0

Function = Callable[[Having, torch.Tensor], torch.Tensor]


def written(y: torch.Tensor, index: object, value: torch.Tensor) -> torch.Tensor:
    y = y * 1
    y[index] = value
    return y


def added(y: torch.Tensor, index: object) -> torch.Tensor:
    y = y * 1
    y[index] += 1
    return y


FUNCTIONS: dict[str, Function] = {
    "columns": lambda m, y: y[:, m.mask],
    "rows": lambda m, y: y[m.mask],
    "elements": lambda m, y: y[m.of_elements],
    "elements of each image": lambda m, y: y[None].expand(2, 4, 4)[:, m.of_elements],
    "the last dimension": lambda m, y: y[..., m.mask],
    "two masks": lambda m, y: y[m.mask, m.mask],
    "columns that are not in the mask": lambda m, y: y[:, ~m.mask],
    "a comparison of a buffer": lambda m, y: y[:, m.numbers > 1],
    "a comparison of a frozen weight": lambda m, y: y[:, m.frozen > 0],
    "a constant outside of the model": lambda m, y: y[:, MASK],
    "a mask made in forward": lambda m, y: y[torch.ones(4, 4).triu().bool()],
    "a list": lambda m, y: y[:, [True, False, True, True]],
    "an array": lambda m, y: y[:, np.array([True, False, True, True])],
    "values are written": lambda m, y: written(y, (slice(None), m.mask), y[:, :3] * 2),
    "rows are written": lambda m, y: written(y, m.mask, y[:3] * 2),
    "a number is added": lambda m, y: added(y, (slice(None), m.mask)),
    "masked_select": lambda m, y: y.masked_select(m.mask),
    "nonzero": lambda m, y: y[:, m.mask.nonzero().squeeze(1)],
    "where": lambda m, y: y[torch.where(m.of_elements)],
    "unique": lambda m, y: y[:, torch.unique(m.numbers)],
    "repeat_interleave": lambda m, y: y.repeat_interleave(m.numbers, dim=1),
}


def masking(function: Function) -> Having:
    def loss(model: Having, x: torch.Tensor) -> torch.Tensor:
        result = function(model, model.linear(x))
        return nn.functional.mse_loss(result, torch.ones_like(result))

    numbers = torch.tensor([0, 2, 1, 1])
    frozen = nn.Parameter(torch.tensor([1.0, -1, 2, -3]), requires_grad=False)
    state = {"mask": MASK.clone(), "of_elements": OF_ELEMENTS, "numbers": numbers}
    return Having(loss, linear=nn.Linear(3, 4), frozen=frozen, **state)


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_constant_mask_selects_the_same_elements_as_in_eager_pytorch(function: Function) -> None:
    trains_alike(masking(function), normal(8, 3), accumulation=2)


def test_a_constant_mask_can_be_used_in_a_branch_on_data() -> None:
    trains_alike(masking(lambda m, y: y[:, m.mask] if y.sum() > -1e9 else y), normal(4, 3))


CHANGES_ON_THE_HOST: dict[str, Callable[[nn.Module], object]] = {
    "in place": lambda m: m.mask.fill_(True),
    "through data": lambda m: m.mask.data.fill_(True),
    "through NumPy": lambda m: m.mask.numpy().fill(True),
    "another tensor": lambda m: setattr(m, "mask", torch.ones_like(m.mask)),
    "registered again": lambda m: m.register_buffer("mask", torch.ones_like(m.mask)),
}


def _again(mask: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Use a mask, write to a part of it, and use it again, for reading and for writing."""
    before = y[:, mask].sum(1, keepdim=True)
    mask[1:3].fill_(True)
    after = y[:, mask]
    result = y * 1
    result[:, mask] = after + before
    return torch.cat([result, after], 1)


WRITTEN: dict[str, Function] = {
    "created": lambda m, y: _again(torch.arange(y.shape[1]) > 2, y),
    "a literal": lambda m, y: _again(torch.tensor([True, False, False, True]), y),
    "a copy of a constant": lambda m, y: _again(MASK.clone(), y),
}


@pytest.mark.parametrize("function", WRITTEN.values(), ids=WRITTEN)
def test_a_mask_that_forward_writes_in_parts_selects_by_its_present_values(
    function: Function,
) -> None:
    model, x = Having(function).eval(), normal(8, 4)

    result = poptorch.inferenceModel(model, unchecked())(x)

    torch.testing.assert_close(result, model(x))


@pytest.mark.parametrize("change", CHANGES_ON_THE_HOST.values(), ids=CHANGES_ON_THE_HOST)
def test_a_change_of_a_constant_mask_on_the_host_causes_a_warning(
    change: Callable[[nn.Module], object], caplog: pytest.LogCaptureFixture
) -> None:
    model = masking(lambda m, y: y[:, m.mask])
    wrapped = poptorch.inferenceModel(model, options())
    wrapped(normal(4, 3))
    change(model)

    wrapped.copyWeightsToDevice()
    wrapped(normal(4, 3))

    assert any("the values of 'mask', which decide a shape" in text for text in caplog.messages)


def test_a_value_that_is_not_a_number_and_decides_a_branch_has_not_changed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = masking(lambda m, y: y * 2 if bool(m.frozen.isnan().any()) else y)
    model.frozen.data[0] = torch.nan
    wrapped = poptorch.inferenceModel(model, options())
    wrapped(normal(4, 3))

    wrapped(normal(4, 3))

    assert "does not follow" not in caplog.text


CHANGING: dict[str, Function] = {
    "after its use": lambda m, y: (y[:, m.mask], m.mask.logical_not_())[0],
    "before its use": lambda m, y: (m.mask.logical_not_(), y[:, m.mask])[1],
    "with the input": lambda m, y: y[:, y[0] > 0],
}


@pytest.mark.parametrize("function", CHANGING.values(), ids=CHANGING)
def test_a_mask_that_forward_changes_is_refused(function: Function) -> None:
    wrapped = poptorch.inferenceModel(masking(function), options())

    with pytest.raises(poptorch.Error, match=r"a buffer that forward does not\s+change"):
        wrapped(normal(4, 3))


def test_a_constant_mask_of_another_length_raises_the_error_of_eager_pytorch() -> None:
    model = masking(lambda m, y: y[:, m.mask[:3]])
    with pytest.raises(IndexError) as eager:
        model(normal(4, 3))

    with pytest.raises(IndexError) as wrapped:
        poptorch.inferenceModel(model, options())(normal(4, 3))

    assert str(wrapped.value) == str(eager.value)


def test_a_mask_that_selects_values_for_a_number_follows_changes_on_the_host() -> None:
    def cleared(model: Having, x: torch.Tensor) -> torch.Tensor:
        return written(x, model.mask, torch.zeros(()))

    model = Having(cleared, mask=MASK.clone())
    wrapped = poptorch.inferenceModel(model, options())
    wrapped(normal(4, 3))
    model.mask[1] = True
    wrapped.copyWeightsToDevice()

    assert torch.equal(wrapped(normal(4, 3)), model(normal(4, 3)))


def test_an_explanation_does_not_list_a_constant_mask() -> None:
    def both(model: Having, y: torch.Tensor) -> torch.Tensor:
        y = y[:, model.mask]
        return y[:, : int(y.sum())]

    wrapped = poptorch.inferenceModel(masking(both), options())

    (finding,) = wrapped.explain(normal(4, 3)).fatal

    assert "int()" in finding.what
