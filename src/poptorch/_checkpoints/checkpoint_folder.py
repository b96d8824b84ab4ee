"""Manage a folder of checkpoints: which are complete, which is the newest, and what a save removes.

A checkpoint is a folder that is named after its step. It gets this name by one rename, when all its
files are on the disk. An older checkpoint of the same step is renamed before that and removed
afterwards, so that a process which is killed at any moment leaves a complete checkpoint.

A file ``save-N`` in each checkpoint counts the saves into the folder. The newest checkpoint is the
one with the largest count, because a run that was started again from the beginning has smaller
steps than an older run.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

_UNFINISHED, _ASIDE, _COUNT = "unfinished-", "replaced-", "save-"
_LONGEST_COUNT = 15  # digits; the file may have been written by anybody


class CheckpointFolder:
    """The checkpoints in a folder, which only one process changes at a time.

    Args:
        path: path of the folder; the first save creates it.
        keep: how many checkpoints to keep, of those with no more steps than the latest save.
    """

    def __init__(self, path: Path, keep: int) -> None:
        self.path, self._keep = path, keep
        self._is_tidy = False

    def final(self, step: int) -> Path:
        """Return the name of a complete checkpoint."""
        return self.path / f"{step:09d}"

    def unfinished(self, step: int) -> Path:
        """Return the name of a checkpoint that is being written."""
        return self.path / f"{_UNFINISHED}{step:09d}"

    def complete(self, step: int) -> Path:
        """Return the present path of the complete checkpoint of a step."""
        final, aside = self.final(step), self._aside(step)
        return aside if aside.is_dir() and not final.is_dir() else final

    def steps(self) -> list[int]:
        """Return the steps of all complete checkpoints."""
        if not self.path.is_dir():
            return []
        names = {path.name.removeprefix(_ASIDE) for path in self.path.iterdir() if path.is_dir()}
        steps = [int(name) for name in names if name.isascii() and name.isdecimal()]
        return sorted(step for step in steps if self.final(step).name in names)

    def newest(self) -> int | None:
        """Return the step of the checkpoint that was saved last."""
        return max(self.steps(), key=self._age, default=None)

    def later_than(self, step: int) -> list[int]:
        """Return the steps of later checkpoints, which must come from another run."""
        return [each for each in self.steps() if each > step]

    def begin(self, step: int) -> Path:
        """Return a new folder for the files of a checkpoint."""
        if not self._is_tidy:
            for left in self.path.glob(f"{_UNFINISHED}*"):
                _delete(left)
            self._restore()
        self._is_tidy = True
        count = 1 + max((self._count(each) for each in self.steps()), default=0)
        folder = self.unfinished(step)
        if os.path.lexists(folder):  # left by a save that failed
            _delete(folder)
        folder.mkdir(parents=True)
        (folder / f"{_COUNT}{count}").touch()
        return folder

    def finish(self, step: int) -> None:
        """Rename a finished checkpoint, then remove the one it replaces and those that are
        too old.
        """
        unfinished, final, aside = self.unfinished(step), self.final(step), self._aside(step)
        _synchronise(*unfinished.iterdir(), unfinished)
        if os.path.lexists(final):
            if os.path.lexists(aside):  # left because it could not be removed
                self._remove(aside)
            final.rename(aside)
        unfinished.rename(final)
        _synchronise(self.path)
        if os.path.lexists(aside):
            self._remove(aside)
        own = sorted((each for each in self.steps() if each <= step), key=self._age)
        for old in own[: -self._keep]:
            self._remove(self.final(old))

    def abandon(self, step: int) -> None:
        """Remove a checkpoint that could not be written. An older one of the same step stays."""
        if os.path.lexists(unfinished := self.unfinished(step)):
            _delete(unfinished)
        self._restore()

    def _aside(self, step: int) -> Path:
        return self.path / f"{_ASIDE}{step:09d}"

    def _restore(self) -> None:
        """Rename checkpoints back that were renamed for a replacement which was never completed."""
        for step in self.steps():
            final, aside = self.final(step), self._aside(step)
            if not os.path.lexists(aside):
                continue
            if os.path.lexists(final):
                self._remove(aside)
            else:
                aside.rename(final)

    def _age(self, step: int) -> tuple[int, int]:
        return self._count(step), step

    def _count(self, step: int) -> int:
        """Return the number of the save that wrote a checkpoint; 0 if the checkpoint does not
        contain it.
        """
        names = (path.name for path in self.complete(step).glob(f"{_COUNT}*"))
        texts = [name.removeprefix(_COUNT) for name in names]
        known = [text for text in texts if text.isascii() and text.isdecimal()]
        return max((int(text) for text in known if len(text) <= _LONGEST_COUNT), default=0)

    def _remove(self, path: Path) -> None:
        """Remove a checkpoint. A partly removed one never looks like a checkpoint."""
        gone = path.with_name(f"{_UNFINISHED}gone-{path.name}")
        if os.path.lexists(gone):  # left because it could not be deleted
            _delete(gone)
        path.rename(gone)
        _delete(gone)


def _delete(path: Path) -> None:
    """Delete a folder. If the path is a link or a file, delete only that."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _synchronise(*paths: Path) -> None:
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
