"""How many micro-batches run side by side: as many as are fast and worth their memory."""

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapping import Having, normal, options
from poptorch._compile import lanes
from poptorch._ir.graph import Graph
from poptorch._ir.micro_batches import Lanes

STEPS, ROWS = 16, 4


def program_of(model: nn.Module, columns: int, opts: poptorch.Options) -> poptorch.PoplarExecutor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapper = poptorch.trainingModel(model, opts, optimizer)
    wrapper.compile(normal(STEPS * ROWS, columns))
    return wrapper


def lanes_of(wrapper: poptorch.PoplarExecutor) -> int:
    side_by_side = wrapper.plan().program.lanes
    return 1 if side_by_side is None else side_by_side.steps


def peak_of(wrapper: poptorch.PoplarExecutor) -> int:
    return max(lanes.peak_bytes(graph) for graph in wrapper.plan().program.graphs.values())


def with_large_values() -> Having:
    """Long kernels: a micro-batch takes as long alone as next to others."""

    def forward(net: Having, x: torch.Tensor) -> torch.Tensor:
        return poptorch.identity_loss((x * net.factor).sin().exp().tanh(), "mean")

    return Having(forward, factor=nn.Parameter(torch.ones(())))


def with_large_weights() -> Having:
    """Products of few rows: their weights are read from memory once for all lanes."""

    def forward(net: Having, x: torch.Tensor) -> torch.Tensor:
        return poptorch.identity_loss(net.second(net.first(x).relu()), "mean")

    return Having(forward, first=nn.Linear(256, 512), second=nn.Linear(512, 512))


def chosen_lanes(opts: poptorch.Options, rows: int, width: int) -> Lanes | None:
    """Return the lanes of a program with this many rows in a micro-batch, and numbers in a row."""

    def forward(m: Having, x: torch.Tensor) -> torch.Tensor:
        return poptorch.identity_loss((x * m.weight).tanh().exp().square().mean(), "none")

    model = Having(forward, weight=nn.Parameter(torch.ones(width)))
    executor = poptorch.trainingModel(model, opts)
    micro_batches = opts.Training.gradient_accumulation * opts.replication_factor
    executor.compile(torch.zeros(rows * micro_batches, width))
    return executor.plan().program.lanes


