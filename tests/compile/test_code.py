"""Compiled graphs on disk: what their keys cover, damage, folders that cannot be used."""

import operator
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx, nn

import poptorch
from helpers.wrapping import Having, normal, options
from poptorch._base import archive, folders, signed_code
from poptorch._compile import cache, tiers
from poptorch._cpu import Inductor, backend
from poptorch._ir import graph_json, slots
from poptorch._ir.graph import Graph

pytestmark = pytest.mark.slow
BUILDER = Inductor()


def keys(
    inner: str = "layer",
    factor: float = 2.0,
    rows: int = 8,
    lr: float = 0.1,
    iterations: int = 1,
    momentum: float = 0.0,
) -> list[str | None]:
    torch.manual_seed(int(lr * 100))  # weights differ too

    def forward(
        model: Having, x: torch.Tensor, y: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = model.get_submodule(inner)(x) * factor
        return out, nn.functional.mse_loss(out, y)

    net, opts = Having(forward, **{inner: nn.Linear(4, 2)}), options().deviceIterations(iterations)
    opts.outputMode(poptorch.OutputMode.All if iterations > 1 else poptorch.OutputMode.Final)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=momentum)
    training = poptorch.trainingModel(net, opts, optimizer)
    training.compile(normal(rows * iterations, 4), normal(rows * iterations, 2))
    return [cache.key_of(graph, BUILDER) for graph in training.plan().program.graphs.values()]


def test_the_key_depends_on_everything_that_changes_the_code() -> None:
    before = keys()
    for change in ({"lr": 0.5}, {"iterations": 3}, {"inner": "renamed"}):
        assert keys(**change) == before
    for change in ({"rows": 4}, {"factor": 3.0}, {"momentum": 0.9}):
        assert keys(**change) != before
    torch.set_num_threads(2)
    assert keys() != before


class Builder:
    """Its code says whether it was built or loaded."""

    name = "toy"

    def build(self, graph: Any) -> Any:
        return type("Code", (), {"run": staticmethod(lambda tensors: [1]), "kept": b"code"})()

    def load(self, kept: bytes) -> Callable[..., Any]:
        assert kept == b"code"
        return lambda tensors: [2]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> cache.Store:
    monkeypatch.setattr(cache, "_loaded", {})
    return cache.Store(tmp_path / "store")


