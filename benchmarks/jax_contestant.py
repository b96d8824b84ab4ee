"""Run a workload in JAX, in its own process and its own environment.

``contestants.jax`` starts this program with an interpreter that has JAX and does not need torch.
Shapes, optimizer and number format are the same as in torch; the weights come from JAX's own random
generator. The program compiles the whole step, as JAX users do, and prints the compile time. It
then runs one step for each line on its standard input, and prints the time of the step.

Usage: python benchmarks/jax_contestant.py cnn|mlp|bert THREADS
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

THREADS = int(sys.argv[2])
os.environ["JAX_PLATFORMS"] = "cpu"
if THREADS == 1:
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax import lax, nn  # noqa: E402

Tree = dict[str, Any]
RANDOM = np.random.default_rng(0)


def normal(*shape: int) -> Any:
    """Return weights whose products have the scale of the input."""
    return jnp.asarray(RANDOM.normal(size=shape) / np.sqrt(np.prod(shape[1:])), jnp.float32)


def linear(inputs: int, outputs: int) -> Tree:
    """Return a layer's weights in torch's layout."""
    return {"w": normal(outputs, inputs), "b": jnp.zeros(outputs)}


def apply(layer: Tree, x: Any) -> Any:
    """Return ``x W' + b``."""
    return x @ layer["w"].T + layer["b"]


def mlp() -> tuple[Tree, Callable[..., Any], Sequence[Any]]:
    """784-512-512-10, 32 rows."""
    sizes = (784, 512, 512, 10)
    weights = {str(at): linear(a, b) for at, (a, b) in enumerate(itertools.pairwise(sizes))}

    def logits(weights: Tree, x: Any) -> Any:
        x = nn.relu(apply(weights["0"], x))
        return apply(weights["2"], nn.relu(apply(weights["1"], x)))

    return weights, logits, (jnp.asarray(RANDOM.normal(size=(32, 784)), jnp.float32), labels(32))


def labels(*shape: int, classes: int = 10) -> Any:
    """Return the targets."""
    return jnp.asarray(RANDOM.integers(0, classes, shape))


def cnn() -> tuple[Tree, Callable[..., Any], Sequence[Any]]:
    """The tutorial's network, 16 images."""
    weights = {
        "conv1": {"w": normal(5, 1, 3, 3), "b": jnp.zeros(5)},
        "conv2": {"w": normal(12, 5, 5, 5), "b": jnp.zeros(12)},
        "norm": {"w": jnp.ones(12), "b": jnp.zeros(12)},
        "fc1": linear(972, 100),
        "fc2": linear(100, 10),
    }

    def convolve(layer: Tree, x: Any) -> Any:
        return lax.conv(x, layer["w"], (1, 1), "VALID") + layer["b"][:, None, None]

    def pool(x: Any) -> Any:
        window = (1, 1, 2, 2)
        return lax.reduce_window(x, -jnp.inf, lax.max, window, window, "VALID")

    def normalise(layer: Tree, x: Any) -> Any:
        groups = x.reshape(x.shape[0], 3, -1)
        mean, variance = groups.mean(2, keepdims=True), groups.var(2, keepdims=True)
        x = ((groups - mean) * lax.rsqrt(variance + 1e-5)).reshape(x.shape)
        return x * layer["w"][:, None, None] + layer["b"][:, None, None]

    def logits(weights: Tree, x: Any) -> Any:
        x = pool(nn.relu(convolve(weights["conv1"], x)))
        x = normalise(weights["norm"], nn.relu(convolve(weights["conv2"], x)))
        x = nn.relu(apply(weights["fc1"], x.reshape(x.shape[0], -1)))
        return apply(weights["fc2"], x)

    images = jnp.asarray(RANDOM.normal(size=(16, 1, 28, 28)), jnp.float32)
    return weights, logits, (images, labels(16))


