"""What a right request gets, whole and streamed."""

from __future__ import annotations

import pytest

from speccache_runtime.core import Finish


def test_completion(wire):
    """The whole answer, and the usage that only this server gives."""
    body = wire.complete().json()
    assert body["object"] == "text_completion"
    assert body["model"] == "m"
    assert body["choices"] == [{"index": 0, "text": "hello world", "logprobs": None, "finish_reason": "length"}]
    assert body["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 11,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 3, "device": 1, "host": 0, "storage": 2, "draft_absent": 1},
        "speculation": {
            "verify_steps": 2,
            "accept_length": 5.5,
            "accept_length_first64": 5.5,
            "verify_steps_first64": 2,
            "tokens_first64": 11,
            "accepted_by_step": [3, 1],
        },
    }


def test_chat(wire):
    """The conversation goes through the chat template; text parts are joined; developer is system."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    body = wire.say(messages=messages).json()
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "hello world", "refusal": None}
    assert bytes(wire.engine.requests[0].prompt) == b"system:be brief\nuser:ab\n"


def test_completion_stream(wire, events):
    """Chunks, then a chunk with the reason, then [DONE]."""
    answer = wire.complete(stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events(answer)
    assert done == "[DONE]"
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["hello", " world", ""]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "length"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert not any("usage" in chunk for chunk in chunks)


def test_chat_stream_with_usage(wire, events):
    """The role first, deltas, the reason, and usage in a chunk without choices."""
    *chunks, usage, done = events(wire.say(stream=True, stream_options={"include_usage": True}))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "hello"}, {"content": " world"}, {}]
    assert {chunk["object"] for chunk in [*chunks, usage]} == {"chat.completion.chunk"}
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 11
    assert done == "[DONE]"


def test_defaults_reach_the_engine(wire):
    """OpenAI's defaults: 16 tokens for completions, what is left of the context for chat, temperature 1."""
    wire.complete(), wire.say()
    completion, chat = (request.params for request in wire.engine.requests)
    assert (completion.max_tokens, chat.max_tokens) == (16, 1000 - len("user:hi\n"))
    assert (completion.temperature, completion.top_p) == (1.0, 1.0)
    assert completion.stop_token_ids == {256}
    assert completion.seed != chat.seed


def test_default_length_fits_the_context(wire):
    """Sixteen tokens are a default, not a reason to refuse."""
    assert wire.complete(prompt="x" * 995).status_code == 200
    assert wire.engine.requests[0].params.max_tokens == 5


def test_parameters_reach_the_engine(wire):
    """Nothing is lost on the way."""
    wire.complete(prompt=[1, 2, 299], max_tokens=7, temperature=0.5, top_p=0.25, seed=-3)
    request = wire.engine.requests[0]
    assert request.prompt == (1, 2, 299)
    assert (request.params.max_tokens, request.params.temperature) == (7, 0.5)
    assert (request.params.top_p, request.params.seed) == (0.25, -3)
    wire.say(max_completion_tokens=9)
    assert wire.engine.requests[1].params.max_tokens == 9


def test_end_of_text_token_is_no_text(wire, events):
    """It counts in usage and is not shown."""
    wire.engine.script = [b"bye", Finish.STOP]
    body = wire.complete().json()
    assert body["choices"][0] == {"index": 0, "text": "bye", "logprobs": None, "finish_reason": "stop"}
    assert body["usage"]["completion_tokens"] == 4
    assert [e["choices"][0]["text"] for e in events(wire.complete(stream=True))[:-1]] == ["bye", ""]


@pytest.mark.parametrize("cut", range(1, 12))
def test_characters_cut_between_tokens(wire, events, cut):
    """No chunk holds half a character, whatever the engine's cuts are."""
    data = "naïve 🙂 ü".encode()
    wire.engine.script = [data[:cut], data[cut:], Finish.LENGTH]
    texts = [event["choices"][0]["text"] for event in events(wire.complete(stream=True))[:-1]]
    assert "".join(texts) == "naïve 🙂 ü"
    assert not any("\ufffd" in text for text in texts)


def test_broken_character_at_the_end(wire):
    """A text cut by its length limit inside a character ends with a replacement character."""
    wire.engine.script = ["ü".encode()[:1], Finish.LENGTH]
    assert wire.complete().json()["choices"][0]["text"] == "\ufffd"


def test_empty_text(wire, events):
    """A request that ends at once still gets a whole answer."""
    wire.engine.script = [Finish.STOP]
    assert wire.complete().json()["choices"][0]["text"] == ""
    assert events(wire.complete(stream=True))[-1] == "[DONE]"


def test_models(wire):
    """The list, one model, and one that is not there."""
    listed = wire.http.get("/v1/models").json()
    assert [entry["id"] for entry in listed["data"]] == ["m"]
    assert wire.http.get("/v1/models/m").json() == listed["data"][0]
    assert wire.http.get("/v1/models/a/b").json()["error"]["code"] == "model_not_found"


def test_metrics(wire):
    """The registry that was passed in, as Prometheus text."""
    wire.counter.inc()
    answer = wire.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    assert "speccache_test_total 1.0" in answer.text
