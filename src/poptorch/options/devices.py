"""Options about devices and placement (PopTorch user guide, "Options")."""

from __future__ import annotations

from typing import Self

from .._base.errors import AssertionFailure, InvalidValue
from ..enums import ConnectionType, SyncPattern
from .check import expect, refuse
from .container import Container
from .strategies import _IExecutionStrategy

_PREFIX = "IPU"


class DeviceOptions(Container):
    """Which devices run the model, and how its blocks are spread over them."""

    auto_round_num_ipus: bool
    connection_type: int
    ipu_id: int
    ipu_version: int
    use_model: bool
    sync_pattern: int
    available_memory_proportion: dict[int, float]
    _execution_strategy: _IExecutionStrategy

    def backend(self, name: str) -> Self:
        """Choose the backend that runs the programs; beats the variable POPTORCH_BACKEND.

        Not a PopTorch option.

        Args:
            name: ``"auto"`` (the default): the environment's choice; without one the reference
                backend at once, and optimised code as soon as a run has lasted long enough to
                repay compiling it in the background. ``"optimise"``: optimised code from the
                first call on. ``"reference"``: operators one by one, always. Or another
                registered backend. Unknown names fail at compile.

        Raises:
            AssertionFailure: not a str (an ``AssertionError``).
        """
        return self.set(backend=name)

    def autoRoundNumIPUs(self, auto_round_num_ipus: bool = True) -> Self:
        """Permit a device count that is no power of two, by reserving more; default False."""
        return self.set(auto_round_num_ipus=auto_round_num_ipus)

    def setExecutionStrategy(self, strategy: _IExecutionStrategy) -> Self:
        """Choose how annotated blocks become stages; default ``PipelinedExecution()``.

        Raises:
            AssertionFailure: none of the four strategies (an ``AssertionError``).
        """
        self._check_writable("the execution strategy")
        expect("strategy", strategy, _IExecutionStrategy)
        self._execution_strategy = strategy
        return self

    def setAvailableMemoryProportion(self, available_memory_proportion: dict[str, float]) -> Self:
        """Set the budget of temporary memory per device; replaces an earlier dictionary.

        Args:
            available_memory_proportion: for instance ``{"IPU0": 0.5}``, indices of the model's own
                devices to a part of their memory.

        Raises:
            AssertionFailure: no dict, or a key that does not start with "IPU"
                (an ``AssertionError``).
            InvalidValue: the rest of a key is no integer (a ``ValueError``).
        """
        expect("available_memory_proportion", available_memory_proportion, dict)
        proportions = {
            _device_index(key): value for key, value in available_memory_proportion.items()
        }
        return self.createOrSet(available_memory_proportion=proportions)

    def useIpuModel(self, use_model: bool) -> Self:
        """Simulate the device, or not; beats POPTORCH_IPU_MODEL in both directions."""
        expect("use_model", use_model, int)
        return self.createOrSet(use_model=bool(use_model))

    def useIpuId(self, ipu_id: int) -> Self:
        """Attach to one device id, which must hold model devices x replicas exactly.

        Raises:
            AssertionFailure: not an int (an ``AssertionError``).
        """
        expect("ipu_id", ipu_id, int)
        return self.createOrSet(ipu_id=ipu_id)

    def connectionType(self, connection_type: ConnectionType) -> Self:
        """Choose when to acquire the device; default ``ConnectionType.Always``.

        Raises:
            AssertionFailure: no ``ConnectionType`` (an ``AssertionError``).
        """
        expect("connection_type", connection_type, ConnectionType)
        return self.set(connection_type=int(connection_type))

    def useOfflineIpuTarget(self, ipu_version: int = 2) -> Self:
        """Compile only, for a given generation: sets ``ConnectionType.Never``.

        Args:
            ipu_version: 1 (Mk1), 2 (Mk2) or 21 (Mk2 with FP8); checked at compile.
        """
        self.createOrSet(ipu_version=ipu_version)
        return self.connectionType(ConnectionType.Never)

    def syncPattern(self, sync_pattern: SyncPattern) -> Self:
        """Hint: how devices and the host synchronise; default ``SyncPattern.Full``.

        Raises:
            AssertionFailure: no ``SyncPattern`` (an ``AssertionError``).
        """
        expect("sync_pattern", sync_pattern, SyncPattern)
        return self.set(sync_pattern=int(sync_pattern))


def _device_index(key: str) -> int:
    if not isinstance(key, str) or not key.startswith(_PREFIX):
        refuse(
            AssertionFailure,
            "Keys of the available memory proportion must start with IPU",
            got=repr(key),
            fix='for instance setAvailableMemoryProportion({"IPU0": 0.5})',
        )
    try:
        return int(key.removeprefix(_PREFIX))
    except ValueError:
        refuse(InvalidValue, "The device index after IPU must be an integer", got=repr(key))
