"""Memory in common: a process maps what the others of its job made, whatever the store names."""

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from helpers import users
from poptorch._job.shared_memory import CommonMemory

COUNT = 16


def found(name: str) -> list[list[torch.Tensor]]:
    """Return the memory that a process maps for a name that another process sends."""
    like = torch.zeros(COUNT)
    return CommonMemory().find([like], [[name]])


def open_file(path: Path, content: bytes) -> Iterator[int]:
    path.write_bytes(content)
    descriptor = os.open(path, os.O_RDWR)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def users_file(tmp_path: Path) -> Iterator[int]:
    """Return the descriptor of a file of the user, as large as the region."""
    yield from open_file(tmp_path / "thesis.txt", b"x" * 4 * COUNT)


def test_a_region_that_a_process_made_is_mapped_by_its_name() -> None:
    memory = CommonMemory()
    tensor = memory.zeros(COUNT, torch.float32)

    ((mapped,),) = found(*memory.names([tensor]))
    mapped.fill_(2.0)

    assert tensor.tolist() == [2.0] * COUNT


@pytest.mark.parametrize("called", ["", "thesis.txt", f"poptorch-{'0' * 32}"])
def test_a_file_of_the_user_is_never_mapped(called: str, tmp_path: Path, users_file: int) -> None:
    paths = [str(tmp_path / "thesis.txt"), f"/proc/{os.getpid()}/fd/{users_file}"]

    mapped = [found(f"{path} {called}") for path in paths]

    assert mapped == [[], []]
    assert (tmp_path / "thesis.txt").read_bytes() == b"x" * 4 * COUNT


def test_a_link_whose_target_looks_like_a_region_is_not_followed(
    tmp_path: Path, users_file: int
) -> None:
    called = f"poptorch-{uuid.uuid4().hex}"
    link = tmp_path / "link"
    link.symlink_to(f"/memfd:{called} (deleted)")

    assert found(f"{link} {called}") == []


def test_a_file_with_the_name_of_a_region_is_not_mapped(tmp_path: Path) -> None:
    called = f"poptorch-{uuid.uuid4().hex}"
    for descriptor in open_file(tmp_path / f"memfd:{called} (deleted)", b"x" * 4 * COUNT):
        mapped = found(f"/proc/{os.getpid()}/fd/{descriptor} {called}")

    assert mapped == []


def test_a_file_that_is_not_a_memory_region_is_not_opened(
    users_file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening a device may have an effect."""
    path = f"/proc/{os.getpid()}/fd/{users_file}"
    opened: list[object] = []
    usual = os.open

    def noted(name: str, *args: int) -> int:
        opened.append(name)
        return usual(name, *args)

    monkeypatch.setattr(os, "open", noted)

    found(f"{path} poptorch-{uuid.uuid4().hex}")

    assert path not in opened


def test_a_file_that_takes_the_place_of_a_region_before_it_is_opened_is_not_mapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called = f"poptorch-{uuid.uuid4().hex}"
    descriptor = os.memfd_create("of_another_program")
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    usual = os.readlink

    def before(name: str) -> str:
        return f"/memfd:{called} (deleted)" if name == path else usual(name)

    try:
        os.ftruncate(descriptor, 4 * COUNT)
        monkeypatch.setattr(os, "readlink", before)

        mapped = found(f"{path} {called}")

        assert mapped == []
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("size", [0, 4 * COUNT - 1, 4 * COUNT + 1])
def test_a_region_of_another_size_is_neither_mapped_nor_changed(size: int) -> None:
    called = f"poptorch-{uuid.uuid4().hex}"
    descriptor = os.memfd_create(called)
    try:
        os.ftruncate(descriptor, size)

        mapped = found(f"/proc/{os.getpid()}/fd/{descriptor} {called}")

        assert mapped == []
        assert os.fstat(descriptor).st_size == size
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("name", ["", "/dev/null", "/proc/self/mem poptorch-", "x" * 10_000, "\0"])
def test_a_name_that_no_process_gives_is_refused(name: str) -> None:
    assert found(name) == []


@pytest.mark.slow
def test_a_region_of_another_user_is_not_mapped() -> None:
    called = f"poptorch-{uuid.uuid4().hex}"
    code = (
        f"import os, sys; d = os.memfd_create('{called}'); os.ftruncate(d, {4 * COUNT}); "
        "print(d, flush=True); sys.stdin.read()"
    )
    with users.start(code) as other:
        assert other.stdout is not None
        descriptor = other.stdout.readline().strip()

        mapped = found(f"/proc/{other.pid}/fd/{descriptor} {called}")

        other.communicate()
    assert other.returncode == 0
    assert mapped == []
