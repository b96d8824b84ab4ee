"""When the mean over micro-batches and replicas is taken: before or after gradients are added.

Each update here has 2 micro-batches on each of 4 replicas.
"""

import torch

from poptorch import MeanReductionStrategy
from poptorch._ir import slots
from poptorch._ir.spec import OptimSpec, Reduction
from poptorch._update import Accumulation

GRADIENT = slots.gradient(slots.param("weight", (1,), torch.float32))


def accumulated(strategy: MeanReductionStrategy) -> float:
    """Return the accumulator after the first micro-batch, whose gradient is 1."""
    optim = OptimSpec("sgd", (), (("accum_type", "float32"), ("loss_scaling", 1.0)), ())
    reduction = Reduction(strategy=strategy)
    mean = Accumulation(optim, reduction, chunks=2, summed=4, replicas=4)
    accumulate = mean.accumulate([GRADIENT])
    before = {slot.key: torch.zeros(slot.shape) for slot in accumulate.inputs}

    after = accumulate.function({**before, GRADIENT.key: torch.ones(1)})

    return after["accum.weight"].item()


def test_with_post_gradients_are_added_undivided() -> None:
    assert accumulated(MeanReductionStrategy.Post) == 1


def test_with_post_and_loss_each_gradient_is_divided_by_the_replicas() -> None:
    assert accumulated(MeanReductionStrategy.PostAndLoss) == 1 / 4


def test_with_running_the_accumulator_is_the_mean_of_its_micro_batches() -> None:
    assert accumulated(MeanReductionStrategy.Running) == 1
