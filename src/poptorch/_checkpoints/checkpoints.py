"""Save and resume training runs with ``poptorch.Checkpoints``: what a checkpoint contains, and how
it is written while training goes on.

A checkpoint is a folder without pickles. It gets its final name only when it is complete, so a run
that is killed while it writes leaves the previous checkpoint valid.
"""

# We do not use torch.distributed.checkpoint: its formats either contain pickles or hold only
# tensors, and it waits for a lost process without saying which one.

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import copy
import functools
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.utils import data

from .. import _job
from .._base import archive, log, nested_values
from .._base.errors import AssertionFailure, Error
from .._data.sharding import Interleaved
from .._job.rendezvous import Background
from .._session import files
from ..dataloader import DataLoader
from ..executor import PoplarExecutor
from ..options.distributed import data_share
from . import host_random
from .checkpoint_folder import CheckpointFolder

__all__ = ["Checkpoints"]

_MODEL, _FACTS = "model.poptorch", "facts.json"
# The smallest valid value of each number in a checkpoint's facts.
_LEAST = {"processes": 1, "samples": 1, "step": 0, "epoch": 0, "taken": 0, "order": 0}
_LARGEST = 1 << 53
_POLL_SECONDS = 0.05  # seconds between two checks for the files of other processes

# for each path, the byte strings to write one after another
Files = Mapping[Path, Mapping[str, bytes]]


