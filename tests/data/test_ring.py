"""The buffers in nameless shared memory."""

import gc
import os
import resource

import pytest
import torch

from helpers.leaks import mappings
from poptorch._data import ring
from poptorch._data.ring import Form, poison

SPECS = (
    ((3, 2), torch.float16),
    ((5,), torch.bool),
    ((), torch.int64),
    ((0, 4), torch.float32),
    ((2,), torch.bfloat16),
    ((2,), torch.complex64),
)


def test_two_processes_share_the_slots():
    file, end, written = ring.create(Form(list), SPECS, 2)
    form, read = ring.attach(file, end)
    os.close(file)
    assert form == Form(list)
    for slot in range(2):
        for tensor, (shape, dtype) in zip(written[slot], SPECS, strict=True):
            assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)
            tensor.copy_(torch.full(shape, slot))
    for slot in range(2):
        for tensor, (shape, dtype) in zip(read[slot], SPECS, strict=True):
            assert torch.equal(tensor, torch.full(shape, slot, dtype=dtype))
            assert tensor.numel() == 0 or tensor.data_ptr() % 64 == 0


@pytest.mark.slow
def test_the_memory_lives_as_long_as_a_view():
    maps = len(mappings())
    file, _, slots = ring.create(Form(list), SPECS, 1)
    os.close(file)
    kept = slots[0][0][1:]
    del slots
    gc.collect()
    kept.fill_(3)
    assert kept.sum() == 12
    assert len(mappings()) == maps + 1
    del kept
    gc.collect()
    assert len(mappings()) == maps


def test_memory_that_is_not_there_is_an_error_at_once():
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            ring.create(Form(list), [((2 << 20,), torch.uint8)], 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_poison_cannot_be_taken_for_data():
    tensors = [torch.zeros(shape, dtype=dtype) for shape, dtype in SPECS]
    poison(tensors)
    assert tensors[0].isnan().all()
    assert tensors[1].all()
    assert tensors[2] == torch.iinfo(torch.int64).max
    assert tensors[5].isnan().all()
