"""Whose an exchange is: what one credential's requests bring about must not be seen in another one's."""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

Headers = Sequence[tuple[bytes, bytes]]

_CREDENTIALS: Final = (b"authorization", b"x-api-key", b"api-key", b"x-goog-api-key")


def owner_of(headers: Headers, names: Sequence[bytes], key: bytes, owner_from: bytes = b"") -> str:
    """A keyed digest of the header `owner_from` where it is set and sent, else of the credential; "" without either.

    `names` are the headers' names in lower case, `owner_from` is one too. Nobody can read the credential from it.
    """
    for wanted in (owner_from, *_CREDENTIALS) if owner_from else _CREDENTIALS:
        if wanted in names:
            value = headers[names.index(wanted)][1].strip()
            return blake2b(value, key=key, digest_size=8, person=b"owner").hexdigest()
    return ""
