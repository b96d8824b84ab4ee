"""Find out what state an optimizer's own ``step`` keeps, and which of its numbers can be inputs.

The step runs on tensors without values, first with the state that it creates itself, and then with
placeholders for that state. The two runs show which values are kept, and whether the first step
differs from later ones. Numbers that decide what the step does become constants.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._base import log, private
from .._base.errors import Error
from .._ir import slots
from .._ir.slots import Kind, Slot
from .._ir.spec import OptimGroup, OptimSpec, Setting
from .._ir.state_views import StatePlace, Views
from .._ir.traced_step import (
    KeptValue,
    Leaf,
    TracedParam,
    TracedStep,
    flat,
    leaves_of,
    of_group,
    of_optimizer,
    structures,
    substituted,
)
from .._ops.dispatch import answering
from .absent_gradients import check_unchanged, check_unread
from .host_values import HostValues
from .likeness import Signatures, WholeReads
from .memory_reads import MemoryReads
from .python_functions import numbers_functions
from .repeated_operators import Repeats
from .step_value_reads import Restart, ValueNeeded
from .step_values import is_number, is_whole
from .torchs_steps import examples_of, with_all_weights, with_examples_only
from .traced_step_run import StepRun, StepTensors, several_elements
from .value_branches import COMMON, Choices, StepResults
from .value_origins import HYPER, NUMBER, WEIGHT, Identifier

_RAISES = (
    "The optimizer's step raises %s at %s if the values of tensors meet a condition. A compiled "
    "program does not raise exceptions: it continues as if the condition were not met. To notice "
    "such values, check the loss that the model returns."
)
Narrow = Callable[[torch.dtype], torch.dtype]


@dataclass
class _Findings:
    """What earlier runs have found out."""

    constants: set[str] = field(default_factory=set)  # hyper-parameters whose values are needed
    # what the step changes in groups and in the optimizer itself
    changing: set[StatePlace] = field(default_factory=set)
    single: set[StatePlace] = field(
        default_factory=set
    )  # numbers that differ between the weights of a group
    read: set[tuple[int, str]] = field(default_factory=set)  # entries of groups that the step reads


def discover(spec: OptimSpec, narrow: Narrow) -> OptimSpec:
    """Return an optimizer with the state that its step keeps, and the numbers that can be inputs.

    ``narrow``: returns the type of weights in the program for their type on the host.
    """
    assert spec.traced is not None
    spec = replace(spec, traced=_narrowed(spec.traced, narrow))
    examples = examples_of(spec)
    if len(set(examples.values())) < len(examples):
        discovery, found = _discovered(with_examples_only(spec, examples))
        if discovery.is_by_weight:
            return with_all_weights(found, spec, examples)
    return _discovered(spec)[1]


def _discovered(spec: OptimSpec) -> tuple[_Discovery, OptimSpec]:
    known = _Findings()
    while True:
        try:
            with _without_values() as mode, numbers_functions():
                discovery = _Discovery(spec, known, mode)
                return discovery, discovery.result()
        except ValueNeeded as needed:
            known.constants |= needed.keys
        except Restart:
            pass
        except Error:
            raise
        except Exception as error:
            # Some functions accept Python numbers only, and not what replaces them.
            numbers = _variable_numbers(spec, known)
            if not numbers:
                raise
            log.engine.debug("With numbers that may change the optimizer's step fails: %s", error)
            known.constants |= numbers


def _variable_numbers(spec: OptimSpec, known: _Findings) -> set[str]:
    """Return the keys of Python numbers that the step reads and that are no constants."""
    assert spec.traced is not None
    return {
        slots.traced_hyper(leaf.name, at, torch.float64).key
        for at, group in enumerate(spec.traced.groups)
        for leaf in leaves_of(group.values)
        if leaf.number and (at, leaf.name.partition(".")[0]) in known.read
    } - known.constants


@contextlib.contextmanager
def _without_values() -> Iterator[Any]:
    sizes = private.ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    mode = private.FakeTensorMode(allow_non_fake_inputs=True, shape_env=sizes, static_shapes=True)
    with mode, torch.no_grad():
        yield mode


class _WeightKind(NamedTuple):
    """What weights with the same update have in common, except for the names of tensors."""

    group: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kept: tuple[Leaf, ...]
    results: tuple[tuple[str, Identifier], ...]
    alone: bool  # whether no other weight is involved


class _Discovery:
    """The runs that find out what a step keeps."""

    def __init__(
        self,
        spec: OptimSpec,
        known: _Findings,
        without_values: Any,
    ) -> None:
        assert spec.traced is not None
        self.spec, self.traced, self.known = spec, spec.traced, known
        self.is_by_weight = False  # whether each weight is updated without the others
        self.choices = Choices()
        self.mode = self.choices.mode
        self.origins = self.mode.origins
        self.params = _trained(spec, self.traced)
        self._groups = {
            param.path: of_group(at)
            for at, group in enumerate(self.traced.groups)
            for param in group.params
            if param.path
        }
        self.initial: dict[StatePlace, complex] = {}
        self.leaves: dict[StatePlace, Leaf] = {}
        self.there: set[StatePlace] = set()  # state that exists before the first step
        self.layouts: dict[str, Any] = {}
        self.views: Views | None = None  # views of the state after the runs so far
        self.wholes = WholeReads(self.origins)
        self.mode.without_values = kind = private.optional("FakeTensor")
        self.mode.memory_reads = MemoryReads(self.params, self.mode.hosts, self.origins, kind)
        self.mode.memo = self.repeats = Repeats(without_values, self.wholes)

    def result(self) -> OptimSpec:
        with answering(self.wholes.answer), self.mode:
            before = HostValues.of_steps(self.traced)
            self._find_constants(before)
            try:
                first = self.choices.results(lambda: self._run(True))
                views, self.views = self.views or {}, None
                self.traced = replace(self.traced, layouts=self.layouts, views=views)
                later = self._later()
            except BaseException:
                before.restore()
                raise
            self._check_common(later)
            check_unread(self.origins, first)
            check_unread(self.origins, later)
            if first.keys() != later.keys():
                differing = sorted(first.keys() ^ later.keys())
                raise Error(
                    (
                        "The optimizer state has other entries after its second step than after "
                        "its first"
                    ),
                    got=", ".join(differing[:5]),
                    fix="create all entries of the state in the first step",
                )
            self._check_views()
            self._note_reached()
            same = self.origins.identifier
            alike = self.traced.views == self.traced.first_views or not self.there
            alike &= all(same(first[key]) == same(later[key]) for key in later)
            complete = all(place in self.initial for place in self.leaves)
            differs = not (alike and complete)
            kinds = self._kinds(first, later)
            self.is_by_weight = all(kind.alone for kind in kinds.values()) and not self.views
            examples = self._examples(kinds, first if differs else None, later)
        self._warn()
        self.traced = replace(self.traced, signatures=self._signatures(kinds), examples=examples)
        return self._spec(differs)

    def _later(self) -> dict[str, Tensor]:
        """Return the results of a later step. It may change nothing else: what only the first one
        changes, such as a note that a warning was given, decides nothing.
        """
        before = HostValues.of_steps(self.traced)
        results = self.choices.results(lambda: self._run(False))
        changed = before.restore()
        if changed:
            raise _changes_others(changed)
        return results

    def _warn(self) -> None:
        for line, name in self.choices.raised.items():
            log.python.warning(_RAISES, name, line)

    def _note_reached(self) -> None:
        """Weights that code reaches by themselves cannot be a part of a bundle."""
        reached = self.mode.reached
        self.wholes.add(path for path, param in self.params.items() if param.identity in reached)

    def _kinds(
        self, first: Mapping[str, Tensor], later: Mapping[str, Tensor]
    ) -> dict[str, _WeightKind]:
        """Return for each weight its kind. Weights of the same kind have the same update."""
        found: dict[str, list[tuple[str, Identifier]]] = {path: [] for path in self.params}
        for prefix, results in (("first ", first), ("later ", later)):
            for named, value in results.items():
                before, _, after = named.partition(":")
                path = after if before == "weight" else before
                if path in found:
                    name = "weight" if before == "weight" else f"*:{after}"
                    found[path].append((prefix + name, self.origins.identifier(value)))
        leaves: dict[str, list[Leaf]] = {path: [] for path in self.params}
        for (owner, _), leaf in self.leaves.items():
            if owner in leaves:
                leaves[owner].append(leaf)
        return {
            path: _WeightKind(
                self._group_of(path),
                self.params[path].shape,
                self.params[path].dtype,
                tuple(leaves[path]),
                tuple(sorted((name, each._replace(weight="")) for name, each in results)),
                all(each.weight in ("", path) for _, each in results),
            )
            for path, results in found.items()
        }

    def _examples(
        self,
        kinds: Mapping[str, _WeightKind],
        first: Mapping[str, Tensor] | None,
        later: Mapping[str, Tensor],
    ) -> dict[str, str]:
        """Return for each weight an example of its kind, if a step on the examples alone updates
        them in the same way.

        ``first``: the results of a first step that differs from later ones.
        """
        of_kind: dict[_WeightKind, str] = {}
        examples = {path: of_kind.setdefault(kind, path) for path, kind in kinds.items()}
        if not self.is_by_weight or len(of_kind) == len(examples):
            return {}
        found = all(
            whole is None or self._is_same_alone(whole, examples, whole is first)
            for whole in (first, later)
        )
        return examples if found else {}

    def _is_same_alone(
        self, whole: Mapping[str, Tensor], examples: Mapping[str, str], is_first: bool
    ) -> bool:
        """Return whether a step computes the same if there are only the examples."""
        same = self.origins.identifier
        try:
            results = self._alone(examples, is_first)
        except Exception as error:  # an error in the user's code, which may need all weights
            log.engine.debug("Without some weights the optimizer's step fails: %s", error)
            return False
        return all(key in whole and same(v) == same(whole[key]) for key, v in results.items())

    def _find_constants(self, before: HostValues) -> None:
        """Run a first step on one weight of each group, so that a number whose value is needed is
        found before all weights are prepared.

        Raises:
            ValueNeeded: such a number was found.
        """
        examples = {
            path: group.params[0]
            for group in self.spec.groups
            for path in group.params
            if path in self.params
        }
        if len(set(examples.values())) == len(examples):
            return
        try:
            self._alone(examples, is_first=True)
        except ValueNeeded:
            raise
        except Exception as error:
            log.engine.debug("With one weight of each group the optimizer's step fails: %s", error)
        finally:
            before.restore()

    def _alone(self, examples: Mapping[str, str], is_first: bool) -> dict[str, Tensor]:
        """Return the results of a step if there are only the examples. The findings stay as
        they are.
        """
        kept = self.known, self.leaves, self.layouts, self.initial, self.there, self.traced
        views = self.views
        self.known = replace(self.known, changing={*self.known.changing}, read={*self.known.read})
        self.leaves, self.layouts, self.initial = ({**each} for each in kept[1:4])
        self.there = {*self.there}
        self.traced = replace(self.traced, examples=examples).of_examples()
        few = {*examples.values()}
        try:
            with self.choices.trying():
                return self.choices.results(lambda: self._run(is_first, few))
        finally:
            self.known, self.leaves, self.layouts, self.initial, self.there, self.traced = kept
            self.views = views

    def _signatures(self, kinds: Mapping[str, _WeightKind]) -> dict[str, str]:
        """Return for each weight a text that is equal for weights that are updated in the
        same way.
        """
        texts: dict[_WeightKind, str | None] = {}
        for path, kind in kinds.items():
            if path not in self.wholes.paths and kind not in texts:
                texts[kind] = Signatures(self.origins, kind.shape).of(kind.results)
        found = {path: texts.get(kind) for path, kind in kinds.items()}
        return {p: text for p, text in found.items() if text and p not in self.wholes.paths}

    # One run.

    def _run(self, first: bool, only: Collection[str] | None = None) -> StepResults:
        """``only``: the weights that have gradients; None for all."""
        inputs = self._inputs(first, self.params if only is None else only)
        read = self.known.read
        run = StepRun(self.traced, inputs, first, self._note, lambda at, key: read.add((at, key)))
        run.step()
        check_unchanged(self.origins, run.absent)
        self._check_owned(run)
        if not first:
            _check_structures(run)
        self._note_views(run)
        results: StepResults = {
            path: {f"weight:{path}": weight} for path, weight in run.traced_params.items()
        }
        for path, entry in run.states():
            self._record_state(path, dict(entry), results)
        for owner, values in run.owned():
            mine = {
                name: value
                for name, value in flat(values).items()
                if (owner, name) in self.known.changing
            }
            for name, value in mine.items():
                self._leaf(owner, name, value)
                results.setdefault(COMMON, {})[f"{owner}:{name}"] = _as_tensor(value)
        return results

    def _record_state(self, path: str, entry: dict[Any, Any], results: StepResults) -> None:
        for name, value in flat(entry, every=True).items():
            _check_object(path, name, value)
        for name, value in flat(entry).items():
            self._leaf(path, name, value)
            results[path][f"{path}:{name}"] = _as_tensor(value)
        leaf = self.leaves
        layout = substituted(entry, "", lambda name, _: leaf[path, name])
        if self.layouts.setdefault(path, layout) != layout:
            differing = [k for k in layout if layout[k] != self.layouts[path].get(k)]
            raise Error(
                "The entries of the optimizer state, or their types, change between steps",
                got=f"state of '{path}': {', '.join(map(str, differing)) or 'its entries'}",
                fix=(
                    "store only tensors and numbers in the state, and let it have the same "
                    "entries after every step"
                ),
            )

    def _leaf(self, owner: str, name: str, value: Any) -> None:
        if isinstance(value, Tensor) and not is_number(value):
            leaf = Leaf(name, tuple(value.shape), value.dtype)
        else:
            leaf = Leaf(name, (), torch.float64, "int" if is_whole(value) else "float")
        before = self.leaves.setdefault((owner, name), leaf)
        if before != leaf and (before.number or leaf.number) and before.shape == leaf.shape:
            # first a number, then a tensor
            self.leaves[owner, name] = before if leaf.number else leaf

    def _note(self, path: str, name: str, value: Any) -> Any:
        """Record a value that a first step stores in the state of a weight. Return what the step
        reads there.
        """
        place = path, name
        if isinstance(value, Tensor):
            uniform, sources = self.origins.uniform(value), self.origins.sources(value)
            if uniform is None or any(role != HYPER for role, _ in sources):
                return value
            self.initial[place] = uniform
            return self._entered(value, place)
        self.initial[place] = float(value)
        self.leaves[place] = Leaf(name, (), torch.float64, type(value).__name__)
        number = self.leaves[place].number
        return self._entered(torch.empty((), dtype=torch.float64), place, number)

    def _entered(self, value: Tensor, place: StatePlace, number: str = "") -> Tensor:
        owner, name = place
        group = self._group_of(owner)
        if value.dim() == 0 and group and (group, name) not in self.known.single:
            label, source = f"{group}:{name}", (NUMBER, f"{group}:{name}")
        elif owner in self.params:
            label, source = name, (WEIGHT, owner)
        else:
            label, source = f"{owner}:{name}", (NUMBER, f"{owner}:{name}")
        if number:
            return self.origins.enter_number(value, label, source, number)
        return self.origins.enter(value, label, source)

    def _group_of(self, path: str) -> str:
        return self._groups.get(path, "")

    def _inputs(self, first: bool, trained: Collection[str]) -> StepTensors:
        inputs = StepTensors(origins=self.origins, hosts=self.mode.hosts)
        enter = self.origins.enter
        for path, param in self.params.items():
            if path in trained:
                weight = self.repeats.fresh(param.shape, param.dtype)
                gradient = self.repeats.fresh(param.shape, param.dtype)
                inputs.weights[path] = enter(weight, "weight", (WEIGHT, path))
                inputs.gradients[path] = enter(gradient, "gradient", (WEIGHT, path))
        for place, leaf in self._present(first):
            if place[0] in self.params and place[0] not in trained:
                continue
            value = self.repeats.fresh(leaf.shape, leaf.dtype)
            inputs.kept[place] = self._entered(value, place, leaf.number)
        for at, group in enumerate(self.traced.groups):
            for leaf in leaves_of(group.values):
                key = slots.traced_hyper(leaf.name, at, torch.float64).key
                place = of_group(at), leaf.name
                if key in self.known.constants or place in self.known.changing:
                    continue
                value = torch.empty(leaf.shape, dtype=leaf.dtype)
                source = HYPER, key
                if leaf.number:
                    value = self.origins.enter_number(value, key, source, leaf.number)
                elif value.numel() == 1:
                    value = enter(value, key, source)
                else:
                    continue
                self.origins.mark_uniform(value, self.traced.numbers[place])
                inputs.hypers[place] = value
        inputs.share_memory(self.traced.first_views if first else self.traced.views)
        return inputs

    def _present(self, first: bool) -> Iterator[tuple[StatePlace, Leaf]]:
        """Yield the state that exists before a step."""
        if not first:
            yield from self.leaves.items()
            return
        for optimizer in self.traced.optimizers:
            for path, state in optimizer.state.items():
                for leaf in leaves_of(state):
                    self.leaves.setdefault((path, leaf.name), leaf)
                    number = self.traced.numbers.get((path, leaf.name))
                    self.initial[path, leaf.name] = 0.0 if number is None else number
                    self.there.add((path, leaf.name))
                    yield (path, leaf.name), leaf
        for owner, name in self.known.changing:
            number = self.traced.numbers.get((owner, name))
            if number is not None:
                self.initial[owner, name] = number
                self.there.add((owner, name))
                leaf = self._given_leaf(owner, name)
                yield (owner, name), self.leaves.setdefault((owner, name), leaf)

    def _given_leaf(self, owner: str, name: str) -> Leaf:
        """Return the leaf of a value that the user's groups, or the optimizer itself, have."""
        held = {of_group(at): group.values for at, group in enumerate(self.traced.groups)}
        held |= {
            of_optimizer(at): each.attributes for at, each in enumerate(self.traced.optimizers)
        }
        value = flat(held[owner])[name]
        return value if isinstance(value, Leaf) else Leaf(name, (), torch.float64, "int")

    # Checks of the findings.

    def _note_views(self, run: StepRun) -> None:
        """Record which tensors share memory after the step. A step relies on what the one before
        has left.
        """
        found = run.views()
        if self.views not in (None, found):
            raise _other_memory(found, self.views or {})
        self.views = found

    def _check_views(self) -> None:
        if self.views != self.traced.views:
            raise _other_memory(self.views or {}, self.traced.views)
        sharing = {place[0] for place in self.traced.views}
        self.wholes.add(sharing | {view.root[0] for view in self.traced.views.values()})

    def _check_owned(self, run: StepRun) -> None:
        """Record what a step changes in groups and in the optimizer itself."""
        found: set[StatePlace] = set()
        for owner, values in run.owned():
            before, now = flat(run.given[owner]), flat(values)
            for name, value in now.items():
                place = owner, name
                if name not in before or not _is_same(before[name], value):
                    container, dot, _ = name.partition(".")
                    if dot and container not in run.given[owner]:
                        raise _adds_container(owner, container, values[container])
                    if dot and name not in before:
                        raise _adds_entry(owner, name, values[container])
                    found.add(place)
                elif place in run.before and self.origins.identifier(value) != run.before[place]:
                    if place in self.traced.shared:
                        raise _changes_shared(place, self.traced.shared[place])
                    found.add(place)  # it was changed in place
        if not found <= self.known.changing:
            self.known.changing |= found
            raise Restart

    def _check_common(self, later: Mapping[str, Tensor]) -> None:
        """Check that numbers that weights share are computed in the same way, and from no
        weight.
        """
        for at, group in enumerate(self.traced.groups):
            paths = [param.path for param in group.params if param.path in self.params]
            names = dict.fromkeys(n for p, n in self.leaves if p in paths)
            for name in names:
                # State with the shape of its weight may have no dimension, too.
                places = [
                    (p, name)
                    for p in paths
                    if (p, name) in self.leaves and not self.leaves[p, name].shape
                ]
                if not places:
                    continue
                if (of_group(at), name) in self.known.single:
                    continue
                values = [later[f"{path}:{name}"] for path, _ in places]
                alike = len({self.origins.identifier(value) for value in values}) == 1
                alike &= len({self.initial.get(place) for place in places}) == 1
                of_weights = any(
                    role == WEIGHT for value in values for role, _ in self.origins.sources(value)
                )
                if not alike or of_weights:
                    self.known.single.add((of_group(at), name))
                    raise Restart

    def _spec(self, differs: bool) -> OptimSpec:
        kept = []
        for (owner, name), leaf in self.leaves.items():
            initial = self.initial.get((owner, name))
            made = (owner, name) not in self.there
            kept.append(KeptValue(self._slot(owner, leaf), owner, leaf, initial, made))
        traced = replace(self.traced, kept=tuple(kept), differs_at_first=differs)
        groups = tuple(self._group_spec(at, group) for at, group in enumerate(self.spec.groups))
        return replace(self.spec, groups=groups, traced=traced)

    def _slot(self, owner: str, leaf: Leaf) -> Slot:
        if owner not in self.params:
            if math.prod(leaf.shape) != 1:
                raise several_elements(leaf)
            kind, _, index = owner.partition(".")
            name = leaf.name if kind == "group" else f"own.{leaf.name}"
            return slots.kept_number(name, int(index), leaf.dtype)
        group = self._group_of(owner)
        if leaf.shape == () and (group, leaf.name) not in self.known.single:
            return slots.kept_number(leaf.name, int(group.partition(".")[2]), leaf.dtype)
        return Slot(Kind.OPTSTATE, leaf.shape, leaf.dtype, leaf.name, owner)

    def _group_spec(self, at: int, group: OptimGroup) -> OptimGroup:
        owner, values = of_group(at), self.traced.groups[at].values
        read = {name: value for name, value in values.items() if (at, name) in self.known.read}
        settings: dict[str, Setting] = {}
        variables: list[str] = []
        for name, value in (flat(read, every=True) | structures(read)).items():
            key = slots.traced_hyper(name, at, torch.float64).key
            if (owner, name) in self.known.changing:
                continue
            if isinstance(value, Leaf) and key not in self.known.constants:
                variables.append(name)
            else:
                settings[name] = self.traced.constant((owner, name), value)
        return replace(group, settings=tuple(sorted(settings.items())), variables=tuple(variables))


