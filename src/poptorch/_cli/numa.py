"""Binds a process to a NUMA node and becomes the program to run: ``poprun --numa-aware yes``.

It is run by its path, once for each process: importing the package takes longer than all of this.
torch's own binding is for processes with a GPU each.
Source: Linux kernel documentation, "NUMA Memory Performance".
"""

import os
import sys
from pathlib import Path

NODES = Path("/sys/devices/system/node")


def cores(text: str) -> set[int]:
    """Return the cores of a list as Linux writes it, ``0-3,8``."""
    ranges = [part.split("-") for part in text.strip().split(",") if part]
    return {core for ends in ranges for core in range(int(ends[0]), int(ends[-1]) + 1)}


def nodes(folder: Path, usable: set[int]) -> list[set[int]]:
    """Return the usable cores of each node that has some, in the order of the nodes."""
    paths = sorted(folder.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name[4:]))
    return [own for path in paths if (own := cores(path.read_text()) & usable)]


def share(each_node: list[set[int]], process: int, processes: int) -> set[int]:
    """Return the cores of a process: neighbours have the same node, or the next one."""
    return each_node[process * len(each_node) // processes]


def main(process: str, processes: str, *program: str) -> None:
    """Bind this process, of so many on this machine, and run the program in its place."""
    there = nodes(NODES, os.sched_getaffinity(0))
    if there:
        os.sched_setaffinity(0, share(there, int(process), int(processes)))
    elif process == "0":
        print(f"poprun: --numa-aware: there are no nodes at {NODES}", file=sys.stderr)
    os.execvp(program[0], program)


if __name__ == "__main__":
    main(*sys.argv[1:])
