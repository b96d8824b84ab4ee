"""Every option: its row, default and effect, and what it does with wrong values."""

import copy
import dataclasses
import enum
import functools
import inspect
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import poptorch
from helpers.source_tree import PACKAGE
from poptorch import ShardedExecution
from poptorch._ir.spec import Spec
from poptorch.autocasting import Policy
from poptorch.enums import CommGroupType, HalfFloatCastingBehavior, OutputMode
from poptorch.options import Options, TensorLocationSettings, overview
from poptorch.options.files import apply_calls, as_calls
from poptorch.options.freeze_options import freeze, prepare
from poptorch.options.option_table import IDLE, UNSET, OptionSetting
from poptorch.options.popart import KEYS

OFF_CHIP = TensorLocationSettings().useOnChipStorage(False)
LOCATED = ("Activation", "Weight", "Optimizer", "Accumulator")
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "anchorTensor": ("short", "long"),
    "backend": ("reference",),
    "checkAgainstEager": ("off",),
    "disableModuleNamescope": (),
    "enableExecutableCaching": ("folder",),
    "enableProfiling": ("reports",),
    "inputReplicaGrouping": (2, CommGroupType.Consecutive),
    "outputMode": (OutputMode.Sum,),
    "setAvailableMemoryProportion": ({"IPU0": 0.1},),
    "setExecutionStrategy": (ShardedExecution(),),
    "sourceLocationExcludes": (["mine"],),
    "updatableNamedBuffers": (["buffer"],),
    "useIpuModel": (True,),
    "useOfflineIpuTarget": (21,),
    "Distributed.configureProcessId": (1, 2),
    "Precision.autocastPolicy": (Policy([torch.mm], [], [], []),),
    "Precision.halfFloatCasting": (HalfFloatCastingBehavior.HalfUpcastToFloat,),
    "Precision.setPartialsType": (torch.half,),
    "TensorLocations.numIOTiles": (64,),
    **{f"TensorLocations.set{kind}Location": (OFF_CHIP,) for kind in LOCATED},
}
"""Arguments of setters for which the type of the default does not say enough."""

READ_BY_THE_EXECUTOR = ("relaxOptimizerAttributesChecks",)
"""Options that are not in the Spec: ``optim/test_classes.py`` shows their effect."""

OUTSIDE_THE_KEY = (
    "checkAgainstEager",
    "connectionType",
    "enableExecutableCaching",
    "enableProfiling",
    "logCycleCount",
    "maxRepeatLogs",
    "modelName",
    "programs",
    "randomSeed",
    "setAvailableMemoryProportion",
    "showCompilationProgressBar",
    "sourceLocationExcludes",
    "useIpuId",
    "Distributed.broadcastWeights",
    "Distributed.processTimeout",
    "Precision.setPartialsType",
)
"""Options besides hints that may change without another compilation."""

OF_THIS_MACHINE = (
    "enableExecutableCaching",
    "enableProfiling",
    "logDir",
    "sourceLocationExcludes",
    "Distributed.configureProcessId",
    "Distributed.processTimeout",
    "Distributed.stageProcesses",
    '_Popart.set("engineOptions")',
)
"""Options of this machine or process, which are not saved with a model."""

TAKES_ANYTHING = ("disableModuleNamescope", "Precision.halfFloatCasting")
"""The first takes no arguments; the second takes whatever older scripts give."""

TAKES_TEXTS = (
    "anchorTensor",
    "backend",
    "checkAgainstEager",
    "enableExecutableCaching",
    "enableProfiling",
    "logDir",
    "modelName",
)
TAKES_NONE = ("enableExecutableCaching", "enableProfiling", "maxRepeatLogs")

ALL = overview.settings(Options())
SETTERS = [setting for setting in ALL if not setting.option.startswith("_Popart")]


def each(settings: list[OptionSetting]) -> pytest.MarkDecorator:
    """A test of every one of these settings."""
    return pytest.mark.parametrize("setting", settings, ids=lambda setting: setting.option)


