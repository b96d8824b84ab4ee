"""Values that a mask selects are arranged in rows, as targets of a CTC loss."""

import torch

from poptorch._capture.masked_selection import Selected

VALUES = torch.tensor([[11, 12, 13], [21, 22, 23]])
MASK = torch.tensor([[True, False, True], [False, True, False]])  # selects 11, 13 and 22


def test_each_row_starts_with_its_values_in_the_order_of_the_mask() -> None:
    lengths = torch.tensor([2, 1])

    rows, _ = Selected(VALUES, MASK).targets(lengths)

    assert rows[0, :2].tolist() == [11, 13]
    assert rows[1, :1].tolist() == [22]


def test_lengths_that_add_up_to_the_number_of_values_are_kept() -> None:
    _, lengths = Selected(VALUES, MASK).targets(torch.tensor([2, 1]))

    assert lengths.tolist() == [2, 1]


def test_if_the_lengths_do_not_add_up_each_is_longer_than_a_row() -> None:
    rows, lengths = Selected(VALUES, MASK).targets(torch.tensor([2, 2]))

    assert lengths.tolist() == [rows.shape[1] + 1] * 2


def test_many_values_keep_their_order() -> None:
    """Sorts that are not stable keep the order of a few values, too."""
    values = torch.arange(1000).view(1, 1000)

    rows, _ = Selected(values, values % 3 == 0).targets(torch.tensor([334]))

    assert rows[0, :334].tolist() == list(range(0, 1000, 3))
