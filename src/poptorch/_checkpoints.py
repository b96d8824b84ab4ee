"""``poptorch.Checkpoints``: folders of files without pickles, named when all of it is there."""

# Not torch.distributed.checkpoint's: its formats are pickles or hold nothing but tensors, and its
# exchanges wait for a lost process without naming it.

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import copy
import functools
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from . import _job
from ._base import archive, log, trees
from ._base.errors import AssertionFailure, Error
from ._data.sharding import InTurn
from ._job.rendezvous import Background
from ._session import files, host_random, loading
from .dataloader import DataLoader
from .executor import PoplarExecutor
from .options.distributed import data_share

__all__ = ["Checkpoints"]

_MODEL, _FACTS, _UNFINISHED = "model.poptorch", "facts.json", "unfinished-"
# Of numbers in facts.
_LEAST = {"processes": 1, "samples": 1, "step": 0, "epoch": 0, "taken": 0, "order": 0}
_LARGEST = 1 << 53
_LOOK = 0.05  # seconds between looks for files of other processes

Files = Mapping[Path, Mapping[str, bytes]]  # by path the parts of each


class Checkpoints:
    """The checkpoints of one training run, in a folder. An addition to PopTorch.

    Take the data from ``batches``, which counts what you have used:

    ```python
    checkpoints = poptorch.Checkpoints("run", training, loader, scheduler=scheduler)
    checkpoints.resume()
    for batch in checkpoints.batches(epochs=3):
        out, loss = training(*batch)
        if checkpoints.step % 100 == 0:
            checkpoints.save()
    ```

    In a job all processes make the same calls, and all see the folder.

    Args:
        folder: of the checkpoints; created if it is missing.
        executor: a model that is wrapped for training.
        loader: a loader, or another iterable that begins anew at each iteration.
        keep: how many checkpoints to keep: the latest ones.
        stateful: by name, schedulers and other objects with ``state_dict()`` and
            ``load_state_dict()``. Their state is made of numbers, texts, lists and dicts.

    Attributes:
        step: how many batches you have got, the present one included.
        epoch: the number of the present epoch, from 0.

    Raises:
        AssertionError: the executor does not train, ``keep`` is less than 1, or the loader shuffles
            in another process, where its order is out of reach.
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
            raise AssertionFailure("Checkpoints are of a model that is wrapped for training")
        if keep < 1:
            raise AssertionFailure("At least one checkpoint must be kept", got=f"keep={keep}")
        accessed = isinstance(loader, DataLoader) and loader._accessor is not None
        random = torch.utils.data.RandomSampler
        if accessed and (loader._permuted is not None or isinstance(loader.sampler, random)):
            raise AssertionFailure(
                "Checkpoints need to know the order of the data",
                got="a loader that shuffles in another process",
                fix="use DataLoaderMode.Sync, with num_workers for loading during the computation",
            )
        self.step = self.epoch = 0
        self._folder, self._keep = Path(folder), keep
        self._executor, self._loader, self._stateful = executor, loader, stateful
        place = executor.options.Distributed
        self._process, self._processes = place.processId, place.numProcesses
        self._samples = (getattr(loader, "combinedBatchSize", None) or 1) * data_share(place)[1]
        self._taken = 0  # batches of this epoch
        self._epoch_start: Any = None  # the host's generators then
        self._resumed: Any = None  # and when the checkpoint was made
        self._order = 0  # of this epoch: the loader's permutation
        self._rest: Iterator[Any] | None = None  # of the batches of this epoch
        self._tidy = False
        self._writing: _Writing | None = None

    def resume(self) -> bool:
        """Go on from the latest checkpoint, if there is one. Call it before the model.

        With as many processes as before, all losses are those of an uninterrupted run. With
        another number the run goes on after as many samples; they are the same where ``poprun
        --min-instances`` chose it. Random numbers then follow the replicas' numbers, and on the
        host process 0.

        Returns:
            Whether there was a checkpoint.

        Raises:
            poptorch.Error: the model is compiled already, a file is damaged, it belongs to another
                model or optimizer, or fewer processes would read other batches: of an iterable
                data set, or with ``drop_last=False`` and a rest. Nothing has changed then.
        """
        executor = self._executor
        if executor.isCompiled():
            raise Error(
                "A run is resumed before its first call",
                fix="call resume() first, or destroy() the executor before",
            )
        latest = self._agree(max(self._steps(), default=-1))[0]
        if latest < 0:
            return False
        folder = self._path(latest)
        saved = files.read(folder / _MODEL)
        facts = _read_facts(folder / _name(0))
        if self._process and facts["processes"] == self._processes:
            facts = _read_facts(folder / _name(self._process))
        self._check_share(facts)
        unknown = facts["stateful"].keys() ^ self._stateful.keys()
        if unknown:
            raise Error(
                "The checkpoint is of other objects than those given",
                got=f"{', '.join(sorted(unknown))} is on one side only",
            )
        self._fill(saved, facts)
        self.step, self.epoch = facts["step"], facts["epoch"]
        self._taken = facts["taken"] * facts["samples"] // self._samples
        self._epoch_start, self._resumed = facts["begun"], facts["host"]
        self._order = facts["order"]
        log.python.info("Going on from checkpoint %s, step %d", folder, self.step)
        return True

    def _check_share(self, facts: Mapping[str, Any]) -> None:
        """Processes that do the work of several must take the samples of all of these."""
        each = self._executor.options.Distributed._each
        part = getattr(getattr(self._loader, "dataset", None), "part", None)
        if each == 1:
            return
        if facts["samples"] != self._samples:
            wrong = f"{self._samples} samples in each step, {facts['samples']} in the checkpoint"
        elif not isinstance(part, InTurn):
            wrong = "a loader that does not divide its data evenly"
        else:
            return
        raise Error(
            "This job of fewer processes would train with other batches",
            got=f"{wrong}; each process does the work of {each}",
            fix="take the data from a poptorch.DataLoader that divides them: of a map-style "
            "data set, with drop_last=True unless all batches are whole",
        )

    def _fill(self, saved: files.Saved, facts: Mapping[str, Any]) -> None:
        executor, optimizer = self._executor, self._executor._optimizer
        assert optimizer is not None
        _check_states(self._stateful, facts["stateful"])
        loading.restore(executor._session, saved, facts["device"])
        before = {name: copy.deepcopy(s.state_dict()) for name, s in self._stateful.items()}
        with contextlib.ExitStack() as undo:
            undo.callback(setattr, executor._session, "restored", None)
            back = loading.fill(saved, executor._user_model, optimizer, executor._loss)
            undo.callback(_load_states, self._stateful, before)
            undo.callback(executor.setOptimizer, optimizer)
            undo.callback(back)
            executor.setOptimizer(optimizer)  # it has other numbers now
            _load_states(self._stateful, facts["stateful"])
            undo.pop_all()

    def batches(self, epochs: int) -> Iterator[Any]:
        """Yield the batches of so many epochs, those that are left.

        After ``resume`` the used batches of the current epoch are loaded again and dropped. A loop
        that was left goes on when this is called again.
        """
        while self.epoch < epochs:
            if self._rest is None:
                self._rest = self._left()
            try:
                for batch in self._rest:
                    self.step += 1
                    self._taken += 1
                    yield batch
            except Exception:
                self._rest = None
                raise
            self.epoch, self._taken, self._rest = self.epoch + 1, 0, None

    def _left(self) -> Iterator[Any]:
        """Return the batches of this epoch that have not been taken."""
        resumed, self._resumed = self._resumed, None
        again = self._taken > 0 or resumed is not None
        permuted = getattr(self._loader, "_permuted", None) is not None
        if again and permuted:
            self._loader._order_index = self._order
        self._order = self._loader._order_index if permuted else 0
        if again and self._epoch_start is not None:  # it was made before the first batch
            host_random.restore(self._epoch_start)
        self._epoch_start = host_random.state()
        rest: Iterator[Any] = iter(self._loader)
        for _ in zip(range(self._taken), rest, strict=False):
            pass
        if resumed is not None:
            host_random.restore(resumed)
        return rest

    def save(self, wait: bool = True) -> Path:
        """Write a checkpoint. A run that is killed meanwhile goes on from the one before.

        Args:
            wait: return when it is written. Otherwise copy it now and write it while the run goes
                on; ``wait`` or the next ``save`` then raise what goes wrong.

        Returns:
            Its folder. It has this name when it is complete.

        Raises:
            poptorch.Error: the model is not compiled, the state of an object has no JSON form, or
                processes are at different steps or see different folders.
            OSError: it cannot be written, or the one before could not.
        """
        self.wait()
        steps = self._agree(self.step)
        if len({*steps}) > 1:
            raise Error(
                "The processes of this job make checkpoints of different steps",
                got="; ".join(f"process {i}: step {step}" for i, step in enumerate(steps)),
            )
        final = self._path(self.step)
        folder = final.with_name(f"{_UNFINISHED}{final.name}")
        if not self._process:
            self._clear(folder)
        self._agree(0)  # the folder is there
        if not folder.is_dir():
            raise Error(
                "The processes of this job do not see one folder",
                got=f"{folder}, which process 0 has made, is not there for process {self._process}",
                fix="keep checkpoints where all hosts see the same files",
            )
        everyone = range(self._processes if not self._process else 0)
        awaited = [folder / _name(process) for process in everyone]
        patience = self._executor._session.settings().runtime.process_timeout
        finish = functools.partial(self._finish, folder, final)
        self._writing = _Writing(self._files(folder), awaited, finish, patience)
        if wait:
            try:
                self.wait()
            except Exception:  # a full disk, for one, must not stay full of what is no use
                self._tidy = False
                if self._processes == 1:
                    _delete(folder)
                raise
        return final

    def wait(self) -> None:
        """Wait until ``save(wait=False)`` has written its checkpoint.

        Raises:
            OSError: it could not be written.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        if self._process:
            writing.wait()
        self._agree(0)  # all others have written theirs
        if not self._process:
            writing.wait()

    def _files(self, folder: Path) -> dict[Path, Mapping[str, bytes]]:
        model = files.packed(
            self._executor._session,
            files.Objects(self._executor._user_model, self._executor._optimizer, None),
            "",
            with_random=False,
            pickled=False,
        )
        facts = {_FACTS: json.dumps(self._facts()).encode()}
        own: dict[Path, Mapping[str, bytes]] = {folder / _name(self._process): facts}
        return own if model is None else {folder / _MODEL: model, **own}

    def _finish(self, folder: Path, final: Path) -> None:
        if self._process:
            return
        _synchronise(folder)
        folder.rename(final)
        for old in sorted(self._steps())[: -self._keep]:
            self._remove(self._path(old))

    def _facts(self) -> dict[str, Any]:
        return {
            "processes": self._processes,
            "samples": self._samples,
            "step": self.step,
            "epoch": self.epoch,
            "taken": self._taken,
            "order": self._order,
            "begun": self._epoch_start,
            "host": host_random.state(),
            "device": self._executor.rng_state,
            "stateful": {name: _encoded(name, each) for name, each in self._stateful.items()},
        }

    def _path(self, step: int) -> Path:
        return self._folder / f"{step:09d}"

    def _steps(self) -> list[int]:
        if not self._folder.is_dir():
            return []
        paths = [path for path in self._folder.iterdir() if path.name.isdecimal()]
        return [int(path.name) for path in paths if self._path(int(path.name)) == path]

    def _clear(self, folder: Path) -> None:
        if not self._tidy:
            for left in self._folder.glob(f"{_UNFINISHED}*"):
                _delete(left)
        self._tidy = True
        if os.path.lexists(folder):  # it could not be written
            _delete(folder)
        folder.mkdir(parents=True)
        if self._path(self.step).exists():
            self._remove(self._path(self.step))

    def _remove(self, path: Path) -> None:
        """Remove a checkpoint, of which nobody ever sees a part."""
        gone = path.with_name(f"{_UNFINISHED}gone-{path.name}")
        path.rename(gone)
        _delete(gone)

    def _agree(self, number: int) -> list[int]:
        if self._processes == 1:
            return [number]
        timeout = self._executor._session.settings().runtime.process_timeout
        group = _job.join(self._process, self._processes, timeout)
        return group.numbers(number, "checkpoints")


