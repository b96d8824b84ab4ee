"""The buffers in nameless shared memory."""

import gc
import os
import resource

import pytest
import torch

from helpers.leaks import mappings
from poptorch._data.element import TensorSpec
from poptorch._data.ring import Ring, nameless_file, poison, reserve, size_of

SPECS = (
    TensorSpec((3, 2), torch.float16),
    TensorSpec((5,), torch.bool),
    TensorSpec((), torch.int64),
    TensorSpec((0, 4), torch.float32),
    TensorSpec((2,), torch.bfloat16),
    TensorSpec((2,), torch.complex64),
)


@pytest.fixture
def file():
    descriptor = nameless_file("poptorch_test")
    yield descriptor
    os.close(descriptor)


def test_two_rings_on_one_file_share_their_slots(file):
    reserve(file, size_of(SPECS, 2))
    writer, reader = Ring(file, SPECS, 2), Ring(file, SPECS, 2)
    for slot in range(2):
        for tensor, spec in zip(writer.slots[slot], SPECS, strict=True):
            assert (tuple(tensor.shape), tensor.dtype) == (spec.shape, spec.dtype)
            tensor.copy_(torch.full(spec.shape, slot))
    for slot in range(2):
        for tensor, spec in zip(reader.slots[slot], SPECS, strict=True):
            assert torch.equal(tensor, torch.full(spec.shape, slot, dtype=spec.dtype))
            assert tensor.numel() == 0 or tensor.data_ptr() % 64 == 0


@pytest.mark.slow
def test_the_memory_lives_as_long_as_a_view(file):
    maps = len(mappings())
    reserve(file, size_of(SPECS, 1))
    ring = Ring(file, SPECS, 1)
    kept = ring.slots[0][0][1:]
    del ring
    gc.collect()
    kept.fill_(3)
    assert kept.sum() == 12
    assert len(mappings()) == maps + 1
    del kept
    gc.collect()
    assert len(mappings()) == maps


def test_memory_that_is_not_there_is_an_error_at_once(file):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            reserve(file, 2 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_poison_cannot_be_taken_for_data():
    tensors = [torch.zeros(spec.shape, dtype=spec.dtype) for spec in SPECS]
    poison(tensors)
    assert tensors[0].isnan().all()
    assert tensors[1].all()
    assert tensors[2] == torch.iinfo(torch.int64).max
    assert tensors[5].isnan().all()
