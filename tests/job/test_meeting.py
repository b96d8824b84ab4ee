"""Processes of one start of a job meet, whatever an earlier start left in the store."""

from __future__ import annotations

import datetime
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch.distributed as dist

import poptorch
from helpers.patience import HANGS, eventually
from poptorch._job.meeting import meet

LIMIT = datetime.timedelta(seconds=HANGS)


def test_each_start_has_a_name_of_its_own() -> None:
    store, names = dist.HashStore(), []
    with ThreadPoolExecutor(3) as pool:
        for first in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
            started: list[Future[str]] = []
            for index in first:
                before = store.get("invited") if store.check(["invited"]) else b""
                started.append(pool.submit(meet, store, index, 3, LIMIT))
                if index == 0 and names:  # it invites those of the last start, which do not come
                    assert eventually(lambda before=before: store.get("invited") != before)
            (name,) = {each.result(HANGS) for each in started}
            names.append(name)
    assert len({*names}) == 3


def test_who_does_not_come_is_named() -> None:
    with pytest.raises(poptorch.Error, match=r"process 0 of 3 has waited 0 s for 1, 2"):
        meet(dist.HashStore(), 0, 3, datetime.timedelta(seconds=0.01))
