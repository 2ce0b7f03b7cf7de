"""Every field is supported or refused with its name: one table of wrong bodies, one of values that ask for nothing."""

from __future__ import annotations

import http.client
from typing import Any

import pytest

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "hi"}

WRONG: list[tuple[str, dict[str, Any], int, str | None]] = [
    # the model
    (TEXT, {"model": None}, 400, "model"),
    (TEXT, {"model": 3}, 400, "model"),
    (TEXT, {"model": "other"}, 404, "model"),
    (CHAT, {"model": "other"}, 404, "model"),
    # the prompt
    (TEXT, {"prompt": None}, 400, "prompt"),
    (TEXT, {"prompt": ""}, 400, "prompt"),
    (TEXT, {"prompt": []}, 400, "prompt"),
    (TEXT, {"prompt": ["a", "b"]}, 400, "prompt"),
    (TEXT, {"prompt": [[1, 2]]}, 400, "prompt"),
    (TEXT, {"prompt": [1, True]}, 400, "prompt"),
    (TEXT, {"prompt": [1, -1]}, 400, "prompt"),
    (TEXT, {"prompt": [1, 300]}, 400, "prompt"),
    (TEXT, {"prompt": {"text": "hi"}}, 400, "prompt"),
    (TEXT, {"prompt": "x" * 1000}, 400, "prompt"),
    (TEXT, {"prompt": "x" * 990, "max_tokens": 11}, 400, "max_tokens"),
    # messages
    (CHAT, {"messages": None}, 400, "messages"),
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {"messages": "hi"}, 400, "messages"),
    (CHAT, {"messages": ["hi"]}, 400, "messages[0]"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages[0].content"),
    (CHAT, {"messages": [{"content": "hi"}]}, 400, "messages[0].role"),
    (CHAT, {"messages": [USER, {"role": "tool", "content": "4"}]}, 400, "messages[1].role"),
    (CHAT, {"messages": [{"role": "user", "content": 4}]}, 400, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": []}]}, 400, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, 400, "messages[0].content"),
    (CHAT, {"messages": [USER | {"name": "bob"}]}, 400, "messages[0].name"),
    (CHAT, {"messages": [USER | {"tool_calls": [{"id": "1"}]}]}, 400, "messages[0].tool_calls"),
    (CHAT, {"messages": [USER | {"extra": 1}]}, 400, "messages[0].extra"),
    (CHAT, {"messages": [USER | {"content": "x" * 1000}]}, 400, "messages"),
    (CHAT, {"messages": [USER, {"role": "system", "content": "hi"}]}, 400, "messages"),
    # lengths
    (TEXT, {"max_tokens": 0}, 400, "max_tokens"),
    (TEXT, {"max_tokens": "16"}, 400, "max_tokens"),
    (TEXT, {"max_tokens": 1.5}, 400, "max_tokens"),
    (TEXT, {"max_tokens": True}, 400, "max_tokens"),
    (TEXT, {"max_tokens": 999}, 400, "max_tokens"),
    (CHAT, {"max_completion_tokens": 999}, 400, "max_completion_tokens"),
    (CHAT, {"max_tokens": 1, "max_completion_tokens": 1}, 400, "max_tokens"),
    (TEXT, {"max_completion_tokens": 1}, 400, "max_completion_tokens"),
    # the salt
    (TEXT, {"cache_salt": ""}, 400, "cache_salt"),
    (CHAT, {"cache_salt": ""}, 400, "cache_salt"),
    (TEXT, {"cache_salt": 7}, 400, "cache_salt"),
    (TEXT, {"cache_salt": ["a"]}, 400, "cache_salt"),
    (TEXT, {"cache_salt": "x" * 513}, 400, "cache_salt"),
    # sampling
    (TEXT, {"temperature": -0.1}, 400, "temperature"),
    (TEXT, {"temperature": 2.1}, 400, "temperature"),
    (TEXT, {"temperature": "0"}, 400, "temperature"),
    (TEXT, {"top_p": 0}, 400, "top_p"),
    (TEXT, {"top_p": 1.1}, 400, "top_p"),
    (TEXT, {"seed": 1.5}, 400, "seed"),
    (TEXT, {"seed": 2**63}, 400, "seed"),
    # stop strings
    (TEXT, {"stop": ""}, 400, "stop"),
    (TEXT, {"stop": ["a", ""]}, 400, "stop"),
    (TEXT, {"stop": ["a", "b", "c", "d", "e"]}, 400, "stop"),
    (TEXT, {"stop": [1]}, 400, "stop"),
    (TEXT, {"stop": "x" * 1025}, 400, "stop"),
    # streaming
    (TEXT, {"stream": "yes"}, 400, "stream"),
    (TEXT, {"stream_options": {"include_usage": True}}, 400, "stream_options"),
    (TEXT, {"stream": True, "stream_options": {"include_usage": 1}}, 400, "stream_options.include_usage"),
    (TEXT, {"stream": True, "stream_options": {"other": True}}, 400, "stream_options.other"),
    # what OpenAI has and this server has not
    (TEXT, {"n": 2}, 400, "n"),
    (TEXT, {"n": True}, 400, "n"),
    (TEXT, {"best_of": 2}, 400, "best_of"),
    (TEXT, {"echo": True}, 400, "echo"),
    (TEXT, {"suffix": "x"}, 400, "suffix"),
    (TEXT, {"logprobs": 0}, 400, "logprobs"),
    (CHAT, {"logprobs": True}, 400, "logprobs"),
    (CHAT, {"top_logprobs": 2}, 400, "top_logprobs"),
    (TEXT, {"logit_bias": {"5": 1}}, 400, "logit_bias"),
    (TEXT, {"presence_penalty": 0.5}, 400, "presence_penalty"),
    (CHAT, {"frequency_penalty": 0.5}, 400, "frequency_penalty"),
    (CHAT, {"tools": [{"type": "function"}]}, 400, "tools"),
    (CHAT, {"tool_choice": "required"}, 400, "tool_choice"),
    (CHAT, {"response_format": {"type": "json_object"}}, 400, "response_format"),
    (CHAT, {"reasoning_effort": "low"}, 400, "reasoning_effort"),
    (CHAT, {"modalities": ["text", "audio"]}, 400, "modalities"),
    (CHAT, {"store": True}, 400, "store"),
    (CHAT, {"prediction": {"type": "content"}}, 400, "prediction"),
    # what nobody has
    (TEXT, {"top_k": 5}, 400, "top_k"),
    (CHAT, {"prompt": "hi"}, 400, "prompt"),
    (TEXT, {"user": 5}, 400, "user"),
]

NEUTRAL: list[tuple[str, dict[str, Any]]] = [
    (
        TEXT,
        {"n": 1, "best_of": 1, "echo": False, "logprobs": None, "suffix": None, "logit_bias": {}, "user": "me"}
        | {"presence_penalty": 0, "frequency_penalty": 0.0, "seed": None, "stop": None, "stream": None},
    ),
    (
        CHAT,
        {"n": 1, "logprobs": False, "top_logprobs": None, "tools": [], "tool_choice": "none", "store": False}
        | {"response_format": {"type": "text"}, "modalities": ["text"], "metadata": None, "service_tier": "auto"}
        | {"messages": [{"role": "assistant", "content": "hi", "refusal": None, "tool_calls": []}, USER]},
    ),
]


@pytest.mark.parametrize(("path", "fields", "status", "param"), WRONG, ids=[f"{w[0][4:]}-{w[1]}"[:70] for w in WRONG])
def test_wrong_field(wire, path, fields, status, param):
    """The answer names the field, has OpenAI's shape, and the engine never hears of the request."""
    body = (wire.chat if path == CHAT else wire.completion) | fields
    body = {name: value for name, value in body.items() if value is not None}
    answer = wire.http.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param)
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert param is None or param.split(".")[0].split("[")[0] in error["message"]
    assert "\n" not in error["message"]
    assert wire.engine.requests == []


