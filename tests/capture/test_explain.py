"""One scan lists all that cannot be captured, with lines; what is decided once, at compilation."""

import contextlib
import inspect
import io
import linecache
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.fx import graph_module

import poptorch
from helpers.wrapping import Calling, Having, Scaled, graph_of, infer, normal, options, training
from poptorch._capture.explain import Explanation


def explained(model: Callable[..., Any] | Having, *args: Any) -> list[Any]:
    model = model if isinstance(model, nn.Module) else Calling(model)
    return poptorch.inferenceModel(model, options()).explain(*args)


def comments(findings: Any) -> list[str]:
    return [finding.line.rpartition("# ")[2] for finding in findings]


def counted(x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()  # first


def with_seven_constructs(model: Having, x: torch.Tensor) -> torch.Tensor:
    x = counted(model.layer(x).abs())
    model.seen.add_(1)
    picked = x[x > 0]  # second
    if picked.sum() > 0:  # third
        print(x)  # fourth
        scale = float(x.max())  # fifth
    else:
        scale = x.min().item()  # sixth
    return torch.nonzero(x) * scale  # seventh


def model_with_seven_constructs() -> Having:
    return Having(with_seven_constructs, layer=nn.Linear(3, 3), seen=torch.zeros(()))


@pytest.fixture(scope="module")
def findings() -> Explanation:
    """Return the findings for a model with seven constructs, without printing them."""
    with contextlib.redirect_stdout(io.StringIO()):
        found = explained(model_with_seven_constructs(), torch.ones(2, 3))
    assert isinstance(found, Explanation)
    return found


def test_constructs_that_prevent_compiling_are_listed(findings: Explanation) -> None:
    assert comments(findings.fatal) == ["first", "fifth", "second", "seventh"]


def test_constructs_that_are_decided_once_are_listed_and_prevent_nothing(
    findings: Explanation,
) -> None:
    assert comments(f for f in findings if not f.fatal) == ["third", "fourth"]


def test_constructs_on_lines_that_did_not_run_are_listed_as_uncertain(
    findings: Explanation,
) -> None:
    assert comments(f for f in findings if not f.certain) == ["sixth"]
    assert "error, if this line runs: .item() needs a tensor's value" in str(findings)


def test_constructs_that_ran_and_can_be_captured_are_not_listed() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * torch.tensor(2.0).item()  # of a constant

    assert [*explained(forward, torch.ones(2))] == []


def test_findings_are_counted(findings: Explanation) -> None:
    assert "4 of 7 findings prevent compiling this model" in str(findings)


def test_findings_have_lines_and_remedies(findings: Explanation) -> None:
    assert all("test_explain.py" in finding.line for finding in findings)
    assert "poptorch.ipu_print_tensor" in str(findings)


def test_a_model_that_is_explained_stays_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    model = model_with_seven_constructs()
    before = {key: value.clone() for key, value in model.state_dict().items()}

    explained(model, torch.ones(2, 3))

    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_explaining_draws_no_random_numbers_of_the_host(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, state = model_with_seven_constructs(), torch.get_rng_state()

    explained(model, torch.ones(2, 3))

    assert torch.equal(torch.get_rng_state(), state)


def three_unsupported(x: torch.Tensor) -> torch.Tensor:
    a = torch.nonzero(x)  # first
    b = torch.unique(x)  # second
    return a.sum() + b.sum() + x.sum().item()  # third


def error_of(function: Callable[..., Any]) -> str:
    """Return the text of the error of a model with results of unknown sizes."""
    with pytest.raises(poptorch.Error, match="dynamic output shapes") as caught:
        poptorch.inferenceModel(Calling(function), options())(torch.ones(2))
    return str(caught.value)


@pytest.fixture(scope="module")
def error_of_three() -> str:
    return error_of(three_unsupported)


@pytest.mark.spec("supported_ops", 30)
@pytest.mark.parametrize(
    "problem",
    [
        "2 more constructs of this model cannot be captured",
        "unique2: the shape of its result",
        ".item() needs a tensor's value",
    ],
)
def test_the_error_of_a_compilation_names_all_that_is_unsupported(
    problem: str, error_of_three: str
) -> None:
    assert problem in error_of_three


@pytest.mark.spec("supported_ops", 30)
def test_the_error_of_a_compilation_shows_each_unsupported_line_once(error_of_three: str) -> None:
    comments = ("first", "second", "third")

    shown = {comment: error_of_three.count(f"# {comment}") for comment in comments}

    assert shown == {"first": 1, "second": 1, "third": 1}


@pytest.mark.spec("supported_ops", 30)
def test_the_error_of_a_single_unsupported_construct_mentions_no_more() -> None:
    assert "more construct" not in error_of(torch.unique)


def test_explain_lists_errors_that_stop_forward_and_a_missing_loss_last() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        x.tolist()
        return x @ torch.ones(7, 7)

    findings = explained(forward, torch.ones(2, 2))
    with pytest.raises(RuntimeError) as raised:
        forward(torch.ones(2, 2))
    assert [f.what for f in findings.fatal][1:] == [f"RuntimeError: {raised.value}"]
    assert "x @ torch.ones(7, 7)" in findings[-1].line
    lossless = Having(lambda model, x: (x.numpy(), model.layer(x))[1], layer=nn.Linear(2, 2))
    assert [f.what for f in training(lossless).explain(torch.ones(1, 2))] == [
        ".numpy() needs a tensor's value",
        "Couldn't find a loss in graph",
    ]


def test_a_model_compiles_after_it_was_explained() -> None:
    model = training(Scaled(lambda x: x * 2 if x.sum() > 0 else x))
    assert [finding.fatal for finding in model.explain(torch.ones(2))] == [False]
    assert not model.isCompiled()
    out, _ = model(torch.ones(2))
    assert out.tolist() == [4, 4]


def test_a_model_that_can_be_captured_has_nothing_to_explain() -> None:
    report = explained(nn.Linear(2, 2), torch.ones(3, 2))

    assert str(report) == "Nothing prevents capturing this model."


def test_nodes_know_the_lines_of_forward_and_no_others() -> None:
    """The lines are those of the user's own forward methods, outermost first."""

    class Inner(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return helper(x)

    class Outer(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self[0](x + 1)

    def helper(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    kept = {*graph_module._loader.eval_cache, *linecache.cache}
    wrapped = poptorch.inferenceModel(Outer(nn.Sequential(Inner())), options())
    wrapped(torch.ones(3))
    new = {*graph_module._loader.eval_cache, *linecache.cache} - kept
    assert not [name for name in new if name.startswith("<eval_with_key>")]  # generated code
    add, mul = (n.stack_trace for n in graph_of(wrapped).nodes if n.op == "call_function")
    outer = f'File "{__file__}", line {_line_of(Outer)}, in forward\n    return self[0](x + 1)'
    inner = f'File "{__file__}", line {_line_of(Inner)}, in forward\n    return helper(x)'
    assert add == outer
    assert mul == f"{outer}\n  {inner}"


def _line_of(model: type[nn.Module]) -> int:
    lines, first = inspect.getsourcelines(model.forward)
    return first + len(lines) - 1


def in_two_modes(model: Having, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    features = model.body(x)
    out = model.head(features)
    return features, model.drop(out), poptorch.identity_loss(out.square(), "mean")


def model_whose_body_is_evaluated() -> Having:
    """A model that trains, but for its body: a linear layer, a batch norm and a dropout."""
    body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).eval()
    return Having(in_two_modes, body=body, head=nn.Linear(4, 2), drop=nn.Dropout(0.5))


@pytest.mark.spec("supported_ops", 7)
def test_inference_of_a_layer_in_training_mode_drops_out() -> None:
    assert (infer(nn.Dropout(0.5), torch.ones(99)) == 0).any()


class AfterOneStep(NamedTuple):
    """A model whose body is evaluated, after one training step, and the results of the step."""

    model: Having
    x: torch.Tensor
    features: torch.Tensor
    dropped: torch.Tensor


@pytest.fixture(scope="module")
def after_one_step() -> AfterOneStep:
    model, x = model_whose_body_is_evaluated(), normal(64, 4)
    features, dropped, _ = training(model, lr=0.0)(x)
    return AfterOneStep(model, x, features, dropped)


@pytest.mark.spec("supported_ops", 7, 8)
def test_in_training_a_part_in_evaluation_mode_is_evaluated(after_one_step: AfterOneStep) -> None:
    expected = after_one_step.model.body(after_one_step.x).detach()

    torch.testing.assert_close(after_one_step.features, expected)
    assert (after_one_step.dropped == 0).any()


@pytest.mark.spec("supported_ops", 7, 8)
def test_in_training_a_batch_norm_in_evaluation_mode_counts_nothing(
    after_one_step: AfterOneStep,
) -> None:
    norm = after_one_step.model.body[1]

    assert norm.num_batches_tracked == 0
    assert not norm.state_dict()["running_mean"].any()


@pytest.mark.spec("supported_ops", 7, 8)
def test_a_model_that_returns_to_training_mode_is_trained_as_a_whole() -> None:
    model, x = model_whose_body_is_evaluated(), normal(64, 4)
    executor = training(model, lr=0.0)
    executor(x)

    model.train()
    features, _, _ = executor(x)

    assert (features == 0).any()
    assert model.body[1].num_batches_tracked == 1


@pytest.mark.spec("supported_ops", 7, 8)
def test_a_model_that_goes_to_evaluation_mode_is_evaluated_as_a_whole() -> None:
    model, x = model_whose_body_is_evaluated(), normal(64, 4)
    executor = training(model, lr=0.0)
    executor(x)

    model.eval()
    features, dropped, _ = executor(x)

    torch.testing.assert_close(features, model.body(x).detach())
    torch.testing.assert_close(dropped, model.head(features).detach())
    assert model.body[1].num_batches_tracked == 0


@pytest.mark.spec("supported_ops", 18)
def test_new_tensors_need_no_device_and_those_from_outside_are_frozen() -> None:
    outside = torch.ones(3)

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        new = torch.arange(3.0) + torch.zeros(3) + torch.full((3,), 2.0) + torch.tensor([1.0, 2, 3])
        assert new.device == x.device
        return x + new + torch.linspace(0, 1, 3), x * outside

    model, x = poptorch.inferenceModel(Calling(forward), options()), normal(3)
    first = model(x)
    torch.testing.assert_close(first, forward(x))
    outside.fill_(5.0)
    torch.testing.assert_close(model(x), first)


@pytest.mark.spec("supported_ops", 19, 20)
def test_python_in_forward_and_hooks_runs_at_capture_only() -> None:
    ran = []

    def forward(model: Having, x: torch.Tensor) -> torch.Tensor:
        for layer in model.layers:
            ran.append("forward")
            x = layer(x)
        return x

    module = Having(forward, layers=nn.ModuleList(nn.Linear(2, 2) for _ in range(3)))
    module.register_forward_hook(lambda module, args, out: (ran.append("hook"), out * 2)[1])
    model, x = poptorch.inferenceModel(module, options(iterations=3).lanes(1)), normal(6, 2)
    model(x)
    count = len(ran)
    torch.testing.assert_close(model(x), module(x).detach())  # the hook's doubling is there
    assert len(ran) == count + 4
    assert set(ran) == {"forward", "hook"}
    targets = [node.target for node in graph_of(model).nodes]
    assert targets.count(torch.ops.aten.addmm.default) == 3  # the loop is unrolled
