"""The wrappers: what they accept, modern and old forms, names that integrations import."""

import copy
import tempfile

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapping import Having, Scaled, normal, options, saved, trains_alike
from poptorch import poptorch_core
from poptorch._impl import rewrapModelIfNecessary, unwrapModelIfNecessary
from poptorch._poplar_executor import PoplarExecutor

X, Y = normal(4, 3), torch.tensor([0, 1, 1, 0])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        return torch.log_softmax(self.layer(x), 1)


@pytest.fixture(autouse=True)
def _reference(monkeypatch) -> None:
    monkeypatch.setenv("POPTORCH_BACKEND", "reference")


@pytest.mark.spec("options", 1, 2, 3, 31)
@pytest.mark.spec("programs", 2)
def test_options_are_frozen_and_copied() -> None:
    opts = options(iterations=2)
    training = poptorch.trainingModel(Net(), opts)
    validation = poptorch.inferenceModel(Net(), opts)
    poptorch.DataLoader(opts, torch.utils.data.TensorDataset(X), batch_size=2)
    for change in (
        lambda: opts.deviceIterations(2),
        lambda: opts.Training.gradientAccumulation(2),
        lambda: opts._Popart.set("enableOutlining", True),
        lambda: training.options.deviceIterations(2),
    ):
        with pytest.raises(AttributeError, match="frozen"):
            change()
    assert opts.defaultOutputMode()
    for wrapper, mode in ((training, "Final"), (validation, "All")):
        values = wrapper.options.toDict()
        assert values["output_mode"] == poptorch.OutputMode[mode]
        assert values["device_iterations"] == 2
    opts.clone().deviceIterations(2)


@pytest.mark.spec("options", 24)
@pytest.mark.spec("programs", 11)
def test_settings_are_checked_at_compile() -> None:
    model, opts = Net(), options()
    opts._Popart.set("enableOutlinng", True)
    wrapper = poptorch.inferenceModel(model, opts)
    with pytest.raises(poptorch.Error, match=r"Unknown bool option: enableOutlinng"):
        wrapper(X)
    assert poptorch.inferenceModel(model, options())(X).shape == (4, 2)
    wrong = options(iterations=3).outputMode(poptorch.OutputMode.EveryN, 2)
    wrapper = poptorch.inferenceModel(model, wrong)
    with pytest.raises(poptorch.Error, match="must divide"):
        wrapper(X[:3])


@pytest.mark.spec("options", 34)
def test_the_forms_of_the_first_releases(caplog, capsys) -> None:
    model = Net()
    twin = copy.deepcopy(model)
    loss = nn.functional.nll_loss(twin(X), Y)
    loss.backward()
    old = {"device_iterations": 1, "gradient_accumulation": 1, "trace_model": True}
    training = poptorch.trainingModel(model, loss=nn.NLLLoss(), **old)
    assert caplog.text.count("deprecated") == 1
    out, got = training(X, Y)
    assert out.shape == (4, 2)
    torch.testing.assert_close(got, loss.detach())
    weight = twin.layer.weight - 0.01 * twin.layer.weight.grad
    torch.testing.assert_close(model.layer.weight, weight)
    assert set(model.state_dict()) == {"layer.weight", "layer.bias"}
    model = Having(lambda m, a, b: (a + b) * m.scale, scale=nn.Parameter(torch.ones(1)))
    training = poptorch.trainingModel(model, 1, loss=nn.MSELoss())
    x, y = torch.ones(2), torch.zeros(2)
    for args in ((x, x), [x, x]):
        training.destroy()
        assert training(args, y)[0].shape == (2,)
    assert poptorch.inferenceModel(Net(), 2, anchor_mode="FINAL")(X).shape == (2, 2)
    with pytest.raises(poptorch.Error, match="cannot be combined"):
        poptorch.trainingModel(Net(), poptorch.Options(), device_iterations=2)
    with pytest.raises(TypeError, match="Unexpected keyword argument"):
        poptorch.inferenceModel(Net(), batch_size=2)


def test_what_is_wrapped() -> None:
    assert torch.equal(poptorch.inferenceModel(torch.neg, options())(X), -X)
    with pytest.raises(TypeError, match=r"Expected a torch\.nn\.Module or a callable"):
        poptorch.inferenceModel(Net, options())
    with pytest.raises(poptorch.Error, match="Invalid type: 'options'"):
        poptorch.trainingModel(Net(), {"a": 1})

    class Sub(torch.Tensor):
        pass

    model = Net()
    model.register_buffer("strange", torch.ones(2).as_subclass(Sub))
    with pytest.raises(poptorch.Error, match="All buffers must be an instance of"):
        poptorch.trainingModel(model, options())


