"""SAC of stable-baselines3 with compiled updates: its numbers, its files both ways, its seeds."""

import numpy as np
import pytest
import torch
from torch.distributions import Normal

from helpers.closeness import FUNCTION, near, relative

sb3 = pytest.importorskip("stable_baselines3")
pytestmark = pytest.mark.slow


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("POPTORCH_BACKEND", "reference")
    from reinforcement import train

    monkeypatch.setattr(train.CompiledSAC, "backend", "reference")
    return train


def agent(kind, steps: int = 40, **settings):
    settings |= {"train_freq": 8, "gradient_steps": 8, "learning_starts": 16, "device": "cpu"}
    settings["policy_kwargs"] = {"net_arch": [8, 8]}
    return kind("MlpPolicy", "Pendulum-v1", seed=3, **settings).learn(steps)


def equal(one, other, **close) -> None:
    torch.testing.assert_close(one.get_parameters(), other.get_parameters(), **close)


@pytest.mark.parametrize("still", [["critic"], ["actor", "ent_coef"]])
@pytest.mark.parametrize("interval", [1, 2])
def test_updates_are_those_of_sb3_where_its_order_does_not_matter(
    train, still: list[str], interval: int, monkeypatch
) -> None:
    """Its actor sees the critics after their step; here both see the weights of before."""
    monkeypatch.setattr(Normal, "rsample", lambda own, shape=(): own.loc + 0.3 * own.scale)
    kinds = sb3.SAC, train.CompiledSAC
    agents = [agent(kind, 16, target_update_interval=interval) for kind in kinds]
    for one in agents:
        rows = iter(range(16))
        fetch = one.replay_buffer._get_samples
        monkeypatch.setattr(one.replay_buffer, "sample", lambda size, env, rows=rows, fetch=fetch:
                            fetch(np.array([next(rows) for _ in range(size)]), env))  # fmt: skip
        monkeypatch.setattr(one, "_update_learning_rate", lambda optimizers: None)
        for name in still:
            own = one.ent_coef_optimizer if name == "ent_coef" else getattr(one, name).optimizer
            own.param_groups[0]["lr"] = 0.0
        for _ in range(2):
            one.train(2, 4)
    equal(*agents, **near(100 + FUNCTION, 4))
    theirs, ours = (dict(one.logger.name_to_value) for one in agents)
    if "critic" not in still:  # this is what differs
        assert theirs.pop("train/actor_loss") != ours.pop("train/actor_loss")
    assert ours == pytest.approx(theirs, rel=relative(100, 4))


def test_a_file_goes_both_ways_and_a_seed_gives_the_same_numbers(train, tmp_path) -> None:
    first, again = agent(train.CompiledSAC), agent(train.CompiledSAC)
    equal(first, again, rtol=0, atol=0)
    for kind in (sb3.SAC, train.CompiledSAC):
        first.save(tmp_path / "model.zip")
        other = kind.load(tmp_path / "model.zip", env=first.get_env())
        equal(other, first, rtol=0, atol=0)
        updates = other._n_updates
        first = other.learn(24)
        assert first._n_updates == updates + 8
        assert first.actor.optimizer.state_dict()["state"][0]["step"] == first._n_updates


def test_the_example_draws_and_saves(train, tmp_path) -> None:
    picture, file = tmp_path / "speed.png", tmp_path / "model.zip"
    eager, wrapped = train.main(["--small", "--plot", str(picture), "--save", str(file)])
    assert len(eager.seconds) == len(wrapped.seconds) == 20
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert sb3.SAC.load(file)._n_updates > 0
