"""The random numbers of a device, for eager torch to draw them too."""

import itertools

import torch

from poptorch._ops import streams


def follow(state: torch.Tensor, steps: int = 1, replicas: int = 1):
    """Seed torch at each ``next`` as a device is for its next micro-batch, from the state given."""
    while True:
        key, state = streams.next_key(state)
        for step, replica in itertools.product(range(steps), range(replicas)):
            torch.manual_seed(streams.seed(key, step, replica))
            yield