class Counted(nn.Parameter):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError("no operator of it is called")


@pytest.mark.parametrize("wrap", [poptorch.inferenceModel, poptorch.trainingModel])
def test_a_parameter_of_a_class_with_operators_of_its_own_is_refused_by_name(wrap) -> None:
    model = Having(lambda m, x: x * m.weight, weight=Counted(torch.ones(3)))
    with pytest.raises(poptorch.Error, match="'weight' is a Counted"):
        wrap(model, options())


@pytest.mark.spec("executor", 38)
def test_training_flags_of_which_the_outermost_stays_in_a_training_model(caplog) -> None:
    model = Having(lambda m, x: (x, m.training, m.sub.training), sub=nn.Dropout(0.5))
    wrapper = poptorch.inferenceModel(model, options())
    model.eval()  # meant for the executor's copy, too
    assert wrapper(X)[1:] == (False, False)
    model.train()  # meant for training
    assert wrapper(X)[1:] == (False, False)
    wrapper.train()
    assert wrapper(X)[1:] == (True, True)
    wrapper.model.eval()
    assert wrapper(X)[1:] == (False, False)

    def forward(model, x):
        out = model.sub(x)
        loss = (nn.functional.mse_loss(out, x),) if model.training else ()
        return (out, model.training, model.sub.training, *loss)

    model = Having(forward, sub=nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)))
    wrapper = poptorch.trainingModel(model, options(accumulation=2))
    inference = poptorch.inferenceModel(model, options())
    for training in (True, False, True, False):
        model.train(training)
        assert wrapper(X)[1:3] == (True, training)
        assert len(wrapper(X)) == 4
    model.eval()
    assert inference(X)[1:] == (False, False)
    assert caplog.text.count("in eval mode during training") == 1


def test_what_integrations_read() -> None:
    training = poptorch.trainingModel(Net(), options(), loss=nn.NLLLoss())
    assert isinstance(training, PoplarExecutor)
    assert not training._executable
    assert training._executable_inputs is None
    training(X, Y)
    assert training._executable
    x, y = training._executable_inputs.args
    assert x.shape == X.shape
    assert y.dtype == Y.dtype
    assert training._user_model is training.model
    assert training._options is training.options
    assert "log_softmax" in training._debugGetPopartIR()
    unwrapModelIfNecessary(training.model)
    assert type(training.model) is Net
    assert type(saved(training.model, weights_only=False)) is Net
    rewrapModelIfNecessary(training.model)
    assert type(training.model).__name__ == "PoptorchNet"
    training.destroy()
    assert not training._executable
    assert type(training.model) is Net


@pytest.mark.spec("ops", 31)
def test_errors_of_the_engine_module() -> None:
    assert poptorch_core.Error is poptorch.Error
    kinds = poptorch_core.TestErrorType
    for kind in kinds:
        with pytest.raises(poptorch.Error) as caught:
            poptorch_core._throwTestError(kind)
        error = caught.value
        assert error.type == kind.value
        assert error.message == f"This is a test of {kind.name}"
        assert error.location.startswith("[0] ")
    with pytest.raises(poptorch.RecoverableError) as caught:
        poptorch_core._throwTestError(kinds.PoplarRecoverableFullReset)
    assert caught.value.recovery_action == "FULL_RESET"
    with pytest.raises(poptorch.UnrecoverableError):
        poptorch_core._throwTestError(kinds.PoplarUnrecoverable)
    with pytest.raises(poptorch_core.Error) as caught:
        poptorch.inferenceModel(Net(), options())(torch.ones(2, 7), nonsense=1)
    assert isinstance(caught.value, poptorch.Error)
    assert caught.value.type == "poptorch_py_error"
    assert caught.value.location == ""
    assert "'nonsense' is not a valid parameter" in caught.value.message
    mine = poptorch.createPoptorchError("mine")
    assert mine.type == "poptorch_py_error"
    assert mine.message == "mine"
    assert mine.location == ""
    with pytest.raises(poptorch.Error, match="Unknown"):
        poptorch_core._validateOptions({"nonsense": True})


