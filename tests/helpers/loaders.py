"""Making options and loaders for the tests of the data loader."""

from poptorch.dataloader import DataLoader
from poptorch.enums import DataLoaderMode, SharingStrategy
from poptorch.options import Options

FORK = {"sharing_strategy": SharingStrategy.Fork}  # the fastest way to start a process
ALL_MODES = list(DataLoaderMode)
ASYNC_MODES = [DataLoaderMode.Async, DataLoaderMode.AsyncRebatched]


def options(
    iterations=1, replicas=1, accumulation=1, group=1, process=None, processes=1, seed=None
):
    made = Options().deviceIterations(iterations).replicationFactor(replicas)
    made.Training.gradientAccumulation(accumulation)
    if group > 1:
        made.inputReplicaGrouping(group)
    if process is not None:
        made.Distributed.configureProcessId(process, processes)
    if seed is not None:
        made.randomSeed(seed)
    return made


def loader(dataset, *args, opts=None, mode=DataLoaderMode.Sync, **kwargs):
    if mode is not DataLoaderMode.Sync:
        kwargs["async_options"] = {**FORK, **kwargs.get("async_options", {})}
    return DataLoader(opts or options(), dataset, *args, mode=mode, **kwargs)


def values(batches):
    """Return the numbers of each batch, copied out of any buffer."""
    return [batch.flatten().tolist() for batch in batches]
