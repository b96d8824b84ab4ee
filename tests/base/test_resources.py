"""What the machine has to spare, from what the system counts."""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from poptorch._base import resources

GIB = 1 << 30


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 20 GiB to spare, of which 19 are in the page cache; its control groups."""
    memory = SimpleNamespace(total=24 * GIB, available=20 * GIB, free=GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(resources, "_CONTROL_GROUPS", tmp_path)
    monkeypatch.setattr(resources, "_OWN_GROUPS", tmp_path / "own")
    return tmp_path


@pytest.mark.parametrize("lies", ["job/part", "job", ""])
def test_a_limit_of_a_group_counts_without_the_page_cache(groups: Path, lies: str) -> None:
    (groups / "own").write_text("0::/job/part\n")
    (groups / "job" / "part").mkdir(parents=True)
    (groups / "job" / "memory.max").write_text("max\n")
    (groups / lies / "memory.max").write_text(f"{8 * GIB}\n")
    (groups / lies / "memory.current").write_text(f"{7 * GIB}\n")
    (groups / lies / "memory.stat").write_text(f"anon 5\ninactive_file {6 * GIB}\n")
    assert resources.available_memory() == 7 * GIB
    assert resources.memory_size() == 24 * GIB


def test_groups_of_the_first_kind_are_read_too(groups: Path) -> None:
    (groups / "own").write_text("5:cpu:/other\n4:memory:/job\n1:name=systemd:/x\n")
    own = groups / "memory" / "job"
    own.mkdir(parents=True)
    (own / "memory.limit_in_bytes").write_text(f"{2 * GIB}\n")
    (own / "memory.usage_in_bytes").write_text(f"{3 * GIB}\n")
    assert resources.available_memory() == 0  # over it, with nothing to give back
