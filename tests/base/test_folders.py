"""Folders of code: refused if another user could put something else in their place."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers import users
from poptorch._base import env, folders
from poptorch._base.folders import is_own, problem_with


@pytest.fixture(autouse=True)
def empty_caches() -> Iterator[None]:
    folders.of_the_process.cache_clear()
    yield
    folders.of_the_process.cache_clear()


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """Return a folder in which everybody can write, like /tmp, that others can reach."""
    for parent in (tmp_path, *tmp_path.parents):
        if parent.stat().st_uid == os.getuid() and not parent.stat().st_mode & stat.S_IXOTH:
            parent.chmod(parent.stat().st_mode | stat.S_IXOTH)
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def test_a_folder_is_made_for_the_user_alone(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"

    assert problem_with(folder) is None
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o757])
def test_a_folder_below_one_that_others_can_write_to_is_refused(mode: int, tmp_path: Path) -> None:
    open_to_all = tmp_path / "open"
    (open_to_all / "between").mkdir(parents=True)
    open_to_all.chmod(mode)

    assert problem_with(open_to_all / "between" / "own") == (
        f"other users can write to {open_to_all} (chmod go-w)"
    )
    assert not (open_to_all / "between" / "own").exists()


def test_a_folder_in_a_shared_one_that_keeps_names_is_taken(shared: Path) -> None:
    assert problem_with(shared / "own") is None


def test_a_folder_that_is_reached_by_own_links_is_taken(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")

    assert problem_with(tmp_path / "link" / "code") is None
    assert (tmp_path / "disk" / "code").is_dir()


def test_where_a_link_leads_is_judged_too(tmp_path: Path) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    (tmp_path / "link").symlink_to("open/../open/code")

    assert problem_with(tmp_path / "link") == f"other users can write to {open_to_all} (chmod go-w)"


def test_two_dots_behind_a_link_lead_to_the_parent_of_its_target(tmp_path: Path) -> None:
    """Without the link, ``link/../code`` would be in the folder of the link."""
    open_to_all = tmp_path / "open"
    (open_to_all / "inner").mkdir(parents=True)
    open_to_all.chmod(0o777)
    (tmp_path / "link").symlink_to("open/inner")

    refused = problem_with(tmp_path / "link" / ".." / "code")

    assert refused == f"other users can write to {open_to_all} (chmod go-w)"


def test_links_in_a_circle_are_trouble(tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")

    assert "leads nowhere" in str(problem_with(tmp_path / "one" / "code"))


def test_a_folder_of_torchs_variable_below_an_open_one_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(open_to_all / "cache"))

    used = folders.of_the_user()

    assert open_to_all not in used.parents
    assert f"other users can write to {open_to_all}" in caplog.text


def test_files_that_others_can_write_to_or_link_to_do_not_count_as_the_users_own(
    tmp_path: Path,
) -> None:
    own, open_to_all, link = tmp_path / "own", tmp_path / "open", tmp_path / "link"
    for path, mode in ((own, 0o644), (open_to_all, 0o666)):
        path.touch()
        path.chmod(mode)
    link.symlink_to(own)

    assert is_own(own)
    assert not is_own(open_to_all)
    assert not is_own(link)


# Another user of the machine.


@pytest.mark.slow
def test_the_link_of_another_user_is_not_followed(shared: Path, tmp_path: Path) -> None:
    """The link leads to a folder of the user until the folder is checked, and then somewhere
    else.
    """
    users.run("import os, sys; os.symlink(*sys.argv[1:])", str(tmp_path), str(shared / "code"))

    assert problem_with(shared / "code") == f"{shared / 'code'} is a link of another user"
    assert problem_with(shared / "code" / "poptorch") == problem_with(shared / "code")


@pytest.mark.slow
def test_the_folder_of_another_user_is_not_used(shared: Path) -> None:
    code = "import os, sys; os.mkdir(sys.argv[1]); os.chmod(sys.argv[1], 0o777)"
    users.run(code, str(shared / "theirs"))

    assert problem_with(shared / "theirs") == "it belongs to another user"
    assert problem_with(shared / "theirs" / "own") == f"{shared / 'theirs'} belongs to another user"
    assert not (shared / "theirs" / "own").exists()


@pytest.mark.slow
def test_the_usual_folder_that_another_user_has_made_is_not_used(
    shared: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place = shared / f"poptorch-code-{os.getuid()}"
    monkeypatch.setattr(folders, "temporary", lambda: str(shared))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    users.run("import os, sys; os.mkdir(sys.argv[1]); os.chmod(sys.argv[1], 0o777)", str(place))

    used = folders.of_the_user()

    assert place not in (used, *used.parents)
    assert list(place.iterdir()) == []
    assert env.get("TORCHINDUCTOR_CACHE_DIR") == ""
    assert f"{place}: it belongs to another user" in caplog.text
