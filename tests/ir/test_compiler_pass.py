"""A pass is a value, and passes are left out within a block."""

from poptorch._ir.compiler_pass import Pass, is_left_out, leaving_out


def doubled(number: int, factor: int) -> int:
    """Multiply a number
    by a factor.
    """
    return number * factor


def test_a_pass_needs_the_parameters_of_its_function() -> None:
    assert Pass("double", "_room", doubled, "number").needs == ("number", "factor")


def test_a_pass_describes_itself_in_one_line() -> None:
    assert Pass("double", "_room", doubled).does == "multiply a number by a factor"


def test_a_pass_without_a_replacement_cannot_be_left_out() -> None:
    assert Pass("double", "_room", doubled, "number").optional == ()


def test_a_pass_and_its_parts_can_be_left_out() -> None:
    each = Pass("double", "_room", doubled, "number", without=int, parts=("fast",))

    assert each.optional == ("double", "fast")


def test_a_pass_is_left_out_within_the_block_only() -> None:
    with leaving_out(["lanes"]):
        within = is_left_out("lanes")

    assert within
    assert not is_left_out("lanes")


def test_a_block_within_another_leaves_out_more() -> None:
    with leaving_out(["lanes"]), leaving_out(["bundle"]):
        outer, inner = is_left_out("lanes"), is_left_out("bundle")

    assert outer
    assert inner


def test_other_passes_are_not_left_out() -> None:
    with leaving_out(["lanes"]):
        assert not is_left_out("bundle")
