"""Programs that are known to have run fit or come close; those known not to have fitted do not."""

from functools import partial
from pathlib import Path

import pytest

from helpers.cases import few
from ipu_rows import LARGE, VERDICTS, Priced, Row, small_cnn
from poptorch import Estimate
from poptorch._ipu_model.constants import DEFAULT, ERROR_BANDS
from poptorch._ipu_model.parts import verdict

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "ipu_model.md").read_text()
_KEPT = ("FashionMNIST CNN, a call per batch", "BERT-Large SL512, Bow Pod16")


@pytest.mark.slow
@pytest.mark.parametrize("row", few(VERDICTS, *(row for row in VERDICTS if row.title in _KEPT)),
                         ids=lambda row: row.title)  # fmt: skip
def test_what_ran_fits_and_what_did_not_does_not(row: Row) -> None:
    priced = Priced(row).estimate()
    known, needs = "ran" if row.ran else "did not fit", priced.culprit.over + 100
    assert f"| {row.title} | {known} | {priced.verdict}, {needs:.0f} % |\n" in PAGE
    assert (priced.verdict != "does not fit") == row.ran, priced.culprit
    for chip in priced.chips:
        assert sum(chip.peak.values()) == chip.bytes
        assert max(chip.live) == pytest.approx(chip.bytes, rel=1e-9)
    if row.published:
        factor = priced.items_per_second / row.published
        assert max(factor, 1 / factor) <= priced.error_band == ERROR_BANDS[priced.kind]
        assert f"| {row.title} | {priced.kind} | {factor:.2f} |" in PAGE
    if row.title == "BERT-Large SL512, Bow Pod16":
        check_activations_of_bert(priced)


@pytest.mark.parametrize(
    ("over", "expected"), [(-10.1, "fits"), (-9.9, "close"), (9.9, "close"), (10.1, "does not fit")]
)
def test_a_verdict_has_an_error(over: float, expected: str) -> None:
    assert verdict(over) == expected


@pytest.mark.long
def test_activations_are_the_same_where_recomputation_is_the_default() -> None:
    check_activations_of_bert(Priced(Row("", "bow:16", 0, "", LARGE)).estimate())


def check_activations_of_bert(priced: Estimate) -> None:
    """Eight inputs, seven times six checkpoints and a gradient of 2 MiB wait; then one layer again.

    That has 2 x 16 x 512 x 512 halves twice, 2 x 512 x 4096 four times (before and behind the GELU,
    its gradient, that of the weight) and 2 x 512 x 1024 eight times: query, key, value, what is
    attended to, the sum, its norm, two gradients.
    """
    chip = priced.chips[1]
    small, wide, scores = 2 << 20, 8 << 20, 16 << 20
    again = 2 * scores + 4 * wide + 8 * small
    waiting = [one.bytes for one in chip.largest if one.category == "activations"]
    assert waiting == [8 * small, *(6 * [7 * small])]  # the gradient is not among the largest
    assert chip.peak["activations"] == pytest.approx(sum(waiting) + small + again, rel=0.01)


@pytest.mark.slow
def test_inputs_come_from_the_host_once_at_the_speed_of_the_gateway() -> None:
    """The backward pass reads the images again; the chip still has them."""
    fed, synthetic = (Priced(Row("", "mk2:1", 0, "", partial(small_cnn, synthetic=how))).estimate()
                      for how in (False, True))  # fmt: skip
    images = 16 * 128 * 128 * 4 + 16 * 4
    added = (fed.seconds - synthetic.seconds) / 50
    assert added == pytest.approx(images / DEFAULT.host_bytes, rel=0.02)
