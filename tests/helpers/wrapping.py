"""Small models, and short ways to wrap them, and to call and train them next to eager PyTorch."""

import contextlib
import copy
import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

import poptorch

PAUSE = 0.025


def options(
    backend: str = "reference", *, iterations: int = 1, accumulation: int = 1, replicas: int = 1
) -> poptorch.Options:
    """Quiet options on one backend."""
    opts = poptorch.Options().backend(backend).showCompilationProgressBar(False)
    opts.deviceIterations(iterations)
    opts.replicationFactor(replicas)
    opts.Training.gradientAccumulation(accumulation)
    return opts


def unchecked(backend: str = "reference", **counts: int) -> poptorch.Options:
    """Options for a model that counts its own runs, or differs from eager PyTorch on purpose."""
    return options(backend, **counts).checkAgainstEager("off")


class Classifier(nn.Module):
    """A classifier of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(self.layer(x), 1)


class Calling(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class Having(nn.Module):
    """Weights, buffers and layers by name, used by a function of the module and its inputs."""

    def __init__(self, function: Callable[..., Any], **state: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in state.items():
            if type(value) is torch.Tensor:
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


class Scaled(nn.Module):
    """A trainable factor on the first input, then a function; the loss is the mean of squares."""

    def __init__(self, function: Callable[..., Any], shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full(shape, 2.0))
        self.function = function

    def forward(self, x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.function(self.weight * x, *rest)
        return out, poptorch.identity_loss(out.square(), reduction="mean")


class Several(nn.Module):
    """Functions like ``Scaled``'s in one program: compiling many takes little longer than one."""

    def __init__(self, functions: Sequence[Callable], weights: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(weight.clone() for weight in weights)
        self.functions = functions

    def forward(self, *inputs: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
        scaled = [weight * x for weight, x in zip(self.weights, inputs, strict=True)]
        outs = [function(x) for function, x in zip(self.functions, scaled, strict=True)]
        losses = torch.stack([out.square().mean() for out in outs])
        return outs, poptorch.identity_loss(losses, reduction="sum")


def runs_compiled(executor: poptorch.PoplarExecutor) -> bool:
    """Whether compiled code runs: where compiling fails the interpreter takes its place."""
    return bool(executor._executable.report().backend == "inductor")


def infer(function: Callable[..., Any], *args: Any, opts: poptorch.Options | None = None) -> Any:
    return poptorch.inferenceModel(Calling(function), opts or options())(*args)


def agrees(
    function: Callable[..., Any] | nn.Module,
    *args: Any,
    opts: poptorch.Options | None = None,
    **near: Any,
) -> Any:
    """Call a function through an inference model; compare what comes with torch, and return it."""
    got = infer(function, *args, opts=opts)
    with torch.no_grad():
        torch.testing.assert_close(got, function(*args), **near)
    return got


def trains_alike(
    model: nn.Module,
    *inputs: Any,
    eager: nn.Module | None = None,
    opts: poptorch.Options | None = None,
    accumulation: int = 1,
    steps: int = 2,
    **settings: Any,
) -> Any:
    """Train a model whose last result is the loss, and an eager copy; compare everything."""
    eager, settings = eager or copy.deepcopy(model), {"lr": 0.1, **settings}
    plain = torch.optim.SGD(eager.parameters(), **settings)
    optimizer, opts = torch.optim.SGD(model.parameters(), **settings), (opts or options()).clone()
    opts.Training.gradientAccumulation(accumulation)
    executor = poptorch.trainingModel(model, opts, optimizer)
    for _ in range(steps):
        got = executor(*inputs)
        plain.zero_grad()
        for part in zip(*(x.chunk(accumulation) for x in inputs), strict=True):
            expected = eager(*part)
            loss = expected[-1] if isinstance(expected, tuple) else expected
            loss.backward()  # hooks see the gradient of one micro-batch, the step their mean
        for weight in filter(lambda p: p.grad is not None, eager.parameters()):
            weight.grad /= accumulation
        plain.step()
        detached = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, expected)
        torch.testing.assert_close(got, detached)
    torch.testing.assert_close(model.state_dict(), eager.state_dict())
    return executor


def training(model: nn.Module, opts: poptorch.Options | None = None, lr: float = 0.1) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return poptorch.trainingModel(model, opts or options(), optimizer)


def graph_of(executor: Any, name: str = "forward") -> torch.fx.Graph:
    return executor._session.now.compiled.plan.program.graphs[name].module.graph


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random numbers that are the same in every run, for modules of tests to hold."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def saved(value: Any, weights_only: bool = True) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=weights_only)


class Graded(nn.Module):
    """Layers by name, one after another; with targets, the loss, after the output if ``both``."""

    def __init__(
        self,
        loss: Callable[..., Any] = nn.functional.mse_loss,
        both: bool = False,
        **layers: nn.Module,
    ) -> None:
        super().__init__()
        self.loss, self.both, self.order = loss, both, tuple(layers)
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(
        self, x: torch.Tensor, y: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None:
        for name in self.order:
            x = self.get_submodule(name)(x)
        if y is None:
            return x
        return (x, self.loss(x, y)) if self.both else self.loss(x, y)


class Regression(Graded):
    """A layer and its mean squared error."""

    def __init__(self, inputs: int = 4, outputs: int = 2) -> None:
        super().__init__(layer=nn.Linear(inputs, outputs))


def inference(function: Callable[..., Any] | nn.Module, **counts: int) -> poptorch.PoplarExecutor:
    module = function if isinstance(function, nn.Module) else Calling(function)
    return poptorch.inferenceModel(module, options(**counts))


@contextlib.contextmanager
def compilations() -> Iterator[list[Any]]:
    """Fill a list with an entry for each program that is compiled meanwhile."""
    compiled: list[int] = []
    handle = poptorch.registerPostCompileHook(lambda: compiled.append(1))
    try:
        yield compiled
    finally:
        handle.remove()


class EagerPair:
    """A model and its copy, an optimizer for each, and the executor of the one.

    The model returns a loss, or something and then its loss. ``close`` says how near losses and
    states are; with an ``rtol`` of 0, weights too.
    """

    def __init__(
        self,
        model: nn.Module,
        make: Callable[..., Any] | type,
        opts: poptorch.Options | None = None,
        **close: Any,
    ) -> None:
        self.model, self.eager = model, copy.deepcopy(model)
        self.theirs, self.ours = (make(m.parameters()) for m in (self.eager, self.model))
        self.wrapped = poptorch.trainingModel(self.model, opts or options(), self.ours)
        self.close = close or {"rtol": 0, "atol": 0}

    @property
    def both(self) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        return self.theirs, self.ours

    def eager_step(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Make a step in eager torch; return the loss."""
        self.theirs.zero_grad()
        result = self.eager(*inputs)
        loss: torch.Tensor = result if isinstance(result, torch.Tensor) else result[-1]
        loss.backward()
        self.theirs.step()
        return loss.detach()

    def step(self, *inputs: torch.Tensor, count: int = 1) -> None:
        """Make steps of both; compare their losses."""
        for number in range(1, count + 1):
            result = self.wrapped(*inputs)
            loss = result if isinstance(result, torch.Tensor) else result[-1]
            self._compare_losses(loss, self.eager_step(*inputs), f"step {number} of {count}")

    def _compare_losses(self, got: torch.Tensor, expected: torch.Tensor, step: str) -> None:
        def message(differences: str) -> str:
            return f"the loss of the program and that of eager PyTorch in {step}\n{differences}"

        torch.testing.assert_close(got, expected, msg=message, **self.close)

    def train(self, mode: bool) -> None:
        for model in (self.model, self.eager):
            model.train(mode)

    def compare(self) -> None:
        """Compare weights, buffers and the states of the optimizers."""
        near = {} if self.close["rtol"] else self.close
        torch.testing.assert_close(self.model.state_dict(), self.eager.state_dict(), **near)
        theirs, ours = (optimizer.state_dict()["state"] for optimizer in self.both)
        for at, entry in theirs.items():
            there = {name: value for name, value in entry.items() if value is not None}
            torch.testing.assert_close({n: ours[at][n] for n in there}, there, **self.close)
