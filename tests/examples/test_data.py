"""The FashionMNIST reader: every place it looks in, and files that are not what they should be."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

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


class Server:
    """Serves a folder on loopback and counts what was asked for."""

    def __init__(self, folder: Path) -> None:
        asked = self.asked = []

        class Handler(http.server.SimpleHTTPRequestHandler):
            def __init__(self, *args: object) -> None:
                super().__init__(*args, directory=str(folder))

            def log_message(self, *args: object) -> None:
                asked.append(self.path)

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(data.SUBSET)
    yield server
    server.close()


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the subset's sums for the published ones, so that a local server can offer it."""
    sums = {
        name: hashlib.md5((data.SUBSET / name).read_bytes()).hexdigest() for name in data.PUBLISHED
    }
    monkeypatch.setattr(data, "PUBLISHED", sums)


def test_a_named_directory_comes_first(copy: Path) -> None:
    shutil.copytree(data.SUBSET, data.DEBIAN)
    found = data.load(copy)
    assert found.notes == (
        f"Data: a subset of FashionMNIST, 3000 training and 1000 test images, from {copy}",
    )
    images, labels = found.train.tensors
    assert images.shape == (3000, 1, 28, 28)
    assert images.dtype == torch.float32
    assert (images.min(), images.max()) == (-1, 1)
    assert labels.dtype == torch.int64
    assert set(labels.tolist()) == set(range(10))


def test_the_debian_package_comes_second(tmp_path: Path) -> None:
    shutil.copytree(data.SUBSET, data.DEBIAN)
    first, second = data.load(tmp_path / "absent").notes
    assert str(data.DEBIAN) in first
    assert second.startswith(f"{tmp_path / 'absent'} does not have {TRAIN_IMAGES}, {TRAIN_LABELS}")


def test_it_is_downloaded_once(server: Server, published: None) -> None:
    found = data.load(url=server.url)
    assert str(data.DOWNLOADS) in found.notes[0]
    assert sorted(path.name for path in data.DOWNLOADS.iterdir()) == sorted(data.PUBLISHED)
    assert len(server.asked) == 4
    assert len(data.load(url=server.url).train) == 3000
    assert len(server.asked) == 4


def test_a_download_with_a_wrong_sum_is_not_kept(server: Server) -> None:
    found = data.load(url=server.url)
    text = "\n".join(found.notes)
    assert f"{server.url}/{TRAIN_IMAGES} has the MD5 sum" in text
    assert data.PUBLISHED[TRAIN_IMAGES] in text
    assert not data.DOWNLOADS.exists()
    assert str(data.SUBSET) in found.notes[0]


def test_without_a_network_the_subset_is_used_and_said(tmp_path: Path) -> None:
    server = Server(tmp_path)
    missing = data.load(url=server.url).notes  # answers, but has no such file
    server.close()
    refused = data.load(url=server.url).notes
    assert "File not found" in missing[1]
    assert "refused" in refused[1]
    for notes in (missing, refused):
        assert notes[0].startswith("Data: a subset of FashionMNIST, 3000 training and 1000 test")
        assert "only the small subset" in notes[2]
        assert "apt-get install dataset-fashion-mnist" in notes[3]


def test_a_silent_server_does_not_hang_it() -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as silent:
        found = data.load(url=f"http://127.0.0.1:{silent.server_port}")
    assert "timed out" in found.notes[1]


def test_limit(copy: Path) -> None:
    found = data.load(copy, limit=10)
    assert (len(found.train), len(found.test)) == (10, 1000)
    assert found.notes[0].endswith("training on the first 10")
    assert not found.full
    assert torch.equal(found.train.tensors[0], data.load(copy).train.tensors[0][:10])
    with pytest.raises(ValueError, match="at least 1"):
        data.load(copy, limit=0)


def _idx(values: bytes, *shape: int) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in shape)
    return gzip.compress(bytes([0, 0, 8, len(shape)]) + sizes + values)


def _flip(content: bytes) -> bytes:
    at = len(content) // 2
    return content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :]


@pytest.mark.parametrize(
    "name, spoil, says",
    [
        (TRAIN_IMAGES, _flip, "cannot be unpacked"),
        (TEST_LABELS, lambda content: b"", "starts with nothing"),
        (
            TEST_LABELS,
            lambda content: gzip.compress(b"\0\0\x08\x01\0\0"),
            "starts with 00 00 08 01",
        ),
        (TRAIN_LABELS, lambda content: _idx(bytes(9), 10), "has 9 bytes of data"),
        (TRAIN_LABELS, lambda content: _idx(bytes(10), 10), "has 10 labels for 3000 images"),
        (TEST_LABELS, lambda content: _idx(bytes([10] * 1000), 1000), "has the label 10"),
        (TEST_IMAGES, lambda content: _idx(bytes(8000), 1000, 2, 4), r"images of \(2, 4\)"),
    ],
)
def test_a_broken_file_is_named(copy: Path, name: str, spoil, says: str) -> None:
    path = copy / name
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(data.DataError, match=says) as caught:
        data.load(copy)
    assert str(path) in str(caught.value)
