"""Two hosts: processes in two network namespaces train together."""

from pathlib import Path

import pytest
import torch
from torch import nn

from helpers import job_hosts, jobs


@pytest.mark.long
def test_processes_on_two_hosts_train_together(tmp_path: Path) -> None:
    shell = tmp_path / "shell"
    shell.write_text('#!/bin/sh\nexec ip netns exec poptorch-a sh -c "$2"\n')
    shell.chmod(0o755)
    hosts = tmp_path / "hosts"
    hosts.write_text("".join(f"{address}\n" for address in reversed(job_hosts.HOSTS.values())))
    variables = {"POPTORCH_REMOTE_SHELL": str(shell), "GLOO_SOCKET_IFNAME": job_hosts.INTERFACE}
    arguments = [f"--hostfile={hosts}", "--num-instances=2"]
    output = tmp_path / "out"
    try:
        with job_hosts.two_hosts():
            process = jobs.fork(
                "helpers.job_hosts", arguments, output, jobs.environment(**variables)
            )
            try:
                status = jobs.status(process)
            finally:
                jobs.end([process])
    except job_hosts.UnavailableError as error:
        pytest.skip(f"no network namespaces: {error}")
    printed = output.read_text()
    assert status == 0, printed
    addresses = [line.split() for line in printed.splitlines() if "address" in line.split()]
    far, near = job_hosts.HOSTS.values()
    assert sorted(addresses) == [["[0]", "address", near], ["[1]", "address", far]]
    lines = [line for line in printed.splitlines() if "weights" in line]
    assert {line.split()[0] for line in lines} == {"[0]", "[1]"}
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.cat([torch.arange(12.0).view(4, 3) / 10 + process for process in range(2)])
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x.sum(1)).backward()
        optimizer.step()
    for line in lines:
        ours = torch.tensor([[float(word.strip("[],")) for word in line.split()[2:]]])
        torch.testing.assert_close(ours, model[0].weight.detach())
