"""Arguments by the names that other releases gave them."""

import pytest
import torch

import poptorch
from helpers.wrapping import infer, options


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
