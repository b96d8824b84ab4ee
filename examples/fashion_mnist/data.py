"""Load FashionMNIST as two torch data sets, from wherever it is available.

It is searched in this order: the directory that the caller names, the Debian package
``dataset-fashion-mnist``, earlier downloads. Otherwise it is downloaded and its checksums are
compared. If all this fails, a small real subset in this repository is used. ``notes`` say what was
used, and why.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import math
import os
import urllib.request
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

HERE = Path(__file__).resolve().parent
SUBSET = HERE / "subset"
DOWNLOADS = HERE.parent.parent / "data" / "fashion_mnist"
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
TIMEOUT = 5.0  # seconds without an answer after which the network counts as unavailable

# The four files, with the MD5 sums that the authors publish for their downloads. (Debian compresses
# the same data again, so its files have other sums.)
PUBLISHED = {
    "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
}
FULL_SIZES = (60_000, 10_000)


class DataError(Exception):
    """A file of the data set cannot be used. The message names it and says what to do."""


@dataclass(frozen=True)
class FashionMNIST:
    """The two parts of the set and where they came from.

    Attributes:
        train, test: pairs of an image, float32 [1, 28, 28] in -1 .. 1, and a label, int64 0 .. 9.
        notes: sentences that say which data was used, and what was not found.
        full: whether this is the complete set of 60,000 + 10,000 images.
    """

    train: TensorDataset
    test: TensorDataset
    notes: tuple[str, ...]
    full: bool


def load(
    directory: str | Path | None = None, limit: int | None = None, url: str = URL
) -> FashionMNIST:
    """Return the set, read from the first place that has it.

    Args:
        directory: where to look first; also where a download goes. None looks elsewhere only.
        limit: use only this number of training images, the first ones.
        url: the server to download from.

    Raises:
        DataError: a file exists, but is truncated, corrupted or not what its name says.
        ValueError: ``limit`` is not positive.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, not {limit}")
    folder, notes = _locate(Path(directory) if directory else None, url)
    train, test = _part(folder, "train"), _part(folder, "t10k")
    full = (len(train), len(test)) == FULL_SIZES
    kind = "FashionMNIST" if full else "a subset of FashionMNIST"
    used = f"Data: {kind}, {len(train)} training and {len(test)} test images, from {folder}"
    if limit is not None and limit < len(train):
        train = TensorDataset(*(tensor[:limit] for tensor in train.tensors))
        used += f"; training on the first {limit}"
    return FashionMNIST(train, test, (used, *notes), full and limit is None)


def _locate(directory: Path | None, url: str) -> tuple[Path, list[str]]:
    """Return the folder to read, and notes about the choice."""
    notes = []
    for place in (directory, DEBIAN, DOWNLOADS):
        if place is None:
            continue
        missing = [name for name in PUBLISHED if not (place / name).is_file()]
        if not missing:
            return place, notes
        if place == directory:
            notes.append(f"{place} does not have {', '.join(missing)}")
    target = directory or DOWNLOADS
    failure = _download(target, url)
    if failure is None:
        return target, notes
    return SUBSET, [
        *notes,
        f"The download failed: {failure}",
        "So this is only the small subset that comes with the repository: expect a lower accuracy.",
        "For the full set: apt-get install dataset-fashion-mnist, or name a directory that has it "
        "with --data-dir or FASHION_MNIST_DIR",
    ]


def _download(target: Path, url: str) -> str | None:
    """Download the files that ``target`` lacks. Return None, or why this failed."""
    for name, published in PUBLISHED.items():
        if (target / name).is_file():
            continue
        try:
            with urllib.request.urlopen(f"{url}/{name}", timeout=TIMEOUT) as answer:
                content = answer.read()
        # no network, no such file, interrupted connection
        except (OSError, http.client.HTTPException) as error:
            return f"{url}/{name}: {getattr(error, 'reason', None) or error}"
        found = hashlib.md5(content, usedforsecurity=False).hexdigest()
        if found != published:
            return f"{url}/{name} has the MD5 sum {found}, not the published {published}"
        try:
            target.mkdir(parents=True, exist_ok=True)
            unfinished = target / f"{name}.{os.getpid()}.part"
            unfinished.write_bytes(content)
            unfinished.replace(target / name)
        except OSError as error:
            return f"cannot write to {target}: {error}"
    return None


def _part(folder: Path, name: str) -> TensorDataset:
    images_file = folder / f"{name}-images-idx3-ubyte.gz"
    labels_file = folder / f"{name}-labels-idx1-ubyte.gz"
    images, labels = read_idx(images_file, 3), read_idx(labels_file, 1)
    if images.shape[1:] != (28, 28):
        raise DataError(f"{images_file} holds images of {images.shape[1:]}, not (28, 28)")
    if len(images) != len(labels):
        raise DataError(f"{labels_file} has {len(labels)} labels for {len(images)} images")
    if labels.max(initial=0) > 9:
        raise DataError(f"{labels_file} has the label {labels.max()}; there are only 0 to 9")
    pixels = torch.from_numpy(images).unsqueeze(1).float().div_(255)
    return TensorDataset(pixels.sub_(0.5).div_(0.5), torch.from_numpy(labels).long())


def read_idx(path: Path, dims: int) -> np.ndarray:
    """Return the bytes in a gzipped IDX file as an array of ``dims`` dimensions.

    Raises:
        DataError: the file cannot be unpacked completely, or does not have the size in its header.
    """
    remedy = "delete it and run again, or point to another copy"
    try:
        content = gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be unpacked ({error}); {remedy}") from error
    start = 4 + 4 * dims
    magic = bytes([0, 0, 8, dims])  # 8: unsigned bytes
    if len(content) < start or content[:4] != magic:
        raise DataError(
            f"{path} starts with {content[:4].hex(' ') or 'nothing'}, not with {magic.hex(' ')} "
            f"and {dims} sizes as an IDX file does; {remedy}"
        )
    shape = tuple(np.frombuffer(content, ">u4", dims, offset=4).tolist())
    if len(content) - start != math.prod(shape):
        raise DataError(
            f"{path} has {len(content) - start} bytes of data where its header says "
            f"{' x '.join(map(str, shape))} = {math.prod(shape)}; {remedy}"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy()
