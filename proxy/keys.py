"""Secret keys in files of their own: made at first use, readable by their owner only."""

import os
import secrets
from pathlib import Path


def load_or_create_key(path: Path, nbytes: int) -> bytes:
    """The key in `path`, made if there is none; of several processes that make it at once, all get the same.

    The file holds hexadecimal digits, so that people can copy it. Raises OSError, and ValueError for a file that
    holds no key of `nbytes` bytes.
    """
    try:
        text = path.read_text("ascii")
    except FileNotFoundError:
        text = _create(path, secrets.token_hex(nbytes))
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != nbytes:
        raise ValueError(f"{path} holds no key of {nbytes} bytes in hex. Remove it to have a new one made.")
    return key


def _create(path: Path, text: str) -> str:
    """Write beside the target and link: nobody ever sees half a key, and the first one wins."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(descriptor)
        os.link(beside, path)
    except FileExistsError:
        return path.read_text("ascii")
    finally:
        beside.unlink()
    return text
