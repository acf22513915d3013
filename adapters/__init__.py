"""One file per wire format: bytes to graph and back. Pure."""