@pytest.mark.parametrize(("path", "fields"), NEUTRAL)
def test_values_that_ask_for_nothing(wire, path, fields):
    """Client libraries fill in defaults; those are accepted."""
    body = (wire.chat if path == CHAT else wire.completion) | fields
    assert wire.http.post(path, json=body).status_code == 200


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b'{"model": "m"',
        b"[]",
        b'"hi"',
        b"null",
        b"[" * 10_000,
        b"\xff\xfe",
        b'{"model": "m", "prompt": "\xff"}',
        b'{"model": "m", "prompt": "hi", "temperature": NaN}',
    ],
)
def test_malformed_json(wire, raw):
    """Broken bodies are the client's fault, and said so in the same shape."""
    for path in (TEXT, CHAT):
        answer = wire.http.post(path, content=raw)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")


@pytest.mark.parametrize(
    ("path", "raw", "param"),
    [
        (TEXT, r'{"model": "m", "prompt": "a\ud800b"}', "prompt"),
        (TEXT, r'{"model": "m", "prompt": "hi", "stop": ["a", "\udc00"]}', "stop[1]"),
        (TEXT, r'{"model": "m\ud800", "prompt": "hi"}', "model"),
        (CHAT, r'{"messages": [{"role": "user", "content": "\ude00\ud83d"}], "model": "m"}', "messages[0].content"),
        (TEXT, r'{"model": "m", "prompt": "hi", "\ud800": 1}', r"'\ud800'"),
        (TEXT, '{"model": "m", "prompt": "hi", "seed": %s}' % ("9" * 5000), "seed"),
        (TEXT, '{"model": "m", "prompt": "hi", "seed": -%s}' % ("9" * 4000), "seed"),
        (TEXT, '{"model": "m", "prompt": "hi", "temperature": %s}' % ("9" * 4000), "temperature"),
        (TEXT, '{"model": "m", "prompt": "hi", "max_tokens": %s}' % ("9" * 4000), "max_tokens"),
        (TEXT, '{"model": "m", "prompt": [1, %s]}' % ("9" * 5000), "prompt[1]"),
        (TEXT, '{"model": "m", "prompt": [1, %s]}' % ("9" * 4000), "prompt"),
        (TEXT, '{"model": "m", "prompt": "hi", "temperature": 1e999}', "temperature"),
    ],
    ids=lambda value: value[:60],
)
def test_values_that_json_can_write_and_python_cannot_hold(wire, path, raw, param):
    """They are the client's fault too, and named: half a character, a number of thousands of digits."""
    answer = wire.http.post(path, content=raw)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert answer.json()["error"]["message"].startswith(param + ": ")
    assert wire.engine.requests == []


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("", "''"),
        ("\n", r"'\n'"),
        ("a b", "'a b'"),
        ("\u00e9\u2028", r"'\xe9\u2028'"),
        ("x" * 100_000, repr("x" * 64)),
        ("top_k", "top_k"),
    ],
)
def test_unknown_field_with_an_odd_name(wire, name, shown):
    """Shown so that it can be seen, in one short line."""
    error = wire.complete(**{name: 1}).json()["error"]
    assert (error["param"], error["message"]) == (shown, f"{shown}: this field is not known; remove it")
    nested = wire.say(messages=[USER | {name: 1}]).json()["error"]
    assert nested["param"] == f"messages[0].{shown}"


