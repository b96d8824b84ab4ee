"""What agents on several hosts read is what one of them has written."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from poptorch._cli import launching, meeting, poprun


def test_states_are_exchanged_by_those_who_have_the_key() -> None:
    store = HashStore()
    one, two = (
        meeting.SignedBackend(C10dRendezvousBackend(store, "job"), b"key") for _ in range(2)
    )
    assert one.get_state() is None
    state, token, was_set = one.set_state(b"first")
    assert (state, was_set) == (b"first", True)
    assert two.get_state() == (b"first", token)
    assert two.set_state(b"second", token)[::2] == (b"second", True)
    assert one.set_state(b"third", token)[::2] == (b"second", False)  # it was another one's turn


def test_what_others_write_is_not_read() -> None:
    store = HashStore()
    other = C10dRendezvousBackend(store, "job")
    mine = meeting.SignedBackend(C10dRendezvousBackend(store, "job"), b"key")
    _, token, _ = mine.set_state(b"mine")
    for forged in (b"", b"x" * 100, other.get_state()[0] + b"x"):
        _, token, _ = other.set_state(forged, token)
        with pytest.raises(RendezvousStateError):
            mine.get_state()
        with pytest.raises(RendezvousStateError):
            mine.set_state(b"mine", b"another token")


def test_the_name_of_a_job_does_not_tell_its_key() -> None:
    job = poprun._job(poprun.parser(), vars(poprun.parser().parse_args(["true"])))
    config = launching._config(job, "localhost:1/1/secret/localhost/0", "")
    assert config.rdzv_backend == meeting.BACKEND
    assert config.rdzv_configs["key"] == "secret"
    assert "secret" not in config.run_id
    again = launching._config(job, "localhost:1/1/secret", "")
    assert again.run_id == config.run_id
