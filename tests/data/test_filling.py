"""Copying elements into buffers, one to one and packed."""

import pytest
import torch

from poptorch._base.errors import AssertionFailure
from poptorch._data.channel import ALL_ROWS
from poptorch._data.ring import fill_packed, fill_whole


class Buffers:
    """Hands out fresh buffers and remembers when it was asked."""

    def __init__(self, *shapes):
        self.shapes, self.events, self.given = shapes, [], []

    def claim(self):
        self.events.append("claim")
        self.given.append([torch.full(shape, -1.0) for shape in self.shapes])
        return self.given[-1]

    def elements(self, *elements):
        for at, element in enumerate(elements):
            self.events.append(f"load {at}")
            yield element


def rows(*values):
    return [torch.tensor(values, dtype=torch.float32)]


def test_a_buffer_is_claimed_before_its_element_is_loaded():
    buffers = Buffers((2,))
    counts = list(fill_whole(buffers.elements(rows(1, 2), rows(3, 4)), buffers.claim))
    assert counts == [ALL_ROWS, ALL_ROWS]
    assert buffers.events == ["claim", "load 0", "claim", "load 1", "claim"]
    assert [b[0].tolist() for b in buffers.given[:2]] == [[1, 2], [3, 4]]


def test_values_are_cast_to_the_type_of_the_buffer():
    buffers = Buffers((2,))
    list(fill_whole([[torch.tensor([1, 2], dtype=torch.int64)]], buffers.claim))
    assert buffers.given[0][0].tolist() == [1.0, 2.0]


def test_a_last_element_may_have_fewer_rows():
    buffers = Buffers((3,), (3, 2))
    element = [torch.ones(2), torch.ones(2, 2)]
    assert list(fill_whole([element], buffers.claim)) == [2]


@pytest.mark.parametrize(
    "shapes, element",
    [
        (((2,),), [torch.ones(3)]),
        (((2, 2),), [torch.ones(2, 3)]),
        (((2,),), [torch.ones(2, 1)]),
        (((2,), (3,)), [torch.ones(1), torch.ones(1)]),
        (((2,), (2,)), [torch.ones(2), torch.ones(1)]),
        (((2,),), [torch.ones(2), torch.ones(2)]),
        (((),), [torch.ones(1)]),
    ],
)
def test_other_shapes_are_refused(shapes, element):
    buffers = Buffers(*shapes)
    with pytest.raises(AssertionFailure, match=r"shapes of the first|same first dimension"):
        list(fill_whole([element], buffers.claim))


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("cuts", [[7], [1] * 7, [2, 5], [3, 3, 1], [6, 1], [4, 0, 3]])
def test_packing_loses_and_repeats_nothing(cuts, drop_last):
    buffers = Buffers((3,))
    elements = [[part] for part in torch.arange(7.0).split(cuts)]
    counts = list(fill_packed(elements, buffers.claim, 3, drop_last))
    assert counts == [ALL_ROWS, ALL_ROWS] + ([] if drop_last else [1])
    got = [
        b[0][: 3 if count == ALL_ROWS else count]
        for b, count in zip(buffers.given, counts, strict=False)
    ]
    assert torch.cat(got).tolist() == list(range(7))[: sum(map(len, got))]
    assert sum(map(len, got)) == (6 if drop_last else 7)


def test_packing_loads_no_more_than_fits():
    buffers = Buffers((2,))
    source = fill_packed(buffers.elements(rows(1), rows(2, 3), rows(4)), buffers.claim, 2, True)
    next(source)
    assert buffers.events == ["claim", "load 0", "load 1"]


def test_packing_needs_rows():
    with pytest.raises(AssertionFailure, match="same first dimension"):
        list(fill_packed([[torch.tensor(1.0)]], lambda: [torch.tensor(0.0)], 2, True))
    with pytest.raises(AssertionFailure, match="same first dimension"):
        list(fill_packed([[torch.ones(1), torch.ones(2)]], Buffers((2,), (2,)).claim, 2, True))