def start(setting: OptionSetting) -> Options:
    """Options in which this one can be set."""
    options = Options().replicationFactor(2)
    if setting.option == "Distributed.stageProcesses":  # a divisor of the number of processes
        options.Distributed.configureProcessId(0, 6)
    return options


def example(setting: OptionSetting) -> tuple[Any, ...]:
    """Arguments of a setter that change the option."""
    if setting.option in ARGUMENTS:
        return ARGUMENTS[setting.option]
    value = setting.row.values[0]
    if isinstance(value.kind, type) and issubclass(value.kind, enum.Enum):
        return (list(value.kind)[1],)
    default = value.default
    if isinstance(default, enum.Enum):
        return (next(member for member in type(default) if member != default),)
    if default is UNSET:
        return ({str: "text", int: 3}.get(value.kind, True),)
    if isinstance(default, bool):
        return (not default,)
    if isinstance(default, str):
        return (default + "x",)
    return (default + 2,)


def setter(options: Options, setting: OptionSetting) -> Callable[..., Any]:
    """The method of these options that sets this one."""
    target: Any = options
    for name in setting.option.split("."):
        target = getattr(target, name)
    return target


def change(options: Options, setting: OptionSetting) -> Any:
    """Set an option to something other than its default; return what the setter returns."""
    if not setting.option.startswith("_Popart"):
        return setter(options, setting)(*example(setting))
    key = setting.row.values[0].name
    values = {
        "bool": setting.row.values[0].default is not True,
        "int": 0,
        "float": 1.5,
        "string": "text",
        "list": ["0"],
        "dictionary": {"key": "value"},
    }
    (value,) = (value for kind, value in values.items() if key in KEYS[kind])
    return options._Popart.set(key, value)


def shown(options: Options) -> str:
    """All values of options as a text."""
    return overview.describe(options, every=True)


@functools.cache
def changed(option: str) -> Options:
    """Options in which only this one differs from its default; not to be changed by a test."""
    (setting,) = (each for each in ALL if each.option == option)
    options = start(setting)
    change(options, setting)
    return options


@functools.cache
def specs(option: str) -> tuple[Spec, Spec]:
    """The Spec without and with a change of this option."""
    (setting,) = (each for each in ALL if each.option == option)
    return freeze(start(setting), training=True), freeze(changed(option), training=True)


# What a change does.


@pytest.mark.spec("programs", 1)
@each([setting for setting in ALL if setting.option != "anchorTensor"])
def test_a_setter_returns_the_object_it_belongs_to(setting: OptionSetting) -> None:
    """``anchorTensor`` returns nothing, as in PopTorch."""
    options = start(setting)
    group, dot, _ = setting.option.partition(".")

    returned = change(options, setting)

    assert returned is (getattr(options, group) if dot else options)


@each(ALL)
def test_an_option_that_was_set_is_listed_as_changed(setting: OptionSetting) -> None:
    settings = overview.settings(changed(setting.option))

    assert setting.option in {each.option for each in settings if each.changed}


