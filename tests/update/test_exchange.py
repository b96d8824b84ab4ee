"""What a process hands over for sums over all processes."""

import torch

from poptorch._ir import slots
from poptorch._ir.spec import OptimSpec, Reduction
from poptorch._update import Accumulation


def accumulation(adapts: bool) -> Accumulation:
    optim = OptimSpec("sgd", (), (("accum_type", "float32"), ("loss_scaling", 1.0)), ())
    return Accumulation(optim, Reduction(automatic_loss_scaling=adapts), summed=4)


def test_processes_add_half_gradients_up_in_float32() -> None:
    weight = slots.param("weight", (2,), torch.float16)
    handed_over = accumulation(adapts=False).hand_over([slots.gradient(weight)])

    (sent,) = handed_over.function({"gradient.weight": torch.ones(2).half()}).values()

    assert sent.dtype is torch.float32
    assert [slot.dtype for slot in handed_over.outputs] == [torch.float32]


def test_a_loss_scale_that_adapts_sees_sums_in_half() -> None:
    weight = slots.param("weight", (2,), torch.float16)
    handed_over = accumulation(adapts=True).hand_over([slots.gradient(weight)])

    assert [slot.dtype for slot in handed_over.outputs] == [torch.float16]