def test_lanes_that_gain_little_are_given_up_for_their_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usual = program_of(with_large_values(), 4096, options(accumulation=STEPS))
    monkeypatch.setattr(lanes, "SAVED", peak_of(usual) // 3)

    saving = program_of(with_large_values(), 4096, options(accumulation=STEPS))

    assert lanes_of(usual) == STEPS
    assert lanes_of(saving) == STEPS // 4
    assert peak_of(saving) <= lanes.SAVED


@pytest.mark.slow
@pytest.mark.parametrize(
    "share, expected",
    [pytest.param(0.98, STEPS, id="below"), pytest.param(1.02, STEPS // 2, id="above")],
)
def test_lanes_that_gain_little_are_halved_from_96_mib_on(share: float, expected: int) -> None:
    columns = 4096
    bytes_of_column = peak_of(program_of(with_large_values(), columns, all_lanes())) / columns

    columns = int(share * (96 << 20) / bytes_of_column)
    wrapper = program_of(with_large_values(), columns, options(accumulation=STEPS))

    assert lanes_of(wrapper) == expected


def all_lanes() -> poptorch.Options:
    return options(accumulation=STEPS).lanes(STEPS)


def builds_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that notes for how many steps graphs are built from now on."""
    usual, built = lanes._lanes.side_by_side, list[int]()

    def building(graph: Graph, count: Lanes) -> Graph:
        built.append(count.steps)
        return usual(graph, count)

    monkeypatch.setattr(lanes._lanes, "side_by_side", building)
    return built


def test_lanes_that_are_given_up_are_not_built_first(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = program_of(with_large_values(), 4096, options(accumulation=STEPS))
    monkeypatch.setattr(lanes, "SAVED", peak_of(usual) // 3)
    built = builds_of(monkeypatch)

    program_of(with_large_values(), 4096, options(accumulation=STEPS))

    assert built == [STEPS // 4]


def test_lanes_are_built_again_if_they_take_less_memory_than_was_guessed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usual = program_of(with_large_values(), 4096, options(accumulation=STEPS))
    monkeypatch.setattr(lanes, "SAVED", 2 * peak_of(usual))
    built, peak, seen = builds_of(monkeypatch), lanes.peak_bytes, []

    def too_much_at_first(graph: Graph) -> int:
        seen.append(graph)
        return peak(graph) * (4 if graph is seen[0] else 1)

    monkeypatch.setattr(lanes, "peak_bytes", too_much_at_first)
    wrapper = program_of(with_large_values(), 4096, options(accumulation=STEPS))

    assert built == [STEPS // 4, STEPS]
    assert lanes_of(wrapper) == STEPS


def test_half_of_the_lanes_are_built_if_they_take_more_memory_than_was_guessed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usual = program_of(with_large_values(), 4096, options(accumulation=STEPS))
    monkeypatch.setattr(lanes, "SAVED", peak_of(usual) * 2 // 3)
    built, peak, seen = builds_of(monkeypatch), lanes.peak_bytes, []

    def too_little_at_first(graph: Graph) -> int:
        seen.append(graph)
        return peak(graph) // (4 if graph is seen[0] else 1)

    monkeypatch.setattr(lanes, "peak_bytes", too_little_at_first)
    wrapper = program_of(with_large_values(), 4096, options(accumulation=STEPS))

    assert built == [STEPS, STEPS // 2]
    assert lanes_of(wrapper) == STEPS // 2


def test_lanes_that_share_reading_large_weights_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "SAVED", 1)

    wrapper = program_of(with_large_weights(), 256, options(accumulation=STEPS))

    assert lanes_of(wrapper) == STEPS


@pytest.mark.parametrize("count", [2, STEPS])
def test_lanes_that_the_user_asks_for_stay(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "SAVED", 1)

    opts = options(accumulation=STEPS).lanes(count)
    wrapper = program_of(with_large_values(), 4096, opts)

    assert lanes_of(wrapper) == count


def test_the_same_numbers_come_out_of_fewer_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    x = normal(STEPS * ROWS, 64)
    usual, saving = with_large_values(), with_large_values()
    many = program_of(usual, 64, options(accumulation=STEPS))
    many(x)
    monkeypatch.setattr(lanes, "SAVED", 1)
    few = program_of(saving, 64, options(accumulation=STEPS))
    few(x)

    torch.testing.assert_close(saving.factor, usual.factor)


@pytest.mark.parametrize(
    "rows, micro_batches, replicas, width, expected_steps",
    [
        # About 64 rows of all lanes, a divisor of the micro-batches,
        (65, 12, 1, 8192, 0),
        (32, 12, 1, 8192, 2),
        (16, 12, 1, 8192, 4),
        (8, 12, 2, 8192, 4),
        (64, 12, 1, 4096, 0),
        (64, 12, 2, 4096, 1),
        # and more where the caches hold them: 4 MiB.
        (64, 12, 1, 512, 6),
        (64, 12, 1, 64, 12),
        (2, 128, 1, 4, 64),
    ],
)
def test_there_are_lanes_for_64_rows_or_for_the_size_of_the_caches(
    rows: int, micro_batches: int, replicas: int, width: int, expected_steps: int
) -> None:
    opts = options(accumulation=micro_batches, replicas=replicas)

    chosen = chosen_lanes(opts, rows, width)

    assert chosen == (Lanes(expected_steps, replicas) if expected_steps else None)


@pytest.mark.parametrize(
    "rows, width, memory, expected_steps",
    [
        (2, 256, 8_000, 0),
        (2, 256, 20_000, 2),
        (2, 256, 60_000, 6),
        (64, 512, 1 << 20, 0),
        (64, 512, 8 << 20, 6),
    ],
)
def test_lanes_stay_within_the_memory_that_the_user_sets(
    rows: int, width: int, memory: int, expected_steps: int
) -> None:
    opts = options(accumulation=12).laneMemory(memory)

    chosen = chosen_lanes(opts, rows, width)

    assert chosen == (Lanes(expected_steps) if expected_steps else None)


@pytest.mark.parametrize(
    "replicas, asked, expected_steps",
    [
        pytest.param(2, 6, 3, id="divided among replicas"),
        pytest.param(2, 1, 0, id="none for fewer than the replicas"),
    ],
)
def test_lanes_that_the_user_asks_for_are_counted_over_replicas(
    replicas: int, asked: int, expected_steps: int
) -> None:
    opts = options(accumulation=12, replicas=replicas).lanes(asked)

    chosen = chosen_lanes(opts, rows=2, width=256)

    assert chosen == (Lanes(expected_steps, replicas) if expected_steps else None)


def test_lanes_that_the_user_asks_for_become_a_divisor_and_memory_is_not_considered() -> None:
    opts = options(accumulation=12).lanes(5).laneMemory(1)

    assert chosen_lanes(opts, rows=2, width=256) == Lanes(4)


@pytest.mark.parametrize(
    "free, budget",
    [
        (16 << 30, 1 << 30),
        (4 << 30, 1 << 30),
        ((4 << 30) - 1, 1 << 29),
        (12, 2),
        (7, 1),
        (0, 1),
    ],
)
def test_lanes_get_a_quarter_of_the_free_memory_rounded_to_a_power_of_two(
    free: int, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most 1 GiB, and at least a byte."""
    monkeypatch.setattr(lanes, "available_memory", lambda: free)

    assert lanes.default_budget() == budget
