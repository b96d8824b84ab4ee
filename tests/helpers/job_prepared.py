"""Imported by the process that jobs are forked from: all that a job imports when it trains."""

import torch
import torch.distributed
import torch.distributed.elastic.multiprocessing.errors
import torch.distributed.launcher.api
import torch.distributed.rendezvous

from helpers import job_cases, job_fault, jobs  # noqa: F401 (what jobs run)

torch.set_num_threads(1)  # a pool of threads would not survive the fork
# With CUDA built in, fake tensors start threads of autograd's, without which a fork cannot train.
if not torch.backends.cuda.is_built():
    with torch.random.fork_rng():
        job_cases.run(job_cases.CASES["adam of torch, post and loss"], 0, 1)
