"""Making options and loaders for the tests of the data loader."""

from typing import Any

from poptorch.dataloader import DataLoader
from poptorch.enums import DataLoaderMode, SharingStrategy
from poptorch.options import Options

FORK = {"sharing_strategy": SharingStrategy.Fork}  # the fastest way to start a process
ALL_MODES = list(DataLoaderMode)
ASYNC_MODES = [DataLoaderMode.Async, DataLoaderMode.AsyncRebatched]


def options(
    iterations: int = 1,
    replicas: int = 1,
    accumulation: int = 1,
    group: int = 1,
    process: int | None = None,
    processes: int = 1,
    seed: int | None = None,
) -> Options:
    made = Options().deviceIterations(iterations).replicationFactor(replicas)
    made.Training.gradientAccumulation(accumulation)
    if group > 1:
        made.inputReplicaGrouping(group)
    if process is not None:
        made.Distributed.configureProcessId(process, processes)
    if seed is not None:
        made.randomSeed(seed)
    return made


def loader(
    dataset: Any,
    *args: Any,
    opts: Options | None = None,
    mode: DataLoaderMode = DataLoaderMode.Sync,
    **kwargs: Any,
) -> DataLoader:
    if mode is not DataLoaderMode.Sync:
        kwargs["async_options"] = {**FORK, **kwargs.get("async_options", {})}
    return DataLoader(opts or options(), dataset, *args, mode=mode, **kwargs)


def values(batches: Any) -> list[list[float]]:
    """Return the numbers of each batch, copied out of any buffer."""
    return [batch.flatten().tolist() for batch in batches]