class Checkpoints:
    """The checkpoints of one training run, in a folder. An addition to PopTorch.

    Iterate over ``batches``, which counts the batches that you have used:

    ```python
    checkpoints = poptorch.Checkpoints("run", training, loader, scheduler=scheduler)
    checkpoints.resume()
    for batch in checkpoints.batches(epochs=3):
        out, loss = training(*batch)
        if checkpoints.step % 100 == 0:
            checkpoints.save()
    ```

    In a job, all processes must make the same calls and see the same folder.

    Args:
        folder: the folder of the checkpoints; it is created if it does not exist.
        executor: a model that is wrapped for training.
        loader: a loader, or another iterable that can be iterated again. Each epoch starts new
            workers.
        keep: how many of the last checkpoints to keep.
        stateful: schedulers and other objects with ``state_dict()`` and ``load_state_dict()``, by
            name. Their state must consist of numbers, strings, lists and dicts.

    Attributes:
        step: how many batches you have received, including the current one.
        epoch: the index of the current epoch, from 0.

    Raises:
        AssertionError: the executor does not train, ``keep`` is less than 1, or the loader shuffles
            in another process, whose order is not accessible.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        executor: PoplarExecutor,
        loader: Any,
        keep: int = 2,
        **stateful: Any,
    ) -> None:
        if executor._optimizer is None:
            raise AssertionFailure(
                "Checkpoints need a model that is wrapped for training",
                fix="pass the wrapped model that poptorch.trainingModel returned",
            )
        if keep < 1:
            raise AssertionFailure(
                "At least one checkpoint must be kept",
                got=f"keep={keep}",
                fix="pass keep=1 or more",
            )
        accessed = isinstance(loader, DataLoader) and loader._accessor is not None
        if accessed and (loader._permuted is not None or _draws(loader)):
            raise AssertionFailure(
                "Checkpoints cannot record the position in a loader that shuffles in another "
                "process",
                got="a DataLoader that shuffles, with an asynchronous mode",
                fix=(
                    "pass mode=poptorch.DataLoaderMode.Sync to the DataLoader; to load batches "
                    "while the model computes, also pass num_workers"
                ),
            )
        self.step = self.epoch = 0
        self._folder = CheckpointFolder(Path(folder), keep)
        self._executor, self._loader, self._stateful = executor, loader, stateful
        place = executor.options.Distributed
        self._process, self._processes = place.processId, place.numProcesses
        self._samples = (getattr(loader, "combinedBatchSize", None) or 1) * data_share(place)[1]
        self._taken = 0  # number of batches used in this epoch
        # states of the random generators at that time; None between epochs
        self._epoch_start: Any = None
        self._resumed: Any = None  # states of the random generators when the checkpoint was made
        self._order = 0  # index of the loader's permutation in this epoch
        self._rest: Iterator[Any] | None = None  # the remaining batches of this epoch
        self._has_warned = False  # whether it warned about checkpoints of an older run
        self._writing: _Writing | None = None

    def resume(self) -> bool:
        """Resume from the last saved checkpoint, if there is one. Call it before the model.

        With the same number of processes as before, all losses are those of an uninterrupted run.
        With another number, the run continues after the same number of samples. These are the same
        samples if ``poprun --min-instances`` chose the number. Random numbers on the device then
        depend on the index of the replica; those on the host are those of process 0.

        Returns:
            Whether there was a checkpoint.

        Raises:
            poptorch.Error: the model is already compiled, a file is damaged, it belongs to another
                model or optimizer, or fewer processes would read different batches, because the
                data set is iterable or the last batch is incomplete with ``drop_last=False``. In
                these cases nothing is changed.
        """
        executor = self._executor
        if executor.isCompiled():
            raise Error(
                "resume() must be called before the model is compiled",
                fix=(
                    "call resume() before the first call of the wrapped model, or call destroy() "
                    "on the wrapped model before resume()"
                ),
            )
        newest = self._folder.newest()
        agreed = self._agree(-1 if newest is None else newest)[0]
        if agreed < 0:
            return False
        folder = self._folder.complete(agreed)
        saved = files.read(folder / _MODEL)
        facts = self._read_facts(folder / _name(0))
        if self._process and facts["processes"] == self._processes:
            facts = self._read_facts(folder / _name(self._process))
        self._check_share(facts)
        unknown = facts["stateful"].keys() ^ self._stateful.keys()
        if unknown:
            raise Error(
                "The checkpoint contains other objects than those passed to Checkpoints",
                got=(
                    f"{', '.join(sorted(unknown))} exists only in the checkpoint or only "
                    "among the arguments"
                ),
                fix=(
                    "pass the same keyword arguments to Checkpoints as in the run that saved the "
                    "checkpoint"
                ),
            )
        self._fill(saved, facts)
        self.step, self.epoch = facts["step"], facts["epoch"]
        self._taken = facts["taken"] * facts["samples"] // self._samples
        self._epoch_start, self._resumed = facts["begun"], facts["host"]
        self._order = facts["order"]
        log.python.info("Resuming from checkpoint %s, step %d", folder, self.step)
        return True

    def _read_facts(self, path: Path) -> dict[str, Any]:
        parts = archive.read(path)
        try:
            facts = archive.from_json(parts[_FACTS])
            for name, least in _LEAST.items():
                if type(facts[name]) is not int or not least <= facts[name] < _LARGEST:
                    raise ValueError(f"{name} is {facts[name]!r:.80}")
            own = host_random.held_by(self._loader)
            for name in ("begun", "host"):
                if facts[name] is not None:
                    host_random.check(facts[name], own)
            files.random_state(facts["device"])
            states = {name: files.decode(state) for name, state in facts["stateful"].items()}
        except Error:
            raise
        except Exception as error:  # any error here is caused by the contents of the file
            archive.refuse(path, f"{type(error).__name__}: {error}")
        return {**facts, "stateful": states}

    def _check_share(self, facts: Mapping[str, Any]) -> None:
        """Check that the processes of this job read the samples of all processes of the
        earlier job.
        """
        each = self._executor.options.Distributed._each
        part = getattr(getattr(self._loader, "dataset", None), "part", None)
        if each == 1:
            return
        if facts["samples"] != self._samples:
            wrong = f"{self._samples} samples per step here, {facts['samples']} in the checkpoint"
        elif not isinstance(part, Interleaved):
            wrong = "a loader that does not divide its data evenly"
        else:
            return
        raise Error(
            "With fewer processes than before, this job would train with different batches",
            got=f"{wrong}; each process now does the work of {each} processes",
            fix=(
                (
                    "load a map-style data set with poptorch.DataLoader, and use drop_last=True "
                    "unless all batches are complete"
                ),
                "or start as many processes as the job that saved the checkpoint had",
            ),
        )

    def _fill(self, saved: files.SavedModel, facts: Mapping[str, Any]) -> None:
        executor, optimizer = self._executor, self._executor._optimizer
        assert optimizer is not None
        _check_states(self._stateful, facts["stateful"])
        files.restore(executor._session, saved, facts["device"])
        before = {name: copy.deepcopy(s.state_dict()) for name, s in self._stateful.items()}
        with contextlib.ExitStack() as undo:
            undo.callback(setattr, executor._session, "restored", None)
            back = files.fill(saved, executor._user_model, optimizer, executor._loss)
            undo.callback(_load_states, self._stateful, before)
            undo.callback(executor.setOptimizer, optimizer)
            undo.callback(back)
            executor.setOptimizer(optimizer)  # pass on the restored hyper-parameters
            _load_states(self._stateful, facts["stateful"])
            undo.pop_all()

    def batches(self, epochs: int) -> Iterator[Any]:
        """Yield the remaining batches of the given number of epochs.

        After ``resume``, the batches of the current epoch that were already used are loaded again
        and dropped. If you left a loop early, another call continues where it stopped.
        """
        while self.epoch < epochs:
            if self._rest is None:
                self._rest = self._remaining()
            try:
                for batch in self._rest:
                    self.step += 1
                    self._taken += 1
                    yield batch
            except Exception:
                self._rest = None
                raise
            self.epoch, self._taken, self._rest = self.epoch + 1, 0, None
            self._epoch_start = None

    def _remaining(self) -> Iterator[Any]:
        """Return the batches of this epoch that have not been taken."""
        resumed, self._resumed = self._resumed, None
        own = host_random.held_by(self._loader)
        begun = resumed if self._epoch_start is None else self._epoch_start
        if begun is not None:
            host_random.restore(begun, own)
            self._set_order(self._order)
        self._order = self._order_index()
        self._epoch_start = host_random.state(own)
        _retire_workers(self._loader)
        rest: Iterator[Any] = iter(self._loader)
        for _ in zip(range(self._taken), rest, strict=False):
            pass
        if resumed is not None and begun is not resumed:
            host_random.restore(resumed, own)
        return rest

    def _order_index(self) -> int:
        """Return the index of the next permutation of a loader in a job of several processes; 0
        otherwise.
        """
        is_permuted = getattr(self._loader, "_permuted", None) is not None
        return self._loader._order_index if is_permuted else 0

    def _set_order(self, index: int) -> None:
        if getattr(self._loader, "_permuted", None) is not None:
            self._loader._order_index = index

    def save(self, wait: bool = True) -> Path:
        """Write a checkpoint. A run that is killed during this resumes from the previous one.

        The new checkpoint is never among those that ``keep`` removes. If an older one has the same
        step, the new one replaces it when it is complete. Checkpoints of another run that have more
        steps are kept, with a warning.

        Args:
            wait: return when the checkpoint is written. Otherwise copy the state now and write it
                while the run continues; ``wait`` or the next ``save`` then raise an error if
                writing failed.

        Returns:
            The folder of the checkpoint. It gets this name when it is complete.

        Raises:
            poptorch.Error: the model is not compiled, the state of an object has no JSON form, or
                processes are at different steps or see different folders.
            OSError: this checkpoint cannot be written, or the previous one could not be written.
        """
        self.wait()
        steps = self._agree(self.step)
        if len({*steps}) > 1:
            raise Error(
                "The processes of this job save checkpoints of different steps",
                got="; ".join(f"process {i}: step {step}" for i, step in enumerate(steps)),
                fix="call save() after the same number of steps in every process",
            )
        folder = self._folder.unfinished(self.step)
        own = self._files(folder)
        if not self._process:
            self._warn_of_an_older_run()
            self._folder.begin(self.step)
        self._agree(0)  # wait until process 0 has created the folder
        if not folder.is_dir():
            raise Error(
                "The processes of this job do not see the same checkpoint folder",
                got=f"process {self._process} does not see {folder}, which process 0 created",
                fix="pass a folder on a file system that all hosts share to poptorch.Checkpoints",
            )
        self._writing = self._write(folder, own)
        if wait:
            self.wait()
        return self._folder.final(self.step)

    def _write(self, folder: Path, own: Files) -> _Writing:
        """Write the files of this process; process 0 then gives the checkpoint its name."""
        awaited: list[Path] = []
        finish: Callable[[], None] = _nothing
        abandon: Callable[[], None] = _nothing
        if not self._process:
            awaited = [folder / _name(process) for process in range(self._processes)]
            finish = functools.partial(self._folder.finish, self.step)
        # with several processes others may still write; the next run removes the folder
        if self._processes == 1:
            abandon = functools.partial(self._folder.abandon, self.step)
        return _Writing(own, awaited, finish, abandon, self._patience())

    def _warn_of_an_older_run(self) -> None:
        later = self._folder.later_than(self.step)
        if not later or self._has_warned:
            return
        self._has_warned = True
        log.python.warning(
            ("The folder %s contains checkpoints of another run with more steps: %s. They are "
             "kept until a run has passed their step. resume() uses the checkpoint that was "
             "saved last, which is now one of this run. To continue from step %d, stop this "
             "run, delete its checkpoints, and call resume() before the first call. To start "
             "a new run, use another folder: poptorch.Checkpoints('other', ...)"),
            self._folder.path, ", ".join(map(str, later)), later[-1],
        )  # fmt: skip

    def wait(self) -> None:
        """Wait until ``save(wait=False)`` has written its checkpoint.

        Raises:
            OSError: the checkpoint could not be written.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        if self._process:
            writing.wait()
        self._agree(0)  # wait until all other processes have written their files
        if not self._process:
            writing.wait()

    def _files(self, folder: Path) -> dict[Path, Mapping[str, bytes]]:
        model = files.packed(
            self._executor._session,
            files.UserObjects(self._executor._user_model, self._executor._optimizer, None),
            "",
            with_random=False,
            pickled=False,
        )
        facts = {_FACTS: json.dumps(self._facts()).encode()}
        own: dict[Path, Mapping[str, bytes]] = {folder / _name(self._process): facts}
        return own if model is None else {folder / _MODEL: model, **own}

    def _facts(self) -> dict[str, Any]:
        return {
            "processes": self._processes,
            "samples": self._samples,
            "step": self.step,
            "epoch": self.epoch,
            "taken": self._taken,
            "order": self._order_index() if self._epoch_start is None else self._order,
            "begun": self._epoch_start,
            "host": host_random.state(host_random.held_by(self._loader)),
            "device": self._executor.rng_state,
            "stateful": {name: _encoded(name, each) for name, each in self._stateful.items()},
        }

    def _agree(self, number: int) -> list[int]:
        if self._processes == 1:
            return [number]
        group = _job.join(self._process, self._processes, self._patience())
        return group.numbers(number, "checkpoints")

    def _patience(self) -> float:
        """Return how many seconds this process waits for others."""
        return self._executor._session.settings().runtime.process_timeout