@pytest.fixture
def nothing_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reset the list of reported options, as in a new process."""
    monkeypatch.setattr(overview, "_reported", set())


@pytest.fixture
def lines_of_two_wrappers(
    nothing_reported: None, caplog: pytest.LogCaptureFixture
) -> Callable[[Options], list[str]]:
    """Lines about options without effect, when options are given to a wrapper twice."""

    def prepared_twice(options: Options) -> list[str]:
        with caplog.at_level("INFO", logger="poptorch::python"):
            prepare(options.clone(), training=True)
            prepare(options.clone(), training=True)
        return [text for text in caplog.messages if "no effect here" in text]

    return prepared_twice


@each([setting for setting in ALL if setting.row.effect in IDLE])
def test_an_option_without_effect_is_named_once(
    setting: OptionSetting, lines_of_two_wrappers: Callable[[Options], list[str]]
) -> None:
    options = changed(setting.option)

    (line,) = lines_of_two_wrappers(options)

    assert line.startswith(f"{setting.option} has no effect here. ")
    assert options.withoutEffect() == [setting.option]


@each([setting for setting in ALL if setting.row.effect not in IDLE])
def test_an_option_with_an_effect_is_not_named(
    setting: OptionSetting, lines_of_two_wrappers: Callable[[Options], list[str]]
) -> None:
    options = changed(setting.option)

    assert lines_of_two_wrappers(options) == []
    assert options.withoutEffect() == []


@each([setting for setting in ALL if setting.row.effect not in IDLE])
def test_an_option_with_an_effect_is_in_the_spec_unless_the_executor_reads_it(
    setting: OptionSetting,
) -> None:
    before, after = specs(setting.option)

    assert (before != after) is (setting.option not in READ_BY_THE_EXECUTOR)


@each(ALL)
def test_only_options_that_change_programs_are_in_the_key_of_the_cache(
    setting: OptionSetting,
) -> None:
    before, after = specs(setting.option)
    changes_no_program = (
        setting.row.effect in IDLE
        or setting.option in READ_BY_THE_EXECUTOR
        or setting.option in OUTSIDE_THE_KEY
    )

    assert (before.for_cache() == after.for_cache()) is changes_no_program


@each(ALL)
def test_a_spec_has_the_same_hash_in_another_process(setting: OptionSetting) -> None:
    _, spec = specs(setting.option)

    assert hash(spec) == hash(pickle.loads(pickle.dumps(spec)))


@each(ALL)
def test_the_text_of_a_spec_has_no_address_of_memory(setting: OptionSetting) -> None:
    _, spec = specs(setting.option)

    assert " at 0x" not in repr(spec)


# Copies, saved and frozen options.


@pytest.mark.spec("options", 26)
@each(ALL)
def test_a_change_of_a_clone_does_not_change_the_original(setting: OptionSetting) -> None:
    original = start(setting)
    before = shown(original)

    change(original.clone(), setting)

    assert shown(original) == before


@pytest.mark.spec("options", 38)
@each(ALL)
def test_copies_and_pickles_have_every_value(setting: OptionSetting) -> None:
    options = changed(setting.option)

    copied = copy.copy(options)
    unpickled = pickle.loads(pickle.dumps(options))

    assert shown(copied) == shown(options)
    assert shown(unpickled) == shown(options)


@each(ALL)
def test_every_value_is_saved_with_a_model_but_those_of_this_machine(
    setting: OptionSetting,
) -> None:
    options = changed(setting.option)
    saved = Options()

    apply_calls(saved, as_calls(options))

    assert (shown(saved) == shown(options)) is (setting.option not in OF_THIS_MACHINE)


@pytest.mark.spec("options", 1)
@each(ALL)
def test_a_clone_of_frozen_options_can_be_changed(setting: OptionSetting) -> None:
    frozen = start(setting)
    frozen._freeze()
    clone = frozen.clone()

    change(clone, setting)

    assert shown(clone) == shown(changed(setting.option))


@pytest.mark.spec("options", 1)
@each(ALL)
@pytest.mark.parametrize("is_pickled", [False, True], ids=["frozen", "frozen and pickled"])
def test_frozen_options_refuse_changes_and_draw_nothing(
    setting: OptionSetting, is_pickled: bool
) -> None:
    frozen = changed(setting.option).clone()
    frozen._freeze()
    if is_pickled:
        frozen = pickle.loads(pickle.dumps(frozen))
    text = shown(frozen)
    state = torch.get_rng_state()

    with pytest.raises(AttributeError, match="Can't modify frozen Options"):
        change(frozen, setting)

    assert shown(frozen) == text
    assert torch.equal(torch.get_rng_state(), state)


# Wrong values.


def refused_values(setting: OptionSetting) -> list[Any]:
    """Values that are wrong for this option."""
    wrong = [torch.ones(2), 4.5, object()]
    if setting.option not in TAKES_TEXTS:
        wrong.append("no")
    if setting.option not in TAKES_NONE:
        wrong.append(None)
    return wrong


@pytest.mark.spec("options", 5)
@each([setting for setting in SETTERS if setting.option not in TAKES_ANYTHING])
def test_wrong_values_are_refused_at_once_and_nothing_is_stored(setting: OptionSetting) -> None:
    options = start(setting)
    text = shown(options)

    for wrong in refused_values(setting):
        with pytest.raises((AssertionError, ValueError)):
            setter(options, setting)(wrong, *example(setting)[1:])
        assert shown(options) == text, f"{wrong} was stored"


# Defaults.


def test_the_defaults_are_those_of_the_spec() -> None:
    assert freeze(Options(), training=True).for_cache() == Spec(training=True)


def test_scripts_can_read_the_defaults() -> None:
    defaults = {
        "anchored_tensors": {},
        "auto_round_num_ipus": False,
        "available_memory_proportion": {},
        "broadcast_buffers": True,
        "connection_type": 0,
        "device_iterations": 1,
        "input_cgt": CommGroupType.Consecutive,
        "input_group_size": 1,
        "log_dir": ".",
        "max_repeat_logs": 4,
        "output_mode": 4,
        "output_return_period": 1,
        "replication_factor": 1,
        "sync_pattern": 0,
    }
    options = Options()

    assert {name: options(name) for name in defaults} == defaults


def test_scripts_can_read_private_defaults() -> None:
    options = Options()

    assert type(options._execution_strategy) is poptorch.PipelinedExecution
    assert options._popart is options._Popart
    assert options._relax_optimizer_checks is False
    assert options._show_compilation_progress_bar is True
    assert options._module_namescope_enabled is True
    assert len(options._source_location_excludes) == 3


# Lines about options without effect.


@pytest.mark.usefixtures("nothing_reported")
def test_an_option_without_its_effect_causes_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    prepare(Options().logDir("here"), training=True)

    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.usefixtures("nothing_reported")
def test_a_hint_without_effect_causes_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    prepare(Options().enableStableNorm(True), training=True)

    assert caplog.messages == []


@pytest.mark.usefixtures("nothing_reported")
def test_engine_options_of_the_environment_without_effect_are_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = '{"autoReport.all": "true", "debug.instrument": "true"}'
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", text)

    prepare(Options(), training=True)

    assert caplog.messages == [
        "POPLAR_ENGINE_OPTIONS: these settings have no effect here: debug.instrument"
    ]


def test_options_without_effect_are_listed_in_the_order_of_their_names() -> None:
    options = Options().enableStableNorm(True)
    options.Training.setConvolutionDithering(True)
    options._Popart.set("outlineThreshold", 10.0)

    assert options.withoutEffect() == [
        "Training.setConvolutionDithering",
        '_Popart.set("outlineThreshold")',
        "enableStableNorm",
    ]


def test_an_option_that_was_set_back_is_not_listed() -> None:
    options = Options()
    options.Training.setConvolutionDithering(True)

    options.Training.setConvolutionDithering(False)
    options._Popart.set("convolutionOptions", {})

    assert options.withoutEffect() == []


def test_an_option_of_the_environment_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", '{"syncPattern": "SyncPattern.SinglePipeline"}')

    assert Options().withoutEffect() == ["syncPattern"]


# Options whose effect is small enough to be shown here.


@pytest.mark.parametrize("excluded", [False, True])
def test_excluded_files_are_not_the_users(
    excluded: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning about a branch names the user's line, which is not in an excluded file."""
    helper = tmp_path / "helper_of_mine.py"
    helper.write_text("def branch(x):\n    return x if x.sum() > 0 else -x\n")
    names: dict[str, Any] = {}
    exec(compile(helper.read_text(), str(helper), "exec"), names)
    options = Options().showCompilationProgressBar(False)
    if excluded:
        options.appendToLocationExcludes("helper_of")

    poptorch.inferenceModel(lambda x: names["branch"](x), options)(torch.ones(2))

    line = next(text for text in caplog.messages if ".py:" in text)
    assert ("helper_of_mine.py:2" in line) is not excluded
    assert ("test_settings.py" in line) is excluded