def _is_same(before: Any, now: Any) -> bool:
    if isinstance(before, Tensor) or isinstance(now, Tensor):
        return before is now
    return type(before) is type(now) and (before == now or before is now)


def _check_object(path: str, name: str, value: Any) -> None:
    """Refuse an object with tensors, which would be those of the trace in each later step."""
    held = (
        [*value]
        if isinstance(value, set | frozenset)
        else [*getattr(value, "__dict__", {}).values()]
    )
    held += [getattr(value, each, None) for each in getattr(type(value), "__slots__", ())]
    if not isinstance(value, Tensor | type) and any(isinstance(each, Tensor) for each in held):
        raise Error(
            "The optimizer state contains an object that holds tensors",
            got=f"'{name}' of '{path}', a {type(value).__name__}",
            fix=(
                "store the tensors themselves: state['name'] = tensor",
                "or store them in a list, tuple, deque or dictionary",
            ),
        )


def _check_structures(run: StepRun) -> None:
    """Refuse a step that changes a list or dictionary which holds neither numbers nor tensors."""
    for owner, values in run.owned():
        before, now = run.structures[owner], structures(values)
        for name in before.keys() & now.keys():
            if before[name] != now[name]:
                raise _adds_entry(owner, name, values[name])


def _adds_container(owner: str, name: str, value: Any) -> Error:
    kind, _, index = owner.partition(".")
    where = f"parameter group {index}" if kind == "group" else "the optimizer"
    return Error(
        "The optimizer's step adds a list, tuple or dictionary to a group or to the optimizer",
        got=f"'{name}', a {type(value).__name__} that a step or a hook stores in {where}",
        fix=(
            f"create it before you wrap the model: group['{name}'] = ...",
            "or store each of its numbers under a separate name",
        ),
    )


