"""Create the small subset of FashionMNIST that the examples use if the full data set is missing.

The subset consists of the first images of the full set in the Debian package
``dataset-fashion-mnist``.

Usage: python scripts/make_subset.py
"""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "fashion_mnist"))

from data import DEBIAN, SUBSET, read_idx

SIZES = {"train": 3000, "t10k": 1000}


def main() -> None:
    """Write the four files."""
    SUBSET.mkdir(exist_ok=True)
    for part, size in SIZES.items():
        for kind, dims in (("images-idx3", 3), ("labels-idx1", 1)):
            name = f"{part}-{kind}-ubyte.gz"
            values = read_idx(DEBIAN / name, dims)[:size]
            header = bytes([0, 0, 8, dims]) + np.array(values.shape, ">u4").tobytes()
            packed = gzip.compress(header + values.tobytes(), compresslevel=9, mtime=0)
            (SUBSET / name).write_bytes(packed)


if __name__ == "__main__":
    main()
