"""A device that is no CPU to torch: programs train there, and no more travels than has to."""

import os

from helpers import programs
from helpers.source_tree import PACKAGE, ROOT


def test_the_reference_tier_works_on_a_device_with_memory_of_its_own() -> None:
    """In a process of its own: torch has one place for such a device."""
    folders = os.pathsep.join(map(str, (PACKAGE.parent, ROOT / "tests")))
    environment = programs.with_ours(PYTHONPATH=folders)
    done = programs.run("-m", "helpers.elsewhere", environment=environment)
    assert done.returncode == 0, done.stderr
