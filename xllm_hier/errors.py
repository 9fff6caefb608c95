"""The exception tree: every error a user or another process may meet, each with advice."""

from __future__ import annotations


class XllmError(Exception):
    """Root of all errors raised on purpose by xllm_hier; catching it never hides a programming mistake."""


class ConfigError(XllmError):
    """A setting cannot be used; raised before any process starts.

    `name` is the flag without dashes, `value` the given value, `allowed` a phrase that completes "allowed: ...".
    """

    def __init__(self, name: str, value: object, allowed: str) -> None:
        super().__init__(f"--{name}={value!r} cannot be used; allowed: {allowed}")
        self.name = name
        self.value = value
        self.allowed = allowed

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return ConfigError, (self.name, self.value, self.allowed)


class RequestError(XllmError):
    """A request cannot be served as asked; the API turns it into HTTP `status` with OpenAI's error body.

    `param` names the field of the request, None when no single field is at fault.
    """

    def __init__(self, message: str, *, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.status = status


class EngineDeadError(XllmError):
    """The engine, or a process it needs, is gone; open requests fail with HTTP 503 and this text."""


class StartupError(XllmError):
    """A process of the instance did not come up; the text says which one and why."""


class WireError(XllmError):
    """A message between processes did not decode: unknown tag, wrong field count, or broken msgpack."""


class TransferError(XllmError):
    """A copy between device and host failed; the blocks it was to fill hold nothing."""


class StoreError(XllmError):
    """The store could not be set up as asked; in a running instance it means misses, never an end."""


class InvariantError(XllmError):
    """A block was used against its life cycle (DESIGN: one life for every block); always a fault of ours."""
