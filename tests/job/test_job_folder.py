"""Processes of a job on one machine meet in a folder that no other user can enter."""

import contextlib
import json
import os
import threading
from pathlib import Path

import pytest

import poptorch
from helpers import jobs, programs, users
from poptorch._job.job_folder import FolderStore, JobFolder
from poptorch._job.signed import SignedStore

JOB = ("127.0.0.1", "29500")


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "jobs"
    monkeypatch.setenv("POPTORCH_JOB_DIR", str(folder))
    return folder


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path)


def test_values_are_read_by_their_keys_even_if_keys_are_unusual(store: FolderStore) -> None:
    keys = ["a", "a/b", "../a", ".", "ä\n", "%2F"]
    for key in keys:
        store.set(key, f"of {key}")

    assert [text.decode() for text in store.multi_get(keys)] == [f"of {key}" for key in keys]
    assert all(path.parent == store.path for path in store.path.rglob("*"))


def test_a_value_that_is_written_again_takes_the_place_of_the_last_one(store: FolderStore) -> None:
    for value in ("first", "second"):
        store.set("key", value)

    assert store.get("key") == b"second"


def test_keys_are_there_until_they_are_deleted(store: FolderStore) -> None:
    store.set("key", "")

    assert store.check(["key"])
    assert not store.check(["key", "another"])
    store.delete_key("key")
    assert not store.check(["key"])


def test_a_reader_waits_for_a_value_that_is_not_yet_written(store: FolderStore) -> None:
    later = threading.Timer(0.05, store.set, ["key", "value"])
    later.start()

    assert store.get("key") == b"value"
    later.join()


def test_a_missing_folder_raises_the_same_exception_as_in_torch(store: FolderStore) -> None:
    lost = FolderStore(store.path / "gone" / "gone")

    with pytest.raises(RuntimeError, match="The folder in which the processes of this job meet"):
        lost.set("key", "value")


def test_nobody_else_can_enter_the_folder_of_a_job(own_folder: Path) -> None:
    place = JobFolder(JOB, 0, 2)
    start = place.of_start("name")

    folders = (own_folder, place.store.path, start.path)
    assert [path.stat().st_mode & 0o777 for path in folders] == [0o700] * 3


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_folder_that_others_can_enter_is_refused(mode: int, own_folder: Path) -> None:
    own_folder.mkdir()
    own_folder.chmod(mode)

    with pytest.raises(RuntimeError, match="POPTORCH_JOB_DIR to the same folder for all processes"):
        JobFolder(JOB, 1, 2)


@pytest.mark.slow
def test_the_usual_folder_that_another_user_has_made_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for parent in (tmp_path, *tmp_path.parents):
        if not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o001)
    tmp_path.chmod(0o1777)
    theirs = tmp_path / f"poptorch-jobs-{os.getuid()}"
    users.run("import os, sys; os.mkdir(sys.argv[1], 0o777)", str(theirs))
    monkeypatch.delenv("POPTORCH_JOB_DIR")
    monkeypatch.setattr("poptorch._base.folders.temporary", lambda: str(tmp_path))

    with pytest.raises(RuntimeError, match="it belongs to another user"):
        JobFolder(JOB, 0, 2)
    assert [*theirs.iterdir()] == []


@pytest.mark.slow
def test_another_user_can_neither_read_nor_write_the_files_of_a_job(own_folder: Path) -> None:
    place = JobFolder(JOB, 0, 2)
    place.store.set("invited", "[]")
    code = (
        "import sys\n"
        "for mode in ('r', 'w', 'x'):\n"
        "    try: open(sys.argv[1] + 'x' * (mode == 'x'), mode)\n"
        "    except PermissionError: print('refused')\n"
    )

    printed = users.run(code, str(place.store.path / "invited.value"))

    assert printed.split() == ["refused"] * 3


@pytest.mark.slow
def test_a_second_job_in_the_same_folder_is_refused_with_a_remedy(own_folder: Path) -> None:
    code = (
        "import sys; from poptorch._job.job_folder import JobFolder; "
        "place = JobFolder(('127.0.0.1', '29500'), 0, 2); "
        "print('there', flush=True); sys.stdin.read()"
    )
    settings = jobs.environment(POPTORCH_JOB_DIR=str(own_folder))
    other = programs.Program("-c", code, environment=settings)
    with contextlib.closing(other):
        assert other.stdout.readline() == "there\n"

        with pytest.raises(poptorch.Error, match="choose another MASTER_PORT"):
            JobFolder(JOB, 0, 2)

        other.communicate()
    JobFolder(JOB, 0, 2)  # nobody holds it any more


def met(index: int, name: str = "name") -> tuple[JobFolder, FolderStore]:
    """Return the place and start of a process that has met the other one of its job."""
    place = JobFolder(JOB, index, 2)
    place.store.set(f"arrived/{index}", f"token {index}")
    place.store.set("invited", json.dumps([name, ["token 0", "token 1"]]))
    place.store.set(f"accepted/{name}/{index}", "")
    return place, place.of_start(name)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_last_process_that_leaves_removes_the_folder(
    order: tuple[int, int], own_folder: Path
) -> None:
    members = [met(0), met(1)]

    first, last = (members[index] for index in order)
    first[0].leave(first[1])
    assert first[0].store.path.exists()
    last[0].leave(last[1])
    assert [*own_folder.iterdir()] == []


def test_cleaning_up_an_old_start_keeps_the_files_of_the_next_one() -> None:
    members = [met(0), met(1)]
    place, _ = members[0]
    place.store.set("arrived/1", "token of the next start")
    for of_job, start in members:
        of_job.leave(start)

    assert place.store.get("arrived/1") == b"token of the next start"


def test_files_of_killed_jobs_are_removed_a_day_later(own_folder: Path) -> None:
    paths = [JobFolder((name,), 1, 2).of_start("start").path for name in ("old", "new")]
    for path in (paths[0], paths[0].parent):
        os.utime(path, (0.0, 0.0))  # in 1970

    JobFolder(JOB, 0, 2)

    assert [path.exists() for path in paths] == [False, True]


# Over the network.


def signed(inner: FolderStore, key: str = "secret", name: str = "start") -> SignedStore:
    return SignedStore(inner, key, name)


def test_processes_with_the_same_key_read_the_values_of_each_other(store: FolderStore) -> None:
    signed(store).set("a", "value of a")
    signed(store).set("b", "")

    assert signed(store).multi_get(["a", "b"]) == [b"value of a", b""]


@pytest.mark.parametrize("forged", ["", "value", "0" * 64 + "value"])
def test_a_value_without_the_jobs_signature_is_refused(forged: str, store: FolderStore) -> None:
    store.set("key", forged)

    with pytest.raises(
        RuntimeError, match="A process of this job received a message without a valid signature"
    ):
        signed(store).get("key")


@pytest.mark.parametrize("other", [{"key": "another"}, {"name": "another start"}])
def test_a_value_of_another_key_or_start_is_refused(
    other: dict[str, str], store: FolderStore
) -> None:
    signed(store, **other).set("key", "value")

    with pytest.raises(RuntimeError, match="POPTORCH_JOB_KEY"):
        signed(store).get("key")


def test_a_value_is_refused_in_the_place_of_another(store: FolderStore) -> None:
    signed(store).set("one", "value")
    store.set("two", store.get("one").decode())

    with pytest.raises(RuntimeError, match="a value of two"):
        signed(store).get("two")