@pytest.mark.parametrize("encoding", ["gzip", "br", "identity, gzip", "no\u00e9"])
def test_packed_body(wire, encoding):
    """Said as what it is, instead of as broken JSON."""
    raw = b'{"model": "m", "prompt": "hi"}'
    for path in (TEXT, CHAT):
        answer = wire.http.post(path, content=raw, headers={"Content-Encoding": encoding.encode("latin-1")})
        assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_encoding")
        assert "Content-Encoding" in answer.json()["error"]["message"]
    plain = wire.http.post(TEXT, content=raw, headers={"Content-Encoding": "Identity"})
    assert plain.status_code == 200


def test_body_too_large(wire):
    """Refused by its declared size, and by its real size when none is declared."""
    connection = http.client.HTTPConnection("127.0.0.1", wire.port, timeout=5)
    connection.putrequest("POST", TEXT)
    connection.putheader("Content-Length", str(2**40))
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()
    streamed = wire.http.post(TEXT, content=(b"x" * 2**20 for _ in range(17)))
    assert (streamed.status_code, streamed.json()["error"]["code"]) == (413, "body_too_large")


def test_unknown_path_and_method(wire):
    """Also these errors have OpenAI's shape."""
    missing = wire.http.get("/v1/nothing")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "unknown_url")
    method = wire.http.get(TEXT)
    assert method.status_code == 405
    assert "GET /v1/completions" in method.json()["error"]["message"]
    assert method.headers["allow"] == "POST"


def test_message_of_a_long_prompt_says_what_fits(wire):
    """A client can mend its request from the message alone."""
    error = wire.complete(prompt="x" * 990, max_tokens=11).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "at most 10 new ones fit" in error["message"]
