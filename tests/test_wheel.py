"""The package works from an installed wheel, outside the source tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from helpers.source_tree import PACKAGE, ROOT

PARTS = ("src", "pyproject.toml", "README.md", "LICENSE")


def run(*command: object, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build from a copy, so that no build folder appears in the source tree."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "source"
    copy.mkdir()
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("*.egg-info"))
        else:
            shutil.copy(ROOT / part, copy / part)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", ".", cwd=copy)
    (built,) = (copy / "dist").glob("*.whl")
    return built


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    folder = PACKAGE.parent
    sources = {path.relative_to(folder).as_posix() for path in folder.rglob("*.py")}
    code = {name for name in names if ".dist-info/" not in name}
    assert code == sources | {"poptorch/py.typed"}
    assert any(name.endswith("LICENSE") for name in names)


def test_the_readme_runs_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    place = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(place)
    readme = (ROOT / "README.md").read_text()
    program = readme.split("```python\n")[1].split("```")[0]
    (tmp_path / "program.py").write_text(f"{program}\nprint(poptorch.__file__)\n")
    printed = run(
        sys.executable,
        "-W",
        "error",
        "program.py",
        cwd=tmp_path,
        PYTHONPATH=str(place),
        POPTORCH_BACKEND="reference",
    )
    assert printed.splitlines()[-1] == str(place / "poptorch" / "__init__.py")
    assert "emit loss, output.* final" in printed
