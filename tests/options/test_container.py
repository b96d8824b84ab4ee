"""The container protocol: values as attributes, frozen groups, copies, mistakes in names."""

from collections.abc import Callable
from typing import Any

import pytest

from poptorch import Error
from poptorch.options import Options
from poptorch.options.container import Container


@pytest.fixture
def group() -> Container:
    return Container(count=1, name="x", on=True)


# Values as attributes.


@pytest.mark.spec("options", 4)
def test_a_declared_value_can_be_read_as_an_attribute_or_by_its_name(group: Container) -> None:
    assert group.count == 1
    assert group("count") == 1
    assert group.exists("count")


def test_a_value_that_was_not_declared_does_not_exist(group: Container) -> None:
    assert not group.exists("other")
    assert not hasattr(group, "other")


@pytest.mark.spec("options", 4)
def test_reading_a_value_that_was_not_declared_is_an_error(group: Container) -> None:
    with pytest.raises(AttributeError, match="Invalid attribute"):
        group.other  # noqa: B018


@pytest.mark.spec("options", 4)
def test_setting_a_value_that_was_not_declared_is_an_error(group: Container) -> None:
    with pytest.raises(AssertionError, match="Invalid option"):
        group.other = 4


@pytest.mark.spec("options", 4)
def test_a_declared_value_can_be_assigned(group: Container) -> None:
    group.count = 4

    assert group.count == 4


def test_a_value_keeps_its_type(group: Container) -> None:
    with pytest.raises(AssertionError, match="Unexpected type"):
        group.count = "4"

    assert group.count == 1


def test_a_call_with_one_wrong_value_sets_none(group: Container) -> None:
    with pytest.raises(AssertionError, match="Unexpected type"):
        group.set(on=False, name=3)

    assert group.on is True


def test_a_bool_in_the_place_of_an_integer_does_not_narrow_the_type(group: Container) -> None:
    group.count = True

    group.count = 7

    assert group.count == 7


def test_a_value_can_be_declared_later(group: Container) -> None:
    returned = group.createOrSet(extra=1.5)

    assert returned is group
    assert group.extra == 1.5


def test_a_value_that_was_declared_later_keeps_its_type(group: Container) -> None:
    group.createOrSet(extra=1.5)

    with pytest.raises(AssertionError, match="Unexpected type"):
        group.createOrSet(extra="text")


def test_a_value_can_be_deleted_and_deleted_again(group: Container) -> None:
    group.createOrSet(extra=1.5)

    group.deleteIfExists("extra")
    group.deleteIfExists("extra")

    assert not group.exists("extra")


def test_update_adds_values_to_a_dictionary_in_place(group: Container) -> None:
    other: dict[str, Any] = {"before": 0}

    returned = group.update(other)

    assert returned is other
    assert other == {"before": 0, "count": 1, "name": "x", "on": True}


def test_update_refuses_a_dictionary_with_a_common_key(group: Container) -> None:
    with pytest.raises(AssertionError):
        group.update({"count": 1})


@pytest.fixture
def frozen(group: Container) -> Container:
    group._freeze()
    return group


@pytest.mark.parametrize(
    "write",
    [
        lambda group: group.set(count=2),
        lambda group: group.createOrSet(extra=2),
        lambda group: group.deleteIfExists("count"),
        lambda group: setattr(group, "count", 2),
        lambda group: setattr(group, "_values", {}),
    ],
    ids=["set", "createOrSet", "deleteIfExists", "an attribute", "a private attribute"],
)
def test_writing_to_a_frozen_group_is_an_attribute_error(
    write: Callable[[Container], object], frozen: Container
) -> None:
    with pytest.raises(AttributeError, match="Can't modify frozen Options"):
        write(frozen)


def test_a_group_can_be_changed_after_it_is_unfrozen(frozen: Container) -> None:
    frozen._freeze(False)

    assert frozen.set(count=2).count == 2


def test_two_groups_are_not_equal_and_can_be_in_a_set(group: Container) -> None:
    assert group != Container(count=1, name="x", on=True)
    assert len({group, group}) == 1