def _adds_entry(owner: str, name: str, value: Any) -> Error:
    container = name.partition(".")[0]
    outside = "record values outside of the step, after each call of the wrapped model"
    known = f"create it before you wrap the model, with a number: {container}['key'] = 0.0"
    return Error(
        "The optimizer's step adds an entry to a list or dictionary",
        got=f"{_in_words((owner, name))}, a new entry of a {type(value).__name__}",
        fix=(known, f"or {outside}") if isinstance(value, dict) else outside,
    )


def _changes_others(changed: Sequence[str]) -> Error:
    return Error(
        "The optimizer's step changes values that are not part of the step",
        got=f"{', '.join(changed[:3])}; the compiled step runs no Python code",
        fix=(
            "keep the values in attributes of the optimizer itself, in optimizer.state or in "
            "optimizer.param_groups: self.count += 1",
            "or run this code after each call of the wrapped model",
        ),
    )


def _as_tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    return torch.full((), float(value), dtype=torch.float64)


def _narrowed(traced: TracedStep, narrow: Callable[[torch.dtype], torch.dtype]) -> TracedStep:
    groups = tuple(
        replace(group, params=tuple(replace(p, dtype=narrow(p.dtype)) for p in group.params))
        for group in traced.groups
    )
    return replace(traced, groups=groups)


def _trained(spec: OptimSpec, traced: TracedStep) -> dict[str, TracedParam]:
    known = {param.path: param for group in traced.groups for param in group.params if param.path}
    return {path: known[path] for group in spec.groups for path in group.params}


def _changes_shared(place: StatePlace, other: StatePlace) -> Error:
    return Error(
        "The optimizer's step changes a tensor that is in several groups or attributes",
        got=f"the tensor is {_in_words(place)}, and also {_in_words(other)}",
        fix="give each group and each attribute its own tensor, for example lr.clone()",
    )


def _other_memory(one: Views, other: Views) -> Error:
    places = sorted(place for place in {*one, *other} if one.get(place) != other.get(place))
    named = ", ".join(f"'{name}' of '{owner}'" for owner, name in places[:3])
    return Error(
        "Tensors of the optimizer state share memory after some steps only",
        got=f"state {named}",
        fix="copy a tensor that you store twice: state['b'] = state['a'].clone()",
    )


def _in_words(place: StatePlace) -> str:
    owner, name = place
    kind, _, number = owner.partition(".")
    whose = f"parameter group {number}" if kind == "group" else "the optimizer"
    return f"'{name}' of {whose}"
