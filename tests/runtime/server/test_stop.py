"""Stop strings: found across tokens, never shown, and the engine stops working for them."""

from __future__ import annotations

import pytest

from speccache_runtime.core import Finish
from speccache_runtime.server.text import StopFinder

pytestmark = pytest.mark.program


@pytest.mark.parametrize("size", range(1, 8))
@pytest.mark.parametrize(
    ("stops", "shown"),
    [
        (["END"], "one two "),
        (["wo E"], "one t"),
        (["XYZ", "two"], "one "),
        (["E", "END"], "one two "),
        (["ND", "EN"], "one two "),
        (["three"], "one two END"),
        (["ENDING", "END!"], "one two END"),
        ([], "one two END"),
    ],
)
def test_found_wherever_the_text_is_cut(stops, shown, size):
    """The text before the first stop string, for any size of pieces."""
    finder = StopFinder(stops)
    text = "one two END"
    out = "".join(finder.push(text[i : i + size]) for i in range(0, len(text), size))
    out += "" if finder.found else finder.flush()
    assert out == shown


def test_nothing_is_held_back_without_need():
    """Text that cannot begin a stop string is passed on at once."""
    finder = StopFinder(["\n\n"])
    assert finder.push("abc") == "abc"
    assert finder.push("d\n") == "d"
    assert finder.push("e") == "\ne"


def test_stop_across_tokens(wire):
    """The answer ends before the stop string, says stop, and has the usage of what was computed."""
    wire.engine.script = [b"one E", b"N", b"D two", b" three", Finish.LENGTH]
    body = wire.complete(stop="END").json()
    assert body["choices"][0]["text"] == "one "
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] >= 11


def test_stop_aborts_the_engine(wire, events):
    """Nobody waits for the rest, so it is not computed; for the engine too the request has stopped, not failed."""
    wire.engine.script = [b"a.b", *[b"x"] * 10_000, Finish.LENGTH]
    *chunks, usage, done = events(wire.complete(stream=True, stop=["."], stream_options={"include_usage": True}))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "a"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert done == "[DONE]"
    assert wire.engine.aborted == {wire.engine.requests[0].request_id: Finish.STOP}
    assert usage["usage"]["completion_tokens"] < 10_000


def test_stop_that_does_not_come(wire):
    """Text that only began like the stop string is shown when the request ends."""
    wire.engine.script = [b"one EN", Finish.LENGTH]
    assert wire.complete(stop="END").json()["choices"][0]["text"] == "one EN"


def test_stop_in_the_last_tokens(wire):
    """Found in the same step that ends the request: stop wins over length."""
    wire.engine.script = [b"one END", Finish.LENGTH]
    choice = wire.complete(stop="END").json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("one ", "stop")
