"""States of generators as JSON: brought back exactly; what a file has in their place is refused."""

import json
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import poptorch
from poptorch._checkpoints import host_random

MAKERS: dict[str, Any] = {
    "torch": lambda: torch.Generator().manual_seed(3),
    "Python": lambda: random.Random(3),
    "RandomState": lambda: np.random.RandomState(3),
    "PCG64": lambda: np.random.Generator(np.random.PCG64(3)),
    "PCG64DXSM": lambda: np.random.Generator(np.random.PCG64DXSM(3)),
    "MT19937": lambda: np.random.Generator(np.random.MT19937(3)),
    "Philox": lambda: np.random.Generator(np.random.Philox(3)),
    "SFC64": lambda: np.random.Generator(np.random.SFC64(3)),
}


def drawn(generator: Any) -> list[float]:
    """Numbers that need all of a state: the second normal number of a pair is kept in it."""
    if isinstance(generator, torch.Generator):
        return torch.randn(5, generator=generator).tolist()
    if isinstance(generator, random.Random):
        return [generator.gauss(0, 1) for _ in range(5)]
    return [*generator.standard_normal(5).tolist(), *generator.random(3).tolist()]


@pytest.mark.parametrize("kind", MAKERS)
def test_a_generator_of_a_loader_draws_the_same_numbers_again(kind: str) -> None:
    generator = MAKERS[kind]()
    drawn(generator)
    states = json.loads(json.dumps(host_random.state([generator])))
    expected = drawn(generator)

    host_random.check(states, [generator])
    host_random.restore(states, [generator])

    assert drawn(generator) == expected


@pytest.mark.parametrize("kind", MAKERS)
def test_checking_a_state_changes_no_generator(kind: str) -> None:
    generator = MAKERS[kind]()
    states = host_random.state([generator])
    expected = drawn(MAKERS[kind]())

    host_random.check(states, [generator])

    assert drawn(generator) == expected


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("content", [None, 1, [], {}, [1, 2], {"bit_generator": "PCG64"}, "x"])
def test_a_value_that_is_not_a_state_is_refused(kind: str, content: object) -> None:
    generator = MAKERS[kind]()
    states = host_random.state([generator])
    states["own"] = [[type(generator).__name__, content]]

    with pytest.raises((ValueError, TypeError, RuntimeError)):
        host_random.check(states, [generator])


def test_numbers_out_of_range_are_refused() -> None:
    generator = np.random.default_rng(3)
    states = host_random.state([generator])
    states["own"][0][1]["state"]["inc"] = -1

    with pytest.raises(ValueError, match="not a state of Generator"):
        host_random.check(states, [generator])


def test_a_loader_with_other_generators_is_refused_by_name() -> None:
    states = host_random.state([random.Random(3)])

    with pytest.raises(poptorch.Error, match="Random in the checkpoint; none in the loader"):
        host_random.check(states)


def test_states_of_versions_without_own_generators_are_taken() -> None:
    states = host_random.state()
    del states["own"]

    host_random.check(states)
    host_random.restore(states)


def test_each_generator_is_found_once_and_where_loaders_keep_them() -> None:
    shared, inner = torch.Generator(), random.Random(1)
    dataset = SimpleNamespace(datasets=[SimpleNamespace(own=inner, again=shared)])
    sampler = SimpleNamespace(generator=shared)
    loader = SimpleNamespace(generator=shared, sampler=sampler, dataset=dataset, loader=None)
    loader.itself, sampler.sampler = loader, loader

    names = {id(shared): "the loader's and the sampler's", id(inner): "that of a part of the data"}
    found = [names[id(generator)] for generator in host_random.held_by(loader)]
    assert found == ["the loader's and the sampler's", "that of a part of the data"]


def test_generators_without_their_own_state_are_left_out() -> None:
    loader = SimpleNamespace(generator=torch.default_generator, other=random.SystemRandom())

    assert host_random.held_by(loader) == []
