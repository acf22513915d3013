"""Turngate: a sidecar that keeps illegal message sequences from providers and half tool calls from apps."""

__version__ = "0.1.0"
