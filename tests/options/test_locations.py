"""Where tensors are kept: settings of a location, and locations in the frozen options."""

from collections.abc import Callable
from typing import Any

import pytest

import poptorch
from poptorch._ir.spec import Location, Locations
from poptorch.options import Options, TensorLocationSettings
from poptorch.options.freeze_options import freeze


@pytest.fixture
def settings() -> TensorLocationSettings:
    """Settings in which everything was set."""
    settings = TensorLocationSettings()
    settings.minElementsForOffChip(3).minElementsForReplicatedTensorSharding(4)
    settings.useOnChipStorage(False).useReplicatedTensorSharding()
    settings.useIOTilesToLoad().useIOTilesToStore(False)
    return settings


EVERYTHING = {
    "minElementsForOffChip": 3,
    "minElementsForReplicatedTensorSharding": 4,
    "onChip": 0,
    "useIOTilesToLoad": 1,
    "useIOTilesToStore": 0,
    "useReplicatedTensorSharding": 1,
}


def test_new_settings_are_empty() -> None:
    assert TensorLocationSettings().toDict() == {}


def test_settings_are_whole_numbers_by_the_names_of_the_backend(
    settings: TensorLocationSettings,
) -> None:
    assert settings.toDict() == EVERYTHING


@pytest.mark.spec("options", 22)
def test_locations_are_copied_when_they_are_set(settings: TensorLocationSettings) -> None:
    options = Options()
    options.TensorLocations.setWeightLocation(settings)

    settings.useOnChipStorage(None)

    assert options.TensorLocations.location_weight == EVERYTHING


def test_on_chip_storage_can_be_unset(settings: TensorLocationSettings) -> None:
    settings.useOnChipStorage(None)

    assert not settings.exists("onChip")


@pytest.mark.parametrize(
    "setter",
    [TensorLocationSettings.useIOTilesToLoad, TensorLocationSettings.minElementsForOffChip],
)
def test_settings_refuse_texts(setter: Callable[[TensorLocationSettings, Any], object]) -> None:
    with pytest.raises(AssertionError):
        setter(TensorLocationSettings(), "1")


@pytest.fixture
def phased() -> Options:
    """A serial phased execution whose weights are on the chip and whose optimizer is sharded."""
    options = Options().setExecutionStrategy(poptorch.SerialPhasedExecution("A"))
    sharded = TensorLocationSettings().useReplicatedTensorSharding().minElementsForOffChip(5)
    options.TensorLocations.setOptimizerLocation(sharded)
    options.TensorLocations.setWeightLocation(TensorLocationSettings().useOnChipStorage())
    return options


def locations(options: Options) -> Locations:
    return freeze(options, training=True).locations


def test_weights_are_on_the_chip_by_default() -> None:
    assert locations(Options()).weight == Location(on_chip=True)


def test_everything_is_off_the_chip_by_default_with_phases(phased: Options) -> None:
    assert locations(phased).activation == Location(on_chip=False)
    assert locations(phased).accumulator == Location(on_chip=False)


def test_with_phases_a_setting_has_precedence_over_the_default(phased: Options) -> None:
    assert locations(phased).weight == Location(on_chip=True)


def test_one_replica_shards_nothing(phased: Options) -> None:
    assert locations(phased).optimizer == Location(on_chip=False, min_off_chip=5)


def test_several_replicas_shard_the_tensors_that_were_set(phased: Options) -> None:
    assert locations(phased.replicationFactor(2)).optimizer.sharded