def _name(process: int) -> str:
    return f"process-{process}"


def _delete(path: Path) -> None:
    """Delete a folder; of a link, or of a file in its place, nothing else."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _read_facts(path: Path) -> dict[str, Any]:
    parts = archive.read(path)
    try:
        facts = archive.from_json(parts[_FACTS])
        for name, least in _LEAST.items():
            if type(facts[name]) is not int or not least <= facts[name] < _LARGEST:
                raise ValueError(f"{name} is {facts[name]!r:.80}")
        for name in ("begun", "host"):
            if facts[name] is not None:
                host_random.check(facts[name])
        files.random_state(facts["device"])
        states = {name: files.decode(state) for name, state in facts["stateful"].items()}
    except Exception as error:  # whatever it is, it comes from what stands in the file
        archive.refuse(path, f"{type(error).__name__}: {error}")
    return {**facts, "stateful": states}


def _check_states(stateful: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Let no state replace what an object does: schedulers take any name as an attribute's."""
    for name, each in stateful.items():
        wrong = (
            states[name].keys() - each.state_dict().keys() if isinstance(states[name], dict) else ()
        )
        for key in wrong:
            if not isinstance(key, str) or hasattr(each, key):
                raise _misfit(name, f"it holds {key!r}, which is no part of the state here")


