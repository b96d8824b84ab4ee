"""Train SAC from stable-baselines3, with all gradient updates in one call of a compiled program.

python examples/reinforcement/train.py
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from stable_baselines3 import SAC
from stable_baselines3.common.utils import polyak_update
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import poptorch
import side_by_side

LOSSES = "ent_coef", "ent_coef_loss", "critic_loss", "actor_loss"  # the names that the logger uses


class Update(nn.Module):
    """What one gradient update of SAC computes. The steps of the optimizers follow it."""

    def __init__(self, sac: CompiledSAC) -> None:
        super().__init__()
        self.actor, self.critic, self.critic_target = sac.actor, sac.critic, sac.critic_target
        self.log_ent_coef, self.target_entropy = sac.log_ent_coef, sac.target_entropy
        self.ent_coef = None if sac.log_ent_coef is not None else sac.ent_coef_tensor.item()

    def forward(self, tau, obs, actions, next_obs, dones, rewards, discounts):
        with torch.no_grad():  # after the last update, which has changed the critics
            for weight, target in zip(
                self.critic.parameters(), self.critic_target.parameters(), strict=True
            ):
                target.lerp_(weight, tau)
        actions_pi, log_prob = self.actor.action_log_prob(obs)
        log_prob = log_prob.reshape(-1, 1)
        if self.log_ent_coef is not None:
            ent_coef = self.log_ent_coef.detach().exp()
            ent_coef_loss = -(self.log_ent_coef * (log_prob.detach() + self.target_entropy)).mean()
        else:
            ent_coef, ent_coef_loss = log_prob.new_full((1,), self.ent_coef), log_prob.new_zeros(())

        with torch.no_grad():
            next_actions, next_log_prob = self.actor.action_log_prob(next_obs)
            next_q = torch.cat(self.critic_target(next_obs, next_actions), 1).amin(1, keepdim=True)
            next_q = next_q - ent_coef * next_log_prob.reshape(-1, 1)
            target_q = rewards + (1 - dones) * discounts * next_q
        critic_loss = 0.5 * sum(F.mse_loss(q, target_q) for q in self.critic(obs, actions))

        fixed = {name: weight.detach() for name, weight in self.critic.named_parameters()}
        q_pi = torch.func.functional_call(self.critic, fixed, (obs, actions_pi))
        actor_loss = (ent_coef * log_prob - torch.cat(q_pi, 1).amin(1, keepdim=True)).mean()
        parts = ent_coef_loss, critic_loss, actor_loss
        return sum(parts), ent_coef, *(part.detach() for part in parts)


class CompiledSAC(SAC):
    """SAC that makes all gradient updates of ``train`` in one call."""

    backend = os.environ.get("POPTORCH_BACKEND", "auto")
    executor: poptorch.PoplarExecutor | None = None
    updates_per_call = 0
    target_is_due = False  # the critics have changed, but the target networks have not followed yet

    def _setup_model(self) -> None:
        super()._setup_model()
        if self.use_sde or self.batch_norm_stats:
            raise NotImplementedError("neither state-dependent exploration nor batch norms")
        if self.ent_coef_optimizer is not None:  # a parameter with its own optimizer
            self.log_ent_coef = nn.Parameter(self.log_ent_coef.detach())
            self.ent_coef_optimizer.param_groups[0]["params"] = [self.log_ent_coef]

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        own = self.actor.optimizer, self.critic.optimizer, self.ent_coef_optimizer
        return [each for each in own if each is not None]

    def _wrap(self, updates: int) -> poptorch.PoplarExecutor:
        """Wrap the model for this number of updates per call. Compiled code supports any number."""
        if self.executor is not None:
            self.executor.destroy()
        options = poptorch.Options().deviceIterations(updates).backend(self.backend)
        options.outputMode(poptorch.OutputMode.All).showCompilationProgressBar(False)
        if self.seed is not None:
            options.randomSeed(self.seed)
        self.updates_per_call = updates
        return poptorch.trainingModel(Update(self), options, self._optimizers())

    def train(self, gradient_steps: int, batch_size: int = 64) -> None:
        self.policy.set_training_mode(True)
        self._update_learning_rate(self._optimizers())
        if gradient_steps != self.updates_per_call:
            self.executor = self._wrap(gradient_steps)
        else:
            self.executor.setOptimizer(self._optimizers())

        data = self.replay_buffer.sample(gradient_steps * batch_size, self._vec_normalize_env)
        discounts = data.discounts
        if discounts is None:
            discounts = torch.full_like(data.rewards, self.gamma)
        due = [self.target_is_due]
        due += [step % self.target_update_interval == 0 for step in range(gradient_steps)]
        *taus, self.target_is_due = due
        tau = self.tau * torch.tensor(taus, dtype=torch.float32)
        batch = data.observations, data.actions, data.next_observations, data.dones, data.rewards
        _, *values = self.executor(tau, *batch, discounts)

        self._n_updates += gradient_steps
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        for name, value in zip(LOSSES, values, strict=True):
            if name != "ent_coef_loss" or self.ent_coef_optimizer is not None:
                self.logger.record(f"train/{name}", value.mean().item())

    def get_parameters(self) -> dict[str, dict]:
        """Return what ``save`` writes, with the target networks as SB3 has them after ``train``."""
        if self.target_is_due:
            polyak_update(self.critic.parameters(), self.critic_target.parameters(), self.tau)
            self.target_is_due = False
            self.executor.copyWeightsToDevice()
        return super().get_parameters()

    def set_parameters(self, *args: Any, **keywords: Any) -> None:
        super().set_parameters(*args, **keywords)
        self.target_is_due = False
        if self.executor is not None and self.executor.isAttachedToDevice():
            self.executor.copyWeightsToDevice()

    def _excluded_save_params(self) -> list[str]:
        own = ["executor", "updates_per_call", "target_is_due"]
        return [*super()._excluded_save_params(), *own]


def learned(kind: type[SAC], seed: int, arguments: argparse.Namespace) -> SAC:
    """Train on the pendulum."""
    model = kind(
        "MlpPolicy",
        "Pendulum-v1",
        learning_rate=1e-3,
        train_freq=arguments.updates,
        gradient_steps=arguments.updates,
        policy_kwargs={"net_arch": arguments.layers},
        seed=seed,
        device="cpu",
    )
    return model.learn(arguments.steps)


def compare(runs: Sequence[side_by_side.Run], models: Sequence[SAC], rounds: int) -> None:
    """Let two models make the same number of updates, alternating."""
    for number in range(rounds * 10):
        for run, model in zip(runs, models, strict=True):
            start = time.perf_counter()
            model.train(model.gradient_steps, model.batch_size)
            run.seconds.append(time.perf_counter() - start)
            if number % 10 == 9:
                run.speeds.append(10 * model.gradient_steps / sum(run.seconds[-10:]))


def said(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f})"


def plot(runs: Sequence[side_by_side.Run], curves: Sequence[Any], path: Path, title: str) -> None:
    """Save returns and speeds as a picture."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (returns, speeds) = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for run, of_seeds in zip(runs, curves, strict=True):
        episodes = range(1, min(map(len, of_seeds)) + 1)
        at = [[curve[number - 1] for curve in of_seeds] for number in episodes]
        returns.plot(episodes, [statistics.median(each) for each in at], label=run.name)
        returns.fill_between(episodes, [*map(min, at)], [*map(max, at)], alpha=0.2)
        speeds.plot(range(1, len(run.speeds) + 1), run.speeds, "o-", label=run.name)
    returns.set(xlabel="episode", ylabel="return: median and range")
    speeds.set(xlabel="round", ylabel="updates per second", ylim=(0, None))
    returns.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def main(words: Sequence[str] | None = None) -> list[side_by_side.Run]:
    """Train both with several seeds, then alternate between them."""
    parser = side_by_side.parser(__doc__)
    parser.add_argument("--steps", type=int, default=5000, help="of the environment")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=8, help="per call, and steps between calls")
    parser.add_argument("--layers", type=int, nargs="+", default=[64, 64])
    parser.add_argument("--threads", type=int, default=1, help="small layers gain from no more")
    arguments = parser.parse_args(words)
    torch.set_num_threads(arguments.threads)
    if arguments.small:
        arguments.steps, arguments.seeds = 400, 1
    CompiledSAC.backend = os.environ.get("POPTORCH_BACKEND", "optimise")
    kinds, curves = (SAC, CompiledSAC), []
    for kind in kinds:
        models = [learned(kind, seed, arguments) for seed in range(arguments.seeds)]
        curves.append([[each["r"] for each in model.ep_info_buffer] for model in models])
        last = [statistics.mean(curve[-10:]) for curve in curves[-1]]
        print(f"{kind.__name__}: return of the last 10 episodes {said(last)}", flush=True)
    models = [
        learned(kind, 0, argparse.Namespace(**vars(arguments) | {"steps": 200})) for kind in kinds
    ]
    names = "stable-baselines3", "poptorch"
    runs = [side_by_side.Run(name, model.policy) for name, model in zip(names, models, strict=True)]
    compare(runs, models, 2 if arguments.small else 6)
    for run in runs:
        print(f"{run.name}: {said(run.speeds[1:])} updates/s, median and range of rounds")
    print(side_by_side.ratio(runs))
    layers = " and ".join(map(str, arguments.layers))
    if arguments.plot:
        plot(
            runs,
            curves,
            arguments.plot,
            f"SAC with layers of {layers}, {arguments.updates} updates a call",
        )
    if arguments.save:
        models[-1].save(arguments.save)
    return runs


if __name__ == "__main__":
    main()
