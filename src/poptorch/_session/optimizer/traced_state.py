"""Read and write the state of optimizers whose own ``step`` is traced, under their own names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..._ir.state_views import StatePlace
from ..._ir.traced_step import KeptValue, Leaf, flat, of_group, of_optimizer, substituted
from ..._residency import unwatched
from ...optim.names import STEPPED
from .torch_state import TorchState


class TracedState(TorchState):
    """Reads and writes ``optimizer.state``, and values that the step changes in groups and
    attributes.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__(optimizers, {}, False)

    @property
    def writes_numbers(self) -> bool:
        """Return whether the step changes groups or the optimizer itself."""
        owners = dict(self._owned())
        return any(kept.owner in owners for kept in self._kept())

    def _kept(self) -> Sequence[KeptValue]:
        spec = None if self._link is None else self._link.spec
        return () if spec is None or spec.traced is None else spec.traced.kept or ()

    def _read_from(self, link: Any) -> None:
        on_device, _ = link.read_state()
        self._updates = 0
        layouts, views = link.spec.traced.layouts, link.spec.traced.views
        made: dict[StatePlace, torch.Tensor] = {}

        def tensor(place: StatePlace) -> torch.Tensor:
            """Return a tensor of the state, which shares memory as it would in eager PyTorch."""
            view = views.get(place)
            if place not in made:
                owner, name = place
                known = on_device[f"{name}___{owner}"]
                of_state = view is not None and f"{view.root[1]}___{view.root[0]}" in on_device
                made[place] = view.of(tensor(view.root)) if view and of_state else known
            return made[place]

        for number, parameter, path in self._parameters():
            if path not in layouts or not _holds(layouts[path], path, on_device):
                continue

            def value(name: str, leaf: Any, path: str = path) -> Any:
                return _of_host(leaf, tensor((path, name)))

            entry = substituted(layouts[path], "", value)
            dict.setdefault(self._watched[number], parameter, {}).update(entry)
        self._write_owned(on_device)
        self._remember()

    def _write_owned(self, on_device: dict[str, torch.Tensor]) -> None:
        places = dict(self._owned())
        for kept in self._kept():
            target = places.get(kept.owner)
            if target is not None:
                value = on_device[f"{kept.leaf.name}___{kept.owner}"]
                _assign(target, kept.leaf.name, _of_host(kept.leaf, value))

    def _owned(self) -> Iterator[tuple[str, dict[str, Any]]]:
        groups = [group for each in self._optimizers for group in each.param_groups]
        yield from ((of_group(at), group) for at, group in enumerate(groups))
        yield from ((of_optimizer(at), vars(each)) for at, each in enumerate(self._optimizers))

    def get_state_dict(self) -> dict[str, Any]:
        """Return the state under the names of ``ipu_state``; initial values if there is no
        state.
        """
        if self.was_loaded:
            self._synchronise()
        known: dict[str, Any] = {}
        for number, parameter, path in self._parameters():
            entry = dict.get(self._optimizers[number].state, parameter) or {}
            known |= {f"{name}___{path}": each for name, each in flat(dict(entry)).items()}
        for owner, values in self._owned():
            known |= {f"{name}___{owner}": each for name, each in flat(dict(values)).items()}
        made = [f"{kept.leaf.name}___{kept.owner}" for kept in self._kept() if kept.made]
        stepped = not known.keys().isdisjoint(made)
        state: dict[str, torch.Tensor] = {STEPPED: torch.tensor(float(stepped))}
        for kept in self._kept():
            name = f"{kept.leaf.name}___{kept.owner}"
            value = known.get(name)
            if value is None:
                value = unwatched(_first_value, kept)
            state[name] = torch.as_tensor(value)
        rest = {} if self._link is None else self._link.read_state()[0]
        return {"ipu_state": {**rest, **state}, "ipu_param": {}}


def _first_value(kept: KeptValue) -> torch.Tensor:
    return torch.full(kept.leaf.shape, kept.initial or 0.0, dtype=kept.leaf.dtype)


def _holds(layout: Any, path: str, on_device: dict[str, torch.Tensor]) -> bool:
    return all(f"{name}___{path}" in on_device for name in flat(layout))


def _of_host(leaf: Leaf, value: torch.Tensor) -> Any:
    """Return a value from the device in the form in which the optimizer stores it."""
    if not leaf.number:
        return value
    number = float(value)
    return int(number) if leaf.number == "int" and number.is_integer() else number


def _assign(target: dict[str, Any], name: str, value: Any) -> None:
    _with_value(target, name.split("."), value)


def _with_value(container: Any, path: Sequence[str], value: Any) -> Any:
    """Change one entry of nested containers. Return the container, or a new one of a tuple."""
    first, *rest = path
    at: Any = int(first) if isinstance(container, list | tuple) else first
    before = container.get(at) if isinstance(container, dict) else container[at]
    if rest:
        value = _with_value(before, rest, value)
    elif isinstance(before, torch.Tensor) and isinstance(value, torch.Tensor):
        before.copy_(value.reshape(before.shape))  # the user may refer to the tensor
        value = before
    if isinstance(container, tuple):
        items = [*container[:at], value, *container[at + 1 :]]
        is_named = hasattr(container, "_fields")
        return type(container)(*items) if is_named else type(container)(items)
    container[at] = value
    return container
