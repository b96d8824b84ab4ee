"""Damaged saved models: refused with the model unchanged, or loaded as they were saved."""

import contextlib
import functools
import hashlib
import json
import os
import random
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import poptorch
from helpers.wrapping import options

from .models import statistics

HEADER = "header.json"
ODD = [
    None, True, -1, 10**30, 1e308, "", "x" * 1000, [], {}, [[]], {"a": 1}, ["a", None], "../../x",
    {"tuple": 3}, {"float": "x"}, {"tensor": "float32", "shape": [1 << 40, 1 << 40]},
    {"tensor": "load", "shape": [2]}, {"dict": [[1]]}, "__import__('os').system('touch pwned')",
]  # fmt: skip


def made(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = statistics()
    return model, poptorch.optim.Adam(model.parameters(), lr=0.1)


@functools.cache
def saved() -> tuple[bytes, dict[str, torch.Tensor]]:
    model, optimizer = made(0)
    wrapper = poptorch.trainingModel(model, options(), optimizer)
    wrapper(torch.randn(4, 4), torch.randn(4, 3))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.poptorch"
        wrapper.save(str(path))
        weights = {name: t.clone() for name, t in model.state_dict().items()}
        wrapper.destroy()
        return path.read_bytes(), weights


def trial(number: int) -> Iterator[Any]:
    draw = random.Random(number)
    whole, weights = saved()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.poptorch"
        path.write_bytes(whole)
        damage = draw.choice((_bytes, _bytes, _replaced, _parts, _facts, _facts))
        damage(draw, path)
        outcome, problem = attempt(path, weights)
        left = sorted(p.name for p in Path(folder).iterdir() if p != path)
        if left and not problem:
            problem = f"left over: {left}"
    yield outcome, problem and f"{damage.__name__}: {problem}"


def attempt(path: Path, weights: dict[str, torch.Tensor]) -> tuple[str, str | None]:
    model, optimizer = made(1)  # the kind of model that was saved, with other weights
    before = {name: t.clone() for name, t in model.state_dict().items()}
    try:
        wrapper = poptorch.load(str(path), model=model, optimizer=optimizer)
    except (poptorch.Error, FileNotFoundError) as error:
        unchanged = all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
        return "refused", None if unchanged else f"the model has changed ({error})"
    except Exception as error:
        return "exception", f"{type(error).__name__}: {error}"
    # Without values the weights that were saved are the only ones that can be there.
    same = all(torch.equal(t, weights[n]) for n, t in model.state_dict().items())
    try:
        wrapper(torch.randn(4, 4), torch.randn(4, 3))
    except poptorch.Error:
        pass
    except Exception as error:
        return "exception", f"first call: {type(error).__name__}: {error}"
    finally:
        wrapper.destroy()
    return ("as saved" if same else "other values"), None


def _bytes(draw: random.Random, path: Path) -> None:
    data = bytearray(path.read_bytes())
    at, count = draw.randrange(draw.choice([1000, len(data)])), draw.randrange(1, 50)
    end = draw.choice([at, at + count, len(data)])  # insert, replace, cut off
    data[at:end] = b"" if end == len(data) else draw.choice([draw.randbytes, bytes])(count)
    path.write_bytes(data)


def _replaced(draw: random.Random, path: Path) -> None:
    path.unlink()
    draw.choice(
        (
            path.mkdir,
            lambda: os.mkfifo(path),
            lambda: path.symlink_to(path),
            lambda: None,
            lambda: path.symlink_to("/dev/zero"),
            lambda: path.write_bytes(draw.randbytes(draw.randrange(2000))),
        )
    )()


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Yield the parts of a whole file; then write them with right digests, as a stranger could."""
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    header = json.loads(parts.pop(HEADER))
    yield parts
    header["digests"] = {name: hashlib.sha256(data).hexdigest() for name, data in parts.items()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {HEADER: json.dumps(header), **parts}.items():
            archive.writestr(name, data)


def _parts(draw: random.Random, path: Path) -> None:
    with opened(path) as parts:
        name, what = draw.choice(sorted(parts)), draw.randrange(4)
        if what == 0:
            del parts[name]
        elif what == 1:
            parts[name] = draw.randbytes(draw.randrange(300))
        elif what == 2:
            parts[name] = parts[draw.choice(sorted(parts))]
        else:
            data = bytearray(parts[name])
            data[draw.randrange(min(len(data), 400))] = draw.randrange(256)
            parts[name] = bytes(data)


def _facts(draw: random.Random, path: Path) -> None:
    with opened(path) as parts:
        facts = json.loads(parts["facts.json"])
        _change(draw, facts)
        text = json.dumps(facts)
        if draw.random() < 0.1:
            depth = draw.choice([50, 100_000])
            text = text[:-1] + ', "arguments": ' + "[" * depth + "]" * depth + "}"
        parts["facts.json"] = text.encode()


def _change(draw: random.Random, value: Any) -> None:
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not keys:
            return
        key = draw.choice(keys)
        if not isinstance(value[key], (dict, list)) or draw.random() >= 0.7:
            break
        value = value[key]
    if draw.random() < 0.2:
        del value[key]
    else:
        value[key] = draw.choice(ODD)