def _load_states(stateful: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    for name, each in stateful.items():
        try:
            each.load_state_dict(states[name])
        except Exception as error:  # the object's own, of whatever the file passes to it
            raise _misfit(name, f"{type(error).__name__}: {error}") from error


def _misfit(name: str, why: str) -> Error:
    return Error(
        f"The checkpoint's state of {name} does not fit the one given",
        got=why,
        fix=f"pass the {name} that was saved",
    )


def _encoded(name: str, stateful: Any) -> Any:
    state = {
        key: dict(value) if isinstance(value, dict) else value
        for key, value in stateful.state_dict().items()
    }
    try:
        tensors, _ = trees.flatten(state, name)
        if tensors:  # a form of their shapes is all that there would be
            raise TypeError(f"{len(tensors)} tensors have no JSON form")
        return files.encode(state)
    except TypeError as error:
        raise Error(
            f"The state of {name} cannot be kept in a checkpoint",
            got=str(error),
            fix="keep it in a file of its own",
        ) from error


def _synchronise(folder: Path) -> None:
    for path in (*folder.iterdir(), folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


class _Writing:
    """Writes a checkpoint in a thread; ``patience``: seconds that exit waits for others' files."""

    def __init__(
        self, files: Files, awaited: Sequence[Path], finish: Callable[[], None], patience: float
    ) -> None:
        self._files, self._awaited, self._finish = files, awaited, finish
        self._patience = patience
        self._abandoned = threading.Event()
        atexit.register(self._leave)
        self._doing = Background(self._go)

    def _go(self) -> None:
        for path, parts in self._files.items():
            archive.write(path, parts)
        while not all(path.exists() for path in self._awaited):
            if self._abandoned.wait(_LOOK):
                return
        self._finish()

    def wait(self) -> None:
        try:
            self._doing.result()
        finally:
            atexit.unregister(self._leave)

    def _leave(self) -> None:
        """The process ends: others may never write what is waited for."""
        concurrent.futures.wait([self._doing], self._patience)
        self._abandoned.set()
        missing = "files of other processes are not there"
        why = self._doing.exception() if self._doing.done() else missing
        if why is not None:
            log.python.warning("The last checkpoint is not whole: %s", why)
