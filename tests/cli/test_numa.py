"""Cores of NUMA nodes for the processes of a job."""

from __future__ import annotations

from pathlib import Path

from poptorch._cli import numa


def test_neighbours_share_a_node(tmp_path: Path) -> None:
    for node, cores in {0: "0-1,8", 1: "2-3", 2: "", 10: "6,4-5"}.items():
        folder = tmp_path / f"node{node}"
        folder.mkdir()
        (folder / "cpulist").write_text(f"{cores}\n")
    (tmp_path / "node_states").mkdir()
    there = numa.nodes(tmp_path, {0, 1, 3, 4, 5, 6, 8})
    assert there == [{0, 1, 8}, {3}, {4, 5, 6}]  # node 2 has memory only, core 2 is not ours
    assert [numa.share(there, process, 6) for process in range(6)] == [
        there[0], there[0], there[1], there[1], there[2], there[2],
    ]  # fmt: skip
    assert [numa.share(there, process, 2) for process in range(2)] == [there[0], there[1]]