def bert(hidden: int = 256, length: int = 64, heads: int = 4, vocabulary: int = 1000) -> Any:
    """The table's BERT of 4 layers, 8 rows."""
    weights: Tree = {
        "tokens": normal(vocabulary, hidden) * np.sqrt(hidden),
        "positions": normal(length, hidden) * 0.02,
        "head": linear(hidden, vocabulary),
    }
    for at in range(4):
        weights[f"layer{at}"] = {
            "qkv": linear(hidden, 3 * hidden), "out": linear(hidden, hidden),
            "up": linear(hidden, 4 * hidden), "down": linear(4 * hidden, hidden),
            "norm1": {"w": jnp.ones(hidden), "b": jnp.zeros(hidden)},
            "norm2": {"w": jnp.ones(hidden), "b": jnp.zeros(hidden)},
        }  # fmt: skip

    def normalise(layer: Tree, x: Any) -> Any:
        x = (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
        return x * layer["w"] + layer["b"]

    def attend(layer: Tree, x: Any) -> Any:
        split = apply(layer["qkv"], x).reshape(*x.shape[:2], 3, heads, -1)
        q, k, v = (split[:, :, at].transpose(0, 2, 1, 3) for at in range(3))
        shares = nn.softmax(q @ k.transpose(0, 1, 3, 2) / np.sqrt(q.shape[-1]))
        return apply(layer["out"], (shares @ v).transpose(0, 2, 1, 3).reshape(x.shape))

    def logits(weights: Tree, x: Any) -> Any:
        x = weights["tokens"][x] + weights["positions"]
        for at in range(4):
            layer = weights[f"layer{at}"]
            x = normalise(layer["norm1"], x + attend(layer, x))
            inner = nn.gelu(apply(layer["up"], x), approximate=False)
            x = normalise(layer["norm2"], x + apply(layer["down"], inner))
        return apply(weights["head"], x)

    batch = (labels(8, length, classes=vocabulary), labels(8, length, classes=vocabulary))
    return weights, logits, batch


def sgd(weight: Any, gradient: Any, state: Any, count: Any) -> Any:
    """Return torch's SGD with momentum 0.9."""
    (velocity,) = state
    velocity = 0.9 * velocity + gradient
    return weight - 1e-3 * velocity, (velocity,)


def adam(weight: Any, gradient: Any, state: Any, count: Any) -> Any:
    """Return torch's Adam."""
    first, second = state
    first = first + 0.1 * (gradient - first)
    second = 0.999 * second + 0.001 * gradient * gradient
    root = jnp.sqrt(second / (1 - 0.999**count)) + 1e-8
    return weight - 1e-3 * first / (1 - 0.9**count) / root, (first, second)


def training_step(logits: Callable[..., Any], update: Callable[..., Any]) -> Callable[..., Any]:
    """Compile forward, backward and update as one program that overwrites its state."""

    def loss(weights: Tree, x: Any, y: Any) -> Any:
        out = logits(weights, x)
        scores = nn.log_softmax(out)
        return -jnp.take_along_axis(scores, y[..., None], -1).mean(), out

    def step(weights: Tree, states: Any, count: Any, x: Any, y: Any) -> Any:
        (value, out), gradients = jax.value_and_grad(loss, has_aux=True)(weights, x, y)
        leaves, form = jax.tree.flatten(weights)
        new = [
            update(weight, gradient, state, count + 1)
            for weight, gradient, state in zip(leaves, form.flatten_up_to(gradients), states)  # noqa: B905
        ]
        return form.unflatten(w for w, _ in new), [s for _, s in new], count + 1, value, out

    return jax.jit(step, donate_argnums=(0, 1))


def main() -> None:
    """Compile, then step on request."""
    weights, logits, batch = {"cnn": cnn, "mlp": mlp, "bert": bert}[sys.argv[1]]()
    update, moments = (sgd, 1) if sys.argv[1] == "cnn" else (adam, 2)
    states = [(jnp.zeros_like(leaf),) * moments for leaf in jax.tree.leaves(weights)]
    states = jax.tree.map(jnp.copy, states)  # each with its own memory
    count, step = jnp.zeros(()), training_step(logits, update)
    for at, _ in enumerate(itertools.chain([None], sys.stdin)):
        begin = time.perf_counter()
        weights, states, count, loss, _ = jax.block_until_ready(
            step(weights, states, count, *batch)
        )
        seconds = time.perf_counter() - begin
        if not np.isfinite(loss):
            raise SystemExit(f"the loss of step {at} is {loss}")
        print(seconds, float(loss), flush=True)


if __name__ == "__main__":
    main()
