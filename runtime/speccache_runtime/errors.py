"""Every error the runtime raises on purpose.

SpecCacheError
├── ConfigError        wrong configuration: the start stops with one line that names the field and the remedy
├── ModelError         model files missing, broken, or target and draft do not fit together: the start stops
├── RankError          another rank of this replica is gone or hangs: every request ends with an error, then the process
├── EngineFailed       the engine cannot go on; every request has been answered: the process ends
├── StorageError       a storage tier cannot be opened: the start stops; later errors are counted misses instead
├── BadRequest         the client's fault: HTTP 400, `field` names what to change
├── Conflict           not as things are: HTTP 409
└── Unavailable        not now: HTTP 503 with Retry-After
    ├── Overloaded     the waiting queue is full
    └── Draining       the engine is shutting down
"""


class SpecCacheError(Exception):
    """Base of all errors raised on purpose; its text is one line that can be shown to a user."""


class ConfigError(SpecCacheError):
    """A setting is wrong; the text names the setting and says what to write instead."""


class ModelError(SpecCacheError):
    """Model files are missing or broken, or target and draft do not fit together."""


class RankError(SpecCacheError):
    """Another rank of this replica has ended, hangs, or says what it should not."""


class EngineFailed(SpecCacheError):
    """The engine has ended for good, and every request with an error."""


class StorageError(SpecCacheError):
    """A storage tier cannot be opened or has refused a whole operation."""


class BadRequest(SpecCacheError):
    """A request that can never succeed as sent.

    `field` is the name of the offending request field: "prompt" or "max_tokens", which some clients write otherwise, or
    as the client wrote it. `code` is OpenAI's word for the fault.
    """

    def __init__(self, field: str, message: str, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.field = field
        self.code = code


class Conflict(SpecCacheError):
    """What was asked cannot be done as things are; `code` is a short word for why."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class Unavailable(SpecCacheError):
    """The engine cannot take the request now; `retry_after` is in seconds."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Overloaded(Unavailable):
    """The waiting queue is full."""

    def __init__(self, message: str, retry_after: int = 5) -> None:
        super().__init__(message, retry_after)


class Draining(Unavailable):
    """The engine is finishing its last requests before it exits."""


def unicode_fault(text: str) -> str | None:
    """Why `text` cannot be written down, None if it can: JSON may hold half of a pair that is one character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"not valid Unicode: half of a surrogate pair at character {error.start}"
    return None
