"""A loader and a model that were made with other options."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import poptorch
from helpers import loaders
from helpers.wrapping import options

SAMPLES = TensorDataset(torch.randn(32, 3), torch.randn(32, 2))


def wrapped(opts: poptorch.Options) -> poptorch.PoplarExecutor:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return poptorch.trainingModel(model, opts, optimizer, loss=nn.MSELoss())


def loader(mode=poptorch.DataLoaderMode.Sync, **counts: int) -> poptorch.DataLoader:
    return loaders.loader(SAMPLES, 2, opts=options(**counts), mode=mode)


@pytest.mark.filterwarnings("ignore:This process .* use of fork")
@pytest.mark.parametrize("mode", poptorch.DataLoaderMode)
def test_batches_that_a_model_cuts_otherwise_are_said_once(mode, caplog) -> None:
    data, executor = loader(mode, iterations=2, accumulation=2), wrapped(options())
    for _ in range(2):
        for batch in data:
            executor(*batch)
    data.terminate()
    said = "of 8 samples is that of a DataLoader which makes it of 4 micro-batches of 2, and the "
    assert caplog.text.count(said + "model takes it as 1 of 8") == 1
    caplog.clear()
    executor = wrapped(options())
    for batch in loader(mode, accumulation=4):  # which only the loop holds
        executor(*batch)
    assert "makes it of 4 micro-batches of 2" in caplog.text


def test_nothing_is_said_of_the_same_counts_of_other_batches_or_of_inference(caplog) -> None:
    accessor = poptorch.AsynchronousDataAccessor(loader(accumulation=4))
    wrapped(options(accumulation=4))(*next(iter(accessor)))
    accessor.terminate()
    for counts in ({"iterations": 4}, {"accumulation": 4}):  # the loader cuts both alike
        executor = wrapped(options(iterations=2, accumulation=2))
        for batch in loader(**counts):
            executor(*batch)
    data = loader(accumulation=4)
    batch = next(iter(data))
    wrapped(options())(batch[0][:4], batch[1][:4])
    model = poptorch.inferenceModel(nn.Linear(3, 2), options())
    assert [model(x).shape for x, _ in data] == [(8, 2)] * 4
    gone = [*loader(accumulation=2)]
    wrapped(options())(*gone[0])
    assert "DataLoader" not in caplog.text