# The same for options.


@pytest.mark.spec("options", 4)
def test_assigning_a_value_of_options_changes_it() -> None:
    options = Options()

    options.replication_factor = 4

    assert "replication_factor=4" in repr(options)


@pytest.mark.spec("options", 4)
def test_assigning_a_value_of_options_checks_its_type() -> None:
    with pytest.raises(AssertionError, match="Unexpected type"):
        Options().replication_factor = 4.0


def test_values_and_setters_of_options_are_listed() -> None:
    assert {"replication_factor", "deviceIterations"} <= set(dir(Options()))


def test_a_key_of_the_backend_is_not_an_attribute() -> None:
    options = Options()

    with pytest.raises(AssertionError, match="Invalid option autoRecomputation"):
        options._Popart.autoRecomputation = 2

    assert "autoRecomputation" not in options._Popart.options


def test_a_private_attribute_that_exists_can_be_assigned() -> None:
    options = Options()

    options._relax_optimizer_checks = True

    assert options._relax_optimizer_checks is True


@pytest.mark.spec("options", 4)
@pytest.mark.parametrize("make", [Options, Container])
def test_a_private_attribute_that_does_not_exist_cannot_be_assigned(
    make: Callable[[], Container],
) -> None:
    with pytest.raises(AttributeError):
        make()._new = 1


@pytest.mark.spec("options", 26)
def test_groups_of_a_clone_belong_together() -> None:
    clone = Options().clone()

    assert clone.Training._popart is clone._Popart


# Mistakes.


@pytest.mark.parametrize(
    "use, says",
    [
        (lambda o: o.deviceIteration(4), r"did you mean options\.deviceIterations or"),
        (lambda o: o.gradientAccumulation(2), r"options\.Training\.gradientAccumulation\?"),
        (lambda o: setattr(o, "deviceIterations", 4), r"call it: deviceIterations\(4\)"),
        (lambda o: o.deviceIterations(0), r"deviceIterations must be at least 1"),
        (lambda o: o.Training.gradientAccumulation(-1), r"gradientAccumulation must be at least 1"),
        (lambda o: o.Distributed.stageProcesses(0), r"stageProcesses must be at least 1"),
        (lambda o: o.lanes(-1), r"lanes must be at least 0"),
        (lambda o: o.programs(-1), r"programs must be at least 0"),
        (lambda o: o.maxRepeatLogs(-1), r"maxRepeatLogs must be at least 0"),
        (lambda o: o.backend("cuda"), r"use one of auto, inductor, optimise, reference, staged"),
    ],
)
def test_a_mistake_is_refused_at_its_line_with_the_correct_call(
    use: Callable[[Options], object], says: str
) -> None:
    options = Options()

    with pytest.raises(Error, match=says) as error:
        use(options)

    assert "Where:  test_container.py:" in str(error.value)
    assert repr(options) == "Options()"


# Classes of users.


class WithoutDisable(type(Options().Distributed)):
    """A group whose class a user replaces in place."""

    def disable(self) -> None:
        raise RuntimeError("Cannot call disable")


class WithState(Options):
    """Options to which a user assigns state before the constructor."""

    def __init__(self, per_replica: int) -> None:
        self._per_replica = per_replica
        super().__init__()


def test_the_class_of_a_group_can_be_replaced() -> None:
    options = Options()

    options.Distributed.__class__ = WithoutDisable

    with pytest.raises(RuntimeError, match="Cannot call"):
        options.Distributed.disable()


def test_a_clone_has_the_classes_and_the_state_of_users() -> None:
    options = WithState(2)
    options.Distributed.__class__ = WithoutDisable

    clone = options.clone()

    assert type(clone) is WithState
    assert type(clone.Distributed) is WithoutDisable
    assert clone._per_replica == 2


def test_the_text_of_options_has_the_name_of_their_class() -> None:
    assert repr(WithState(2).deviceIterations(2)) == "WithState(device_iterations=2)"