def first_line_of_plan(options: Options) -> str:
    wrapper = poptorch.inferenceModel(lambda x: x + 1, options.backend("reference"))
    wrapper.compile(torch.ones(1))
    return str(wrapper.plan()).splitlines()[0]


def test_a_named_model_has_its_name_in_its_plan() -> None:
    assert first_line_of_plan(Options().modelName("adder")) == "model adder"


def test_a_plan_names_no_model_without_a_name() -> None:
    assert "model" not in first_line_of_plan(Options())


# Rows and fields.

NO_SETTERS = {
    "appendToLocationExcludes",
    "clone",
    "createOrSet",
    "defaultOutputMode",
    "deleteIfExists",
    "enablePipelining",
    "exists",
    "from_json",
    "loadFromFile",
    "profile",
    "set",
    "toDict",
    "update",
    "withoutEffect",
    "Precision.runningStatisticsAlwaysFloat",
    "Precision.runningVarianceAlwaysFloat",
}
"""Public methods that set other options, or none."""


def fields(part: Any = None, path: str = "") -> set[str]:
    """Paths of the fields of the Spec, or of a part of it, and of its parts."""
    part = part or Spec(training=True)
    found: set[str] = set()
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        name = f"{path}{field.name}"
        found |= fields(value, f"{name}.") if dataclasses.is_dataclass(value) else {name}
    return found