@pytest.fixture(params=["damage", "no digest", "another key", "another graph"])
def spoiled(
    request: pytest.FixtureRequest,
    store: cache.Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    """Keep code for the key "key" that is not as this user kept it; return what is wrong."""
    wrong: str = request.param
    if wrong == "no digest":
        store.folder.mkdir(mode=0o700)
        archive.write(store.path("key"), {"code": b"theirs"})
    else:
        with monkeypatch.context() as elsewhere:
            if wrong == "another key":
                elsewhere.setenv("POPTORCH_KEY_FILE", str(tmp_path / "their key"))
            store.keep("other" if wrong == "another graph" else "key", b"code")
            written = store.path("key")
    if wrong == "another graph":
        store.path("other").replace(store.path("key"))
    elif wrong == "another key":  # as somebody may do who can write to the folder
        written.replace(store.path("key"))
    elif wrong == "damage":
        data = bytearray(store.path("key").read_bytes())
        data[data.index(b"code", 200)] ^= 1
        store.path("key").write_bytes(data)
    return wrong


def test_code_that_is_not_as_it_was_kept_is_made_again(spoiled: str, store: cache.Store) -> None:
    assert store.function("key", None, Builder())([]) == [1]


def test_one_warning_says_why_code_is_made_again(
    spoiled: str, store: cache.Store, caplog: pytest.LogCaptureFixture
) -> None:
    store.function("key", None, Builder())

    (warning,) = caplog.messages
    reason = (
        "is compiled again" if spoiled == "damage" else "is not signed with the key of this user"
    )
    assert reason in warning


def test_code_that_was_made_again_is_kept_in_the_place_of_the_other(
    spoiled: str,
    store: cache.Store,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store.function("key", None, Builder())
    caplog.clear()
    monkeypatch.setattr(cache, "_loaded", {})

    assert store.function("key", None, Builder())([]) == [2]
    assert caplog.messages == []


def test_users_with_different_keys_share_a_folder_of_code(
    store: cache.Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Containers do this if each has a new home directory and they share a volume for compiled
    code.
    """

    def with_key_of(name: str) -> list[int]:
        monkeypatch.setenv("POPTORCH_KEY_FILE", str(tmp_path / name))
        monkeypatch.setattr(cache, "_loaded", {})
        result: list[int] = store.function("key", None, Builder())([])
        return result

    first = [with_key_of("one"), with_key_of("two")]
    second = [with_key_of("one"), with_key_of("two")]

    assert first == [[1], [1]]  # each has built it once
    assert second == [[2], [2]]
    assert caplog.text == ""


@pytest.fixture
def key_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of a key that is used from now on and has signed something."""
    path = tmp_path / "folder" / "key"
    monkeypatch.setenv("POPTORCH_KEY_FILE", str(path))
    signed_code.digest("name", b"code")
    return path


def test_a_new_key_can_be_read_by_its_user_only(key_file: Path) -> None:
    assert key_file.stat().st_mode & 0o777 == 0o600


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


SPOILED: dict[str, Callable[[Path], Any]] = {
    "others can read it": lambda path: path.chmod(0o640),
    "it is too short": lambda path: path.write_bytes(b"short"),
    "it is a folder": replace_by_folder,
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_compiled_code_is_not_kept_if_the_key_cannot_be_used(
    spoil: Callable[[Path], Any],
    key_file: Path,
    store: cache.Store,
    caplog: pytest.LogCaptureFixture,
) -> None:
    spoil(key_file)
    signed_code._key.cache_clear()

    result = store.function("key", None, Builder())([])

    assert result == [1]
    assert not store.path("key").exists()
    (warning,) = caplog.messages
    assert "there is no key to sign it with" in warning


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_nothing_is_signed_with_a_key_that_cannot_be_used(
    spoil: Callable[[Path], Any], key_file: Path
) -> None:
    before = signed_code.digest("name", b"code")

    spoil(key_file)
    signed_code._key.cache_clear()

    assert signed_code.digest("name", b"code") != before


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder for temporary files, of a process whose files everybody can write."""
    monkeypatch.setattr(folders, "temporary", lambda: str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    before = os.umask(0)
    cache.default_store()
    os.umask(before)
    return tmp_path


def own_folder(temporary: Path) -> Path:
    return temporary / f"poptorch-code-{os.getuid()}"


def test_compiled_code_is_in_a_folder_of_the_user(temporary: Path) -> None:
    assert cache.default_store().folder == own_folder(temporary) / "poptorch"


def test_a_folder_that_torch_chose_itself_does_not_move_the_users(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(temporary / "torchinductor_name"))

    assert cache.default_store().folder == own_folder(temporary) / "poptorch"


def test_nobody_else_can_write_to_the_users_folder(temporary: Path) -> None:
    assert own_folder(temporary).stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_can_write_to_is_not_used(
    temporary: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own_folder(temporary).chmod(0o777)  # as somebody else may have made it
    folders.of_the_process.cache_clear()

    folder = cache.default_store().folder

    assert folder != own_folder(temporary) / "poptorch"
    assert "other users can write to it" in caplog.text


@pytest.fixture
def folder_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Path]:
    """Return a function that compiles, and returns where torch's compiler would store its files."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    seen = []

    def fail(graph: object) -> None:
        seen.append(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]))
        raise ZeroDivisionError

    def folder_of_compilation() -> Path:
        with pytest.raises(ZeroDivisionError):
            BUILDER.build(SimpleNamespace(module=nn.Module(), operators=[]))
        return seen.pop()

    monkeypatch.setattr(backend, "without_writes", fail)
    return folder_of_compilation


def test_the_folder_of_torchs_compiler_is_private_and_next_to_the_cache(
    folder_of_torch: Callable[[], Path], tmp_path: Path
) -> None:
    folder = folder_of_torch()

    assert folder.parent == tmp_path / "poptorch"
    assert folder.parent == cache.default_store().folder
    assert folder.parent.stat().st_mode & 0o777 == 0o700


def test_torchs_compiler_does_not_use_a_folder_that_others_can_write_to(
    folder_of_torch: Callable[[], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder_of_torch()
    (tmp_path / "poptorch").chmod(0o770)

    folder = folder_of_torch()

    assert folder.parent != tmp_path / "poptorch"
    assert folder.parent == cache.default_store().folder
    assert folder.parent.stat().st_mode & 0o777 == 0o700
    assert caplog.text.count("other users can write to") == 1


def test_the_folder_that_the_user_chose_for_torch_is_the_same_after_compiling(
    folder_of_torch: Callable[[], Path], tmp_path: Path
) -> None:
    folder_of_torch()

    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path)


def test_a_graph_without_a_text_form_is_compiled_and_not_kept(store: cache.Store) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(operator.matmul, (x, x)),))
    slot = slots.batch_input(0, (2, 2), torch.float32)
    part = Graph("odd", fx.GraphModule({}, graph), (slot,), ())
    with pytest.raises(TypeError):
        graph_json.encode(part)
    assert cache.key_of(part, BUILDER) is None
    plan = SimpleNamespace(program=SimpleNamespace(graphs={"odd": part}))
    odd = tiers.PlanCode(plan, BUILDER, store)
    assert odd.missing() == {}
    assert odd.found() == {}
