"""The container protocol, and ``poptorch.Attribute`` (spec/options.md sections 2 and 11)."""

import pytest

from poptorch import Error
from poptorch.options import Attribute, Options
from poptorch.options.attribute import current
from poptorch.options.container import Container


@pytest.fixture
def group() -> Container:
    return Container(count=1, name="x", on=True)


@pytest.mark.spec("options", 4)
def test_declared_values_are_attributes_that_keep_their_type(group: Container) -> None:
    assert (group.count, group.name, group("count")) == (1, "x", 1)
    assert group.exists("name")
    assert (group.exists("other"), hasattr(group, "other")) == (False, False)
    group.count = 4
    assert group.count == 4
    for change in (lambda: setattr(group, "count", "4"), lambda: group.set(on=False, name=3)):
        with pytest.raises(AssertionError, match="Unexpected type"):
            change()
    assert (group.count, group.on) == (4, True)  # none of a refused call
    with pytest.raises(AssertionError, match="Invalid option"):
        group.other = 4
    with pytest.raises(AttributeError, match="Invalid attribute"):
        group.other  # noqa: B018
    group.count = True  # an int, which does not narrow the type
    group.count = 7
    assert group.count == 7
    assert group.createOrSet(extra=1.5) is group
    with pytest.raises(AssertionError, match="Unexpected type"):
        group.createOrSet(extra="text")
    for _ in range(2):
        group.deleteIfExists("extra")
    assert not group.exists("extra")


@pytest.mark.parametrize("use, says", [
    (lambda o: o.deviceIteration(4), r"did you mean options\.deviceIterations or"),
    (lambda o: o.gradientAccumulation(2), r"options\.Training\.gradientAccumulation\?"),
    (lambda o: setattr(o, "deviceIterations", 4), r"call it: deviceIterations\(4\)"),
    (lambda o: o.deviceIterations(0), r"deviceIterations must be at least 1"),
    (lambda o: o.Training.gradientAccumulation(-1), r"gradientAccumulation must be at least 1"),
    (lambda o: o.Distributed.stageProcesses(0), r"stageProcesses must be at least 1"),
    (lambda o: o.lanes(-1), r"lanes must be at least 0"),
    (lambda o: o.programs(0), r"programs must be at least 1"),
    (lambda o: o.maxRepeatLogs(-1), r"maxRepeatLogs must be at least 0"),
    (lambda o: o.backend("cuda"), r"use one of auto, inductor, optimise, reference, staged"),
])  # fmt: skip
def test_a_mistake_is_refused_where_it_is_made_with_what_to_write(use, says):
    options = Options()
    with pytest.raises(Error, match=says) as caught:
        use(options)
    assert "Where:  test_container.py:" in str(caught.value)
    assert repr(options) == "Options()"


@pytest.mark.spec("options", 4)
def test_attributes_of_options_and_private_names_must_exist(group: Container) -> None:
    options = Options()
    options.replication_factor = 4
    assert "replication_factor=4" in repr(options)
    with pytest.raises(AssertionError, match="Unexpected type"):
        options.replication_factor = 4.0
    assert {"replication_factor", "deviceIterations"} <= set(dir(options))
    with pytest.raises(AssertionError, match="Invalid option autoRecomputation"):
        options._Popart.autoRecomputation = 2  # a key is no attribute
    assert "autoRecomputation" not in options._Popart.options
    options._relax_optimizer_checks = True
    assert options._relax_optimizer_checks
    for each in (group, options):
        with pytest.raises(AttributeError):
            each._new = 1


def test_update_merges_in_place_and_refuses_common_keys(group: Container) -> None:
    other = {"before": 0}
    assert group.update(other) is other
    assert other == {"before": 0, "count": 1, "name": "x", "on": True}
    with pytest.raises(AssertionError):
        group.update({"count": 1})


def test_frozen_writes_are_attribute_errors(group: Container) -> None:
    group._freeze()
    for write in (
        lambda: group.set(count=2),
        lambda: group.createOrSet(extra=2),
        lambda: group.deleteIfExists("count"),
        lambda: setattr(group, "count", 2),
        lambda: setattr(group, "_values", {}),
    ):
        with pytest.raises(AttributeError, match="Can't modify frozen Options"):
            write()
    group._freeze(False)
    assert group.set(count=2).count == 2


def test_copies_are_of_one_piece_and_no_two_groups_are_equal(group: Container) -> None:
    duplicate = Options().clone()
    duplicate._Popart.set("x", 1)
    assert duplicate.Training._popart is duplicate._Popart
    assert group != Container(count=1, name="x", on=True)
    assert len({group, group}) == 1


def test_classes_of_users() -> None:
    """A group's class is replaced in place; a subclass assigns state before the constructor."""

    class Blocked(type(Options().Distributed)):
        def disable(self) -> None:
            raise RuntimeError("Cannot call disable")

    class Mine(Options):
        def __init__(self, per_replica: int) -> None:
            self._per_replica = per_replica
            super().__init__()

    mine = Mine(2)
    mine.Distributed.__class__ = Blocked
    with pytest.raises(RuntimeError, match="Cannot call"):
        mine.Distributed.disable()
    clone = mine.clone()
    assert (type(clone.Distributed), clone._per_replica) == (Blocked, 2)
    assert repr(mine.deviceIterations(2)) == "Mine(device_iterations=2)"


@pytest.mark.spec("ops", 25)
def test_scopes_nest_and_restore() -> None:
    outer = Attribute(__outline={"layer": "embedding", "part": "1"})
    with outer:
        with Attribute(__outline={"layer": "inner"}, other={"a": "b"}), outer:
            assert current.get() == {"__outline": {"layer": "embedding", "part": "1"},
                                     "other": {"a": "b"}}  # fmt: skip
        assert current.get() == {"__outline": {"layer": "embedding", "part": "1"}}
    assert current.get() == {}
    with pytest.raises(KeyError), outer:
        raise KeyError
    assert current.get() == {}


@pytest.mark.parametrize("value", ["text", {"a": 1}, {1: "a"}, None])
def test_values_are_dictionaries_of_strings(value) -> None:
    with pytest.raises(AssertionError):
        Attribute(family=value)
