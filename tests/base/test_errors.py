"""What errors say, and where functions stand; arguments by the names of other releases."""

import functools

import pytest
import torch

import poptorch
from helpers.wrapping import infer, options
from poptorch._base import source
from poptorch._base.errors import visible


def test_an_error_of_the_library_names_the_line_that_led_to_it() -> None:
    where = r"Where:  test_errors\.py:\d+, poptorch\.Options\(\)\.set\(nonsense=1\)"
    with pytest.raises(poptorch.Error, match=where):
        poptorch.Options().set(nonsense=1)


def test_what_terminals_take_for_commands_is_written_out() -> None:
    text = "a\x1b[2J\x9b1m\r\x08\u202eb\u2066\x7f\ud800"
    assert visible(text) == r"a\x1b[2J\x9b1m\r\x08\u202eb\u2066\x7f\ud800"
    assert visible("tab\tand line\nand ä€😀") == "tab\tand line\nand ä€😀"


@functools.cache
@functools.cache
def decorated(x):
    return x


def test_a_decorated_function_stands_where_its_def_does() -> None:
    line = source.definition_line(decorated) or ""
    assert line.startswith("test_errors.py:")
    assert line.endswith("def decorated(x):")
    assert source.definition_line(len) is None


def test_a_long_line_is_cut_where_it_still_says_something(tmp_path) -> None:
    words, calls = "value = " + "a + " * 40 + "b", "x = f(" + "a," * 60 + "b)"
    path = tmp_path / "train.py"
    path.write_text(f"{words}\n{calls}\nx  =  1\n")
    first, second, third = (source.describe(str(path), line) for line in (1, 2, 3))
    assert first.startswith("train.py:1, value = a + a")
    assert first.endswith("+ a + ...")
    assert (second[:24], second[-4:]) == ("train.py:2, x = f(a,a,a,", " ...")
    assert max(len(first), len(second)) <= len("train.py:1, ") + 100
    assert third == "train.py:3, x = 1"


def test_keywords_of_other_releases_mean_what_todays_do(capfd) -> None:
    x, weight = torch.tensor([1.0, 3.0]), torch.nn.Parameter(torch.ones(2))
    assert poptorch.identity_loss(loss=x, reduction="sum") == 4
    opts = options().enablePipelining(enable_pipelining=False).profile(profile=False)
    assert isinstance(opts._execution_strategy, poptorch.ShardedExecution)
    opts.Precision.autocastEnabled(autocast_enabled=False)
    opts.Precision.autocastPolicy(autocast_policy=poptorch.autocasting.Policy())
    assert not opts.Precision.autocast_enabled
    half = poptorch.optim.AdamW([weight], accumType=torch.half, biasCorrection=False)
    assert (half.accum_type, half.bias_correction) == (torch.half, False)
    mode = poptorch.OverlapMode.NoOverlap

    def forward(x):
        x = poptorch.set_overlap_for_input(input_tensor=x, mode=mode)
        x = poptorch.ipu_print_tensor(tensor_to_print=x, optional_title="it")
        return poptorch.set_overlap_for_output(output_tensor=x * 1, mode=mode)

    assert torch.equal(infer(forward, x), x)
    assert capfd.readouterr().err.endswith("it: (1.0000, 3.0000)\n")
    with pytest.raises(TypeError, match=r"identity_loss\(\) got 'x' twice"):
        poptorch.identity_loss(x=x, loss=x)
