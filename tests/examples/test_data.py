"""The FashionMNIST reader: every place it looks in, and files that are not what they should be."""

import contextlib
import functools
import hashlib
import http.server
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import data

TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS = data.PUBLISHED


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without the Debian package and without earlier downloads."""
    monkeypatch.setattr(data, "DEBIAN", tmp_path / "debian")
    monkeypatch.setattr(data, "DOWNLOADS", tmp_path / "downloads")
    monkeypatch.setattr(data, "TIMEOUT", 0.5)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A directory of our own with the four files of the subset."""
    return Path(shutil.copytree(data.SUBSET, tmp_path / "copy"))


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder on loopback."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_named_directory_comes_before_the_debian_package(copy: Path) -> None:
    shutil.copytree(data.SUBSET, data.DEBIAN)

    assert str(copy) in data.load(copy).notes[0]


def test_the_debian_package_is_used_if_the_named_directory_is_absent(copy: Path) -> None:
    shutil.copytree(data.SUBSET, data.DEBIAN)

    assert str(data.DEBIAN) in data.load(copy / "absent").notes[0]


def test_images_are_floats_from_minus_one_to_one(copy: Path) -> None:
    images, _ = data.load(copy).train.tensors

    assert images.shape == (3000, 1, 28, 28)
    assert images.dtype == torch.float32
    assert images.aminmax() == (-1, 1)


def test_labels_are_the_numbers_of_ten_classes(copy: Path) -> None:
    _, labels = data.load(copy).train.tensors

    assert labels.dtype == torch.int64
    assert labels.unique().tolist() == list(range(10))


def test_a_limit_keeps_the_first_images_and_says_so(copy: Path) -> None:
    limited = data.load(copy, limit=10)

    assert torch.equal(limited.train.tensors[0], data.load(copy).train.tensors[0][:10])
    assert not limited.full
    assert limited.notes == (
        f"Data: a subset of FashionMNIST, 3000 training and 1000 test images, from {copy}; "
        "training on the first 10",
    )


def test_a_limit_below_one_image_is_refused(copy: Path) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        data.load(copy, limit=0)


def test_a_downloaded_file_is_kept_if_its_checksum_is_the_published_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with served(data.SUBSET) as url:
        wrong = data.load(url=url).notes
        assert not data.DOWNLOADS.exists()
        right = {n: hashlib.md5((data.SUBSET / n).read_bytes()).hexdigest() for n in data.PUBLISHED}
        monkeypatch.setattr(data, "PUBLISHED", right)
        assert str(data.DOWNLOADS) in data.load(url=url).notes[0]
    assert f"{url}/{TRAIN_IMAGES} has the MD5 sum" in wrong[1]
    assert str(data.SUBSET) in wrong[0]
    assert str(data.DOWNLOADS) in data.load(url=url).notes[0]  # with nobody there who serves it


def test_without_a_network_the_subset_is_used_with_a_message(tmp_path: Path) -> None:
    with served(tmp_path) as url:
        missing = data.load(url=url).notes  # answers, but has no such file
    refused = data.load(url=url).notes
    assert "File not found" in missing[1]
    assert "refused" in refused[1]
    for notes in (missing, refused):
        assert notes[0].startswith("Data: a subset of FashionMNIST, 3000 training and 1000 test")
        assert "only the small subset" in notes[2]
        assert "apt-get install dataset-fashion-mnist" in notes[3]


@pytest.mark.parametrize(
    "name, spoil, says",
    [
        (TRAIN_IMAGES, lambda content: content[:-9], "cannot be unpacked"),
        (TEST_LABELS, lambda content: b"", "starts with nothing"),
    ],
)
def test_a_broken_file_is_named(
    copy: Path, name: str, spoil: Callable[..., Any], says: str
) -> None:
    path = copy / name
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(data.DataError, match=says) as caught:
        data.load(copy)
    assert str(path) in str(caught.value)
