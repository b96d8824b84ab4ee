"""Data sets and helpers that other processes can import, for the tests of the data loader."""

import multiprocessing
import os
import signal
import time
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from poptorch.argparsers import ICustomArgParser

METHODS = multiprocessing.get_all_start_methods()
Pair = namedtuple("Pair", "left right")


class Numbers(Dataset):
    """Sample i is the number i, in a tensor of the given shape and type."""

    def __init__(
        self, size: int, shape: tuple[()] = (), dtype: torch.dtype = torch.float32
    ) -> None:
        self.size, self.shape, self.dtype = size, shape, dtype

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        if not 0 <= index < self.size:
            raise IndexError(index)
        return torch.full(self.shape, index, dtype=self.dtype)


class StartMethod(Numbers):
    """Every sample is the place in METHODS of how the process that reads it starts others."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(METHODS.index(multiprocessing.get_start_method()))


FORMS = {  # what a number can be made
    "tuple": lambda t: (t, -t),
    "list": lambda t: [t, -t],
    "named tuple": lambda t: Pair(t, -t),
    "dict": lambda t: {"b": t, "a": -t},
    "ordered dict": lambda t: OrderedDict(b=t, a=-t),
    "nested": lambda t: (t, {"a": [t, -t]}),
    "with text": lambda t: (t, f"sample {int(t)}"),
    "with number": lambda t: (t, int(t)),
    "array": lambda t: np.array([float(t), -float(t)], dtype=np.float32),
    "all types": lambda t: [t.to(dtype) for dtype in DTYPES],
}
DTYPES = (torch.float16, torch.bfloat16, torch.uint8, torch.bool, torch.complex64, torch.int64)


class Structured(Numbers):
    """Sample i in a form that is made of the number i."""

    def __init__(self, size: int, form: str) -> None:
        super().__init__(size)
        self.form = form

    def __getitem__(self, index: int) -> list[torch.Tensor] | tuple[torch.Tensor, torch.Tensor]:
        return FORMS[self.form](super().__getitem__(index))


class Graph:
    """A collated object with a string and tensors."""

    def __init__(self, nodes: torch.Tensor, edges: torch.Tensor, name: str) -> None:
        self.nodes, self.edges, self.name = nodes, edges, name

    @classmethod
    def collate(cls, samples: list[torch.Tensor]) -> "Graph":
        nodes = torch.stack(samples)
        return cls(nodes, -nodes, "graph")


class SubGraph(Graph):
    """Has no parser of its own."""


class GraphParser(ICustomArgParser):
    def yieldTensors(self, struct: Graph) -> Iterator[torch.Tensor]:  # noqa: N802
        yield struct.nodes
        yield struct.edges

    def reconstruct(self, original_structure: Graph, tensor_iterator: Any) -> Graph:
        kind = type(original_structure)
        return kind(next(tensor_iterator), next(tensor_iterator), original_structure.name)


class Stream(IterableDataset):
    """The numbers below a size; with ``splits``, every worker yields a contiguous part."""

    def __init__(self, size: int, splits: bool = False) -> None:
        self.size, self.splits = size, splits

    def __iter__(self) -> Any:
        info = get_worker_info()
        begin, end = 0, self.size
        if self.splits and info is not None:
            each = -(-self.size // info.num_workers)
            begin, end = info.id * each, min((info.id + 1) * each, self.size)
        return (torch.tensor(float(number)) for number in range(begin, end))


class Repeating(IterableDataset):
    """The numbers below a size, in every worker."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        return (torch.tensor(float(number)) for number in range(self.size))


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.size


class Counted(Numbers):
    """Counts in shared memory how many samples any process has loaded."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.count = torch.zeros(1, dtype=torch.int64).share_memory_()

    def __getitem__(self, index: int) -> Any:
        self.count += 1
        return super().__getitem__(index)


class Acting(Numbers):
    """Does something before one sample is there, as long as the shared flag is up."""

    def __init__(self, size: int, index: int, action: Callable[..., Any]) -> None:
        super().__init__(size)
        self.index, self.action = index, action
        self.acts = torch.ones(1, dtype=torch.bool).share_memory_()

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.index and self.acts:
            self.action(index)
        return super().__getitem__(index)


def cannot_be_read(index: int) -> None:
    raise KeyError(f"sample {index} cannot be read")


def kills_its_process(index: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Slow(Numbers):
    """Takes some milliseconds per sample, without using a core."""

    def __init__(self, size: int, milliseconds: int, shape: tuple[()] = ()) -> None:
        super().__init__(size, shape)
        self.milliseconds = milliseconds

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.milliseconds / 1000)
        return super().__getitem__(index)


class Unfinished:
    """A map-style data set that says StopIteration beyond its length."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= self.size:
            raise StopIteration
        return torch.tensor(float(index))


class Endless(Unfinished):
    """A map-style data set with a length that its items do not know."""

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(float(index))


class Workers(Numbers):
    """Sample: (index, id of torch's worker or -1, whether the initialiser has run)."""

    initialised = -1

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        return torch.tensor([index, -1 if info is None else info.id, self.initialised])


def note_worker(worker_id: int) -> None:
    Workers.initialised = worker_id


class Random(Numbers):
    """Draws from all three random generators that data sets use."""

    def __getitem__(self, index: int) -> Any:
        import random

        drawn = [torch.rand(()).item(), float(np.random.rand()), random.random()]
        return torch.tensor(drawn, dtype=torch.float64)


class Carrying:
    """Holds tensors of many kinds; the last element says whether they have arrived."""

    def __init__(self, shared: torch.Tensor, own: torch.Tensor) -> None:
        self.shared, self.own = shared, own
        self.known = self.values()
        self.twice = [own, own]

    @staticmethod
    def values() -> dict[str, torch.Tensor]:
        return {
            "big": torch.arange(100_000).reshape(100, 1000),
            "scalar": torch.tensor(5),
            "half": torch.ones(3, dtype=torch.float16),
            "bool": torch.tensor([True, False]),
            "transposed": torch.arange(6.0).reshape(2, 3).t(),
            "empty": torch.empty(0, 3),
            "expanded": torch.ones(1).expand(1000, 2),
            "array": torch.arange(10).numpy(),
            "weight": torch.nn.Parameter(torch.ones(3)),
        }

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return self.check() if index == 2 else (self.own, self.shared)[index]

    def check(self) -> Any:
        torch.testing.assert_close(self.known, self.values(), rtol=0, atol=0)
        assert self.known["weight"].requires_grad
        assert self.known["expanded"].stride() == (0, 0)
        assert self.twice[0] is self.twice[1] is self.own
        self.known["big"].fill_(1)  # its own copy, and writable
        self.known["array"][0] = 7
        self.known = self.values()
        return torch.ones(2)


class Unwieldy:
    """Has more tensors than the limit of open files, and one tensor that is small only as a
    view.
    """

    def __init__(self) -> None:
        self.many = [torch.tensor([float(i)]) for i in range(2000)]
        self.expanded = torch.ones(1).expand(100_000_000_000)

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        return self.many[-1] * self.expanded[7]


class Unpicklable(Numbers):
    def __getstate__(self) -> None:
        raise RuntimeError("this data set cannot travel")


class Unreadable(Numbers):
    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise RuntimeError("this data set cannot arrive")
