"""What the HTTP server needs from the engine and the tokenizer, and nothing more.

The server is written against these protocols so that its wire behaviour can be tested with a scripted engine, without
torch or a model; `engine.service.EngineService` and `model.tokenizer.Tokenizer` are the real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from speccache_runtime.config import StorageConfig
from speccache_runtime.core import Finish, Limits, Output, Request
from speccache_runtime.engine.storage_report import Flushed, StorageReport


class Engine(Protocol):
    """The engine as the server sees it. Every method may be called from any thread."""

    @property
    def ready(self) -> bool:
        """True from the end of `start` until `drain` or `stop` is called or the engine fails."""
        ...

    @property
    def failed(self) -> str | None:
        """One line that says what ended the engine for good, or None. All running requests got an error output."""
        ...

    @property
    def stalled(self) -> str | None:
        """One line while the engine has done nothing for so long that it hangs, or None. It may still go on."""
        ...

    @property
    def limits(self) -> Limits:
        """Only valid after `start` has returned."""
        ...

    def start(self) -> None:
        """Load the model and start the engine thread. Blocks until requests can be taken; raises SpecCacheError."""
        ...

    def submit(self, request: Request, on_output: Callable[[Output], None]) -> None:
        """Queue a request. `on_output` is called from the engine thread and gets exactly one output with `finish`.

        Raises BadRequest, Overloaded or Draining; then `on_output` is never called.
        """
        ...

    def abort(self, request_id: str, finish: Finish = Finish.ABORT) -> None:
        """End a request early; it still gets its last output, with `finish`. An unknown or finished one is ignored."""
        ...

    def drain(self, request_timeout: float, flush_timeout: float) -> None:
        """Take no more requests, finish the running ones within `request_timeout` seconds (abort the rest), write to
        storage what it lacks within `flush_timeout` seconds, then return."""
        ...

    def wait_over(self) -> str | None:
        """Block until the engine thread has ended and all requests have; why it failed, None if it was stopped."""
        ...

    def stop(self) -> None:
        """End the engine thread and free the model. Safe to call twice and after a failed start."""
        ...


class StorageAdmin(Protocol):
    """The storage tier as the admin port sees it (`engine.administration.StorageAdministration`). Every method blocks,
    may be called from any thread, and raises Unavailable when it is not the time."""

    def report(self) -> StorageReport:
        """What is attached, and how it is."""
        ...

    def attach(self, storage: StorageConfig) -> None:
        """Put `storage` in the place of what is attached. Raises StorageError, BadRequest or Conflict; then nothing has
        changed."""
        ...

    def detach(self) -> None:
        """Use no storage from here on. Raises Conflict."""
        ...

    def flush(self, timeout: float) -> Flushed:
        """Write all that storage lacks, within `timeout` seconds. Raises Conflict without storage."""
        ...


class Detokenizer(Protocol):
    """Turns one request's tokens into text bit by bit; holds back bytes of an unfinished character."""

    def push(self, ids: Sequence[int]) -> str:
        """Text that is certain after these tokens; may be empty."""
        ...

    def flush(self) -> str:
        """Whatever is still held back, with replacement characters for broken bytes."""
        ...


class Tokenizer(Protocol):
    """Text to tokens and back."""

    def encode(self, text: str, *, rendered: bool = False) -> list[int]:
        """Token ids of `text`, with the special tokens that the model puts around a text; `rendered`: a text that has
        them already, from `render_chat`. Raises BadRequest."""
        ...

    def detokenizer(self, after: Sequence[int] = ()) -> Detokenizer:
        """A fresh detokenizer for text that follows the tokens `after`."""
        ...

    def render_chat(self, messages: Sequence[dict[str, str]]) -> str:
        """The prompt text of a conversation; each message has `role` and `content`. Raises BadRequest."""
        ...