def _name(process: int) -> str:
    return f"process-{process}"


def _draws(loader: DataLoader) -> bool:
    """Return whether one of torch's samplers draws the order of a loader."""
    samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    drawing = data.RandomSampler, data.SubsetRandomSampler, data.WeightedRandomSampler
    return any(isinstance(sampler, drawing) for sampler in samplers)


def _nothing() -> None:
    """Do nothing, in processes that leave naming and removing checkpoints to process 0."""


def _retire_workers(loader: Any) -> None:
    """Make the next iteration start new workers.

    Persistent workers continue with the random numbers of earlier epochs. A run that resumes in a
    later epoch could reproduce those only by loading all earlier epochs.
    """
    if getattr(loader, "persistent_workers", False):
        loader._iterator = None


def _check_states(stateful: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Refuse states that would replace methods of an object, because schedulers set an attribute
    for every name in a state.
    """
    for name, each in stateful.items():
        wrong = (
            states[name].keys() - each.state_dict().keys() if isinstance(states[name], dict) else ()
        )
        for key in wrong:
            if not isinstance(key, str) or hasattr(each, key):
                raise _misfit(
                    name, (f"the checkpoint contains {key!r}, which is not part of the state here")
                )


def _load_states(stateful: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    for name, each in stateful.items():
        try:
            each.load_state_dict(states[name])
        except Exception as error:  # the object may raise any error for the values from the file
            raise _misfit(name, f"{type(error).__name__}: {error}") from error


def _misfit(name: str, why: str) -> Error:
    return Error(
        f"The checkpoint contains the state of a different {name}",
        got=why,
        fix=f"pass the same kind of {name} as in the run that saved the checkpoint",
    )


def _encoded(name: str, stateful: Any) -> Any:
    state = {
        key: dict(value) if isinstance(value, dict) else value
        for key, value in stateful.state_dict().items()
    }
    try:
        tensors, _ = nested_values.flatten(state, name)
        if tensors:  # a JSON form would keep only the shapes of tensors
            raise TypeError(f"{len(tensors)} tensors have no JSON form")
        return files.encode(state)
    except TypeError as error:
        raise Error(
            f"The state of {name} cannot be saved in a checkpoint",
            got=str(error),
            fix="do not pass the object to Checkpoints, and save its state in a separate file",
        ) from error


class _Writing:
    """Write a checkpoint in a thread.

    Args:
        files: the files of this process.
        awaited: files of other processes that must exist before the checkpoint is complete.
        finish: completes the checkpoint.
        abandon: removes a checkpoint that could not be written.
        patience: how many seconds to wait for the files of other processes when this process ends.
    """

    def __init__(
        self,
        files: Files,
        awaited: Sequence[Path],
        finish: Callable[[], None],
        abandon: Callable[[], None],
        patience: float,
    ) -> None:
        self._files, self._awaited = files, awaited
        self._finish, self._abandon = finish, abandon
        self._patience = patience
        self._exiting = threading.Event()
        atexit.register(self._leave)
        self._doing = Background(self._write_files)

    def _write_files(self) -> None:
        try:
            for path, parts in self._files.items():
                archive.write(path, parts)
            while not all(path.exists() for path in self._awaited):
                if self._exiting.wait(_POLL_SECONDS):
                    return
            self._finish()
        except Exception:  # an unfinished checkpoint is useless and may have filled the disk
            self._abandon()
            raise

    def wait(self) -> None:
        try:
            self._doing.result()
        finally:
            atexit.unregister(self._leave)

    def _leave(self) -> None:
        """Stop waiting when this process ends, because other processes may never write
        their files.
        """
        concurrent.futures.wait([self._doing], self._patience)
        self._exiting.set()
        missing = "files of other processes are missing"
        why = self._doing.exception() if self._doing.done() else missing
        if why is not None:
            log.python.warning("The last checkpoint is incomplete: %s", why)
