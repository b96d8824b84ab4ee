"""The container protocol (spec/options.md section 2)."""

import copy
import pickle

import pytest

from poptorch.options import Options
from poptorch.options.container import Container


@pytest.fixture
def group():
    return Container(count=1, name="x", on=True)


def test_declared_values_are_read_as_attributes_and_by_call(group):
    assert (group.count, group.name, group("count")) == (1, "x", 1)
    assert group.exists("name")
    assert not group.exists("other")


def test_an_unknown_public_name_is_an_attribute_error(group):
    with pytest.raises(AttributeError, match="Invalid attribute"):
        group.other  # noqa: B018
    assert not hasattr(group, "other")


def test_a_misspelt_setter_is_corrected():
    with pytest.raises(AttributeError) as caught:
        Options().deviceIteration(4)
    assert "deviceIterations" in str(caught.value)
    assert {"replication_factor", "deviceIterations"} <= set(dir(Options()))


@pytest.mark.spec("options", 4)
def test_attribute_assignment_is_set(group):
    group.count = 4
    assert group.count == 4
    with pytest.raises(AssertionError, match="Unexpected type"):
        group.count = "4"
    with pytest.raises(AssertionError, match="Invalid option"):
        group.other = 4
    options = Options()
    options.replication_factor = 4
    assert "replication_factor=4" in repr(options)
    with pytest.raises(AssertionError, match="Unexpected type"):
        options.replication_factor = 4.0


def test_a_backend_key_is_no_attribute():
    popart = Options()._Popart
    with pytest.raises(AssertionError, match="Invalid option autoRecomputation"):
        popart.autoRecomputation = 2
    assert "autoRecomputation" not in popart.options


@pytest.mark.spec("options", 5)
@pytest.mark.parametrize("value", ["4", 4.0, None])
def test_values_keep_the_type_of_the_stored_one(value):
    options = Options()
    for setter in (
        options.deviceIterations,
        options.replicationFactor,
        options.Training.gradientAccumulation,
    ):
        with pytest.raises(AssertionError, match="Unexpected type"):
            setter(value)
    assert repr(options) == repr(Options())


def test_a_bool_is_an_int_and_does_not_narrow_the_type(group):
    group.count = True
    assert group.count == 1
    group.count = 7
    assert group.count == 7


def test_a_refused_value_stores_none_of_its_call(group):
    with pytest.raises(AssertionError):
        group.set(count=2, name=3)
    assert group.count == 1


def test_create_or_set_checks_the_type_of_later_changes(group):
    assert group.createOrSet(extra=1.5) is group
    with pytest.raises(AssertionError, match="Unexpected type"):
        group.createOrSet(extra="text")
    group.deleteIfExists("extra")
    group.deleteIfExists("extra")
    assert not group.exists("extra")


def test_update_merges_in_place_and_refuses_common_keys(group):
    other = {"before": 0}
    assert group.update(other) is other
    assert other == {"before": 0, "count": 1, "name": "x", "on": True}
    with pytest.raises(AssertionError):
        group.update({"count": 1})


def test_private_names_must_exist_after_construction(group):
    with pytest.raises(AttributeError):
        group._new = 1
    options = Options()
    options._relax_optimizer_checks = True
    assert options._relax_optimizer_checks
    with pytest.raises(AttributeError):
        options._new = 1


def test_frozen_writes_are_attribute_errors(group):
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


def test_deep_copies_are_unfrozen_and_pickles_stay_frozen():
    options = Options().deviceIterations(3)
    options._freeze()
    duplicate = copy.deepcopy(options)
    duplicate.Training.gradientAccumulation(2)
    duplicate._Popart.set("x", 1)
    assert duplicate.Training._popart is duplicate._Popart
    loaded = pickle.loads(pickle.dumps(options))
    assert repr(loaded) == repr(options)
    with pytest.raises(AttributeError, match="frozen"):
        loaded.Training.gradientAccumulation(2)


def test_equality_is_identity(group):
    assert group != Container(count=1, name="x", on=True)
    assert len({group, group}) == 1


def test_a_groups_class_can_be_replaced_in_place():
    options = Options()

    class Blocked(type(options.Distributed)):
        def disable(self):
            raise RuntimeError("Cannot call disable")

    options.Distributed.__class__ = Blocked
    with pytest.raises(RuntimeError, match="Cannot call"):
        options.Distributed.disable()
    assert type(options.clone().Distributed) is Blocked


def test_subclasses_may_assign_state_before_the_constructor():
    class Mine(Options):
        def __init__(self, per_replica):
            self._per_replica = per_replica
            super().__init__()

    mine = Mine(2)
    assert mine.clone()._per_replica == 2
    assert repr(mine).startswith("Mine(replication_factor=1, ")
