"""``rng_state``: the random numbers of a device, which are not those of the host."""

import pytest
import torch

import poptorch
from helpers.wrapping import inference, options

ONES = torch.ones(64)
DROPOUT = torch.nn.Dropout(0.5).train()


@pytest.fixture
def seeded() -> poptorch.PoplarExecutor:
    """Return a dropout with two iterations in each call, from the seed 7."""
    return poptorch.inferenceModel(DROPOUT, options(iterations=2).randomSeed(7))


@pytest.mark.spec("executor", 56)
def test_the_state_of_a_new_program_is_its_seed(seeded: poptorch.PoplarExecutor) -> None:
    seeded.compile(ONES)

    assert seeded.rng_state == [7]


@pytest.mark.spec("executor", 56)
def test_each_micro_batch_draws_new_numbers(seeded: poptorch.PoplarExecutor) -> None:
    first, second = seeded(ONES).chunk(2)

    assert not torch.equal(first, second)


@pytest.mark.spec("executor", 56)
def test_a_state_that_is_set_repeats_the_numbers(seeded: poptorch.PoplarExecutor) -> None:
    first = seeded(ONES)
    state = seeded.rng_state
    second = seeded(ONES)

    seeded.rng_state = state
    assert torch.equal(seeded(ONES), second)

    seeded.rng_state = [7]
    assert torch.equal(seeded(ONES), first)


@pytest.mark.spec("executor", 56)
def test_the_state_stays_when_the_device_is_detached(seeded: poptorch.PoplarExecutor) -> None:
    seeded(ONES)
    state = seeded.rng_state
    second = seeded(ONES)
    seeded.rng_state = state

    seeded.detachFromDevice()

    assert seeded.rng_state == state
    assert torch.equal(seeded(ONES), second)


@pytest.mark.spec("executor", 56)
def test_a_list_that_is_not_a_state_is_refused(seeded: poptorch.PoplarExecutor) -> None:
    seeded.compile(ONES)

    with pytest.raises(ValueError, match="not a state of the device"):
        seeded.rng_state = [1, 2, 3]


@pytest.mark.spec("executor", 56)
def test_the_hosts_seed_does_not_matter_to_a_program_with_a_seed(
    seeded: poptorch.PoplarExecutor,
) -> None:
    first = seeded(ONES)
    with_same_seed = poptorch.inferenceModel(DROPOUT, options(iterations=2).randomSeed(7))

    torch.manual_seed(8)

    assert torch.equal(with_same_seed(ONES), first)


@pytest.mark.spec("executor", 56)
def test_the_host_draws_other_numbers_from_the_same_seed(seeded: poptorch.PoplarExecutor) -> None:
    torch.manual_seed(7)

    of_host = torch.cat([DROPOUT(ONES[:32]), DROPOUT(ONES[32:])])

    assert not torch.equal(of_host, seeded(ONES))


@pytest.mark.spec("executor", 56)
def test_attention_without_dropout_draws_nothing() -> None:
    """Torch marks the operator as random."""
    attention = inference(lambda q: torch.nn.functional.scaled_dot_product_attention(q, q, q))
    attention(ONES.view(1, 1, 8, 8))
    state = attention.rng_state

    attention(ONES.view(1, 1, 8, 8))

    assert attention.rng_state == state


@pytest.mark.spec("executor", 56)
def test_a_program_without_a_seed_has_no_state_before_its_first_call() -> None:
    unseeded = inference(DROPOUT, replicas=2)

    unseeded.compile(ONES)

    assert unseeded.rng_state is None


@pytest.mark.spec("executor", 56)
def test_programs_without_a_seed_draw_different_numbers() -> None:
    first, second = inference(DROPOUT, replicas=2), inference(DROPOUT, replicas=2)

    assert not torch.equal(first(ONES), second(ONES))


@pytest.mark.spec("executor", 56)
def test_replicas_draw_different_numbers() -> None:
    of_first, of_second = inference(DROPOUT, replicas=2)(ONES).chunk(2)

    assert not torch.equal(of_first, of_second)