def test_long_messages_go_into_a_file(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    text = "\n".join(f"line {i}" for i in range(81))
    error = poptorch.Error("Long", got=text, where="train.py:3", fix=("shorten it", "or that"))
    title, first, *more, where, fix, other, see = error.message.splitlines()
    assert title == "Long"
    assert first.split() == ["Got:", "line", "0"]
    assert [line.strip() for line in more] == [*(f"line {i}" for i in range(1, 8)), "..."]
    assert [where.strip(), fix.strip()] == ["Where:  train.py:3", "Fix:    shorten it"]
    (log,) = tmp_path.iterdir()
    assert other.strip() == "Fix:    or that"
    assert see == f"See {log} for details"
    assert "line 80" in log.read_text()
    assert "line 79" in str(poptorch.Error("short", got="\n".join(text.splitlines()[1:80])))


def test_a_long_message_is_written_once_and_for_this_user_alone(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    text = "\n".join(f"number {i}" for i in range(99))
    for _ in range(3):
        poptorch.Error("Long", got=text, where="train.py:3")
    (log,) = tmp_path.iterdir()
    assert log.stat().st_mode & 0o777 == 0o600


def test_a_long_message_overwrites_nothing_in_the_working_directory(tmp_path, monkeypatch) -> None:
    mine, work = tmp_path / "mine", tmp_path / "work"
    mine.write_text("mine")
    work.mkdir()
    (work / "poptorch_error.log").symlink_to(mine)
    monkeypatch.chdir(work)
    poptorch.Error("Long", got="\n".join(f"row {i}" for i in range(99)), where="train.py:3")
    assert mine.read_text() == "mine"
    assert [path.name for path in work.iterdir()] == ["poptorch_error.log"]


def test_a_long_message_stays_whole_where_nothing_can_be_written(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    text = "\n".join(f"place {i}" for i in range(99))
    assert "place 50" in poptorch.Error("Long", got=text, where="train.py:3").message


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripted_code_is_captured_unless_it_has_weights_of_its_own() -> None:
    x = torch.tensor([1.0, -3.0])
    trains_alike(Scaled(torch.jit.script(nn.ReLU()), (2,)), x)
    for inner in (torch.jit.script(nn.Linear(2, 2)), torch.jit.trace(nn.Linear(2, 2), x)):
        for model in (inner, Scaled(inner)):
            for wrap in (poptorch.trainingModel, poptorch.inferenceModel):
                with pytest.raises(TypeError, match="TorchScript"):
                    wrap(model, options())


def test_functions_become_programs_under_the_names_of_experimental() -> None:
    net = Net()
    doubled = poptorch.experimental.IPUContext(lambda x: 2 * x, compiler=poptorch.Compiler.PopART)
    assert torch.equal(doubled(X), 2 * X)

    @poptorch.experimental.IPUContext(model=net, options=options())
    def shifted(x: torch.Tensor) -> torch.Tensor:
        return net(x) + 1

    torch.testing.assert_close(shifted(X), net(X) + 1)
    with pytest.raises(NotImplementedError, match="IPUContext"):
        poptorch.experimental.IPUScope([X])


RETURNING = {
    "to": lambda model: model.to("cpu"),
    "train": lambda model: model.train(),
    "eval": lambda model: model.eval(),
    "cpu": lambda model: model.cpu(),
    "float": lambda model: model.float(),
    "half": lambda model: model.half(),
    "double": lambda model: model.double(),
    "bfloat16": lambda model: model.bfloat16(),
    "type": lambda model: model.type(torch.float32),
    "requires_grad_": lambda model: model.requires_grad_(False),
    "apply": lambda model: model.apply(lambda layer: None),
    "to_empty": lambda model: model.to_empty(device="cpu"),
    "share_memory": lambda model: model.share_memory(),
    "a method of the user's": lambda model: model.freeze(),
    "several in one line": lambda model: model.to("cpu").float().train(),
}


class Freezing(Net):
    def freeze(self):
        self.layer.bias.requires_grad_(False)
        return self


@pytest.mark.parametrize("wrap", [poptorch.trainingModel, poptorch.inferenceModel])
@pytest.mark.parametrize("call", RETURNING.values(), ids=RETURNING)
def test_methods_that_return_the_module_return_the_executor(wrap, call) -> None:
    executor = wrap(Freezing(), options())
    assert call(executor) is executor


def test_methods_that_return_something_else_are_the_modules_own() -> None:
    model = Net()
    executor = poptorch.trainingModel(model, options())
    assert executor.get_submodule("layer") is model.layer
    assert executor.state_dict().keys() == model.state_dict().keys()
    assert executor.forward.__name__ == "forward"