def named_by_rows() -> set[str]:
    """Paths of fields, or of parts of the Spec, that rows of options name."""
    values = [value for setting in ALL for value in setting.row.values]
    return {path for value in values for path in (value.field, value.decides) if path}


def test_every_field_of_the_spec_has_a_row() -> None:
    from_elsewhere = {
        "training",  # from the wrapper
        "target.tiles",  # a variable says how few the small model has
        "target.part",  # from the index of the process
        "target.link",  # from the job: what joins its machines
    }

    covered = {
        path for name in named_by_rows() for path in fields() if f"{path}.".startswith(f"{name}.")
    }

    assert covered | from_elsewhere == fields()


def test_rows_name_fields_or_parts_of_the_spec() -> None:
    parts = {path.rpartition(".")[0] for path in fields()}

    assert named_by_rows() - fields() <= parts


def test_every_field_of_the_spec_has_a_reader() -> None:
    """Only the name is searched; tests of each part show that the field is read."""
    paths = [p for p in PACKAGE.rglob("*.py") if "options" not in p.relative_to(PACKAGE).parts]
    source = "\n".join(path.read_text() for path in paths)
    read_as_attributes = set(re.findall(r"\.(\w+)\b(?!\s*=[^=])", source))

    names = {path.rpartition(".")[2] for path in fields()}

    assert names <= read_as_attributes, "give it a reader or remove it"


def test_no_option_has_two_rows() -> None:
    options = [setting.option for setting in ALL]

    assert sorted(options) == sorted(set(options))


@pytest.mark.parametrize("group", ["", "Training", "Precision"])
def test_every_setter_has_a_row(group: str) -> None:
    owner = type(getattr(Options(), group)) if group else Options
    members = dict(inspect.getmembers(Options)) if not group else vars(owner)
    public = {
        f"{group}.{name}".removeprefix(".")
        for name, member in members.items()
        if inspect.isfunction(member) and not name.startswith("_")
    }

    with_a_row = {each.option for each in ALL if each.option.rpartition(".")[0] == group}

    assert public - NO_SETTERS == with_a_row
