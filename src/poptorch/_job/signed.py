"""Sign the values in a store on the network with the job's key.

Torch's store accepts values from everybody who connects. Values from somebody without the key are
refused.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Any

from .._base.errors import StateError

_DIGITS = 2 * hashlib.sha256().digest_size


class SignedStore:
    """``name`` distinguishes stores with the same key, so that a value from one is not valid in
    another.
    """

    def __init__(self, inner: Any, key: str, name: str) -> None:
        self._inner, self._key, self._name = inner, key.encode(), name

    def set(self, key: str, value: str) -> None:
        self._inner.set(key, self._digest(key, value) + value)

    def get(self, key: str) -> bytes:
        return self._opened(key, self._inner.get(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        found = self._inner.multi_get(keys)
        return [self._opened(key, signed) for key, signed in zip(keys, found, strict=True)]

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._inner.check(keys))

    def delete_key(self, key: str) -> None:
        self._inner.delete_key(key)

    def clone(self) -> SignedStore:
        return SignedStore(self._inner.clone(), self._key.decode(), self._name)

    def _digest(self, key: str, value: str) -> str:
        signed = b"\0".join([self._name.encode(), key.encode(), value.encode()])
        return hmac.new(self._key, signed, hashlib.sha256).hexdigest()

    def _opened(self, key: str, signed: bytes) -> bytes:
        value = signed[_DIGITS:]
        expected = self._digest(key, value.decode(errors="replace")).encode()
        if not hmac.compare_digest(signed[:_DIGITS], expected):
            raise StateError(
                "A process of this job received a message without a valid signature",
                got=f"a value of {key} that is not signed with the secret of this job",
                fix=(
                    "set POPTORCH_JOB_KEY to the same secret for all processes of the job",
                    "allow only the hosts of the job to reach the network of MASTER_ADDR",
                ),
            )
        return value
