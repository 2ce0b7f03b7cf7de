"""The request bodies of OpenAI's completion endpoints: every field is supported or refused, never ignored.

A field that OpenAI defines and this server does not serve may still be sent with the value that asks for nothing
(`n: 1`, `logit_bias: {}`, `null`), because client libraries fill such defaults in. Any other value is refused with the
field's name, and so is a field that OpenAI does not define, but for `cache_salt`, which vLLM has too.

pydantic checks strictly: a number in quotes is not a number, and NaN is not a temperature.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from speccache_runtime.errors import unicode_fault
from speccache_runtime.server.body import json_object
from speccache_runtime.server.errors import bad_field, from_validation

MAX_STOPS = 4
"""OpenAI's limit for `stop`."""

MAX_STOP_LENGTH = 1024
"""Characters of one stop string; the search for it costs its length for every new token."""

MAX_SALT_LENGTH = 512
"""Characters of `cache_salt`: enough for any token or digest."""

_NEUTRAL_BOTH: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
}
NEUTRAL_COMPLETION: Mapping[str, tuple[object, ...]] = {
    **_NEUTRAL_BOTH,
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (),
    "suffix": ("",),
}
NEUTRAL_CHAT: Mapping[str, tuple[object, ...]] = {
    **_NEUTRAL_BOTH,
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "logprobs": (False,),
    "metadata": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_cache_key": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": (),
    "web_search_options": (),
}
"""Fields OpenAI defines that are not served, with the values besides null that ask for nothing."""

_NEUTRAL_MESSAGE: Mapping[str, tuple[object, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "name": (),
    "refusal": (),
    "tool_calls": ([],),
}


def _is_neutral(value: object, neutral: tuple[object, ...]) -> bool:
    # bool is a kind of int in Python, but `n: true` is not `n: 1`.
    return value is None or any(
        value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in neutral
    )


def _drop_neutral(
    body: dict[str, Any], unsupported: Mapping[str, tuple[object, ...]], path: str = ""
) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in body.items():
        if name not in unsupported:
            kept[name] = value
        elif not _is_neutral(value, unsupported[name]):
            raise bad_field(
                f"{path}{name}", f"{path}{name}: this server does not support it; leave it out", "unsupported_parameter"
            )
    return kept


def _fail(message: str) -> PydanticCustomError:
    return PydanticCustomError("speccache", "{reason}", {"reason": message})


def _prompt(value: object) -> str | tuple[int, ...]:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(type(item) is int for item in value):
        return tuple(value)
    raise _fail("must be one string or one list of token ids; send several prompts as several requests")


def _stop(value: object) -> tuple[str, ...]:
    stops = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(stops, list | tuple) or not all(isinstance(stop, str) and stop for stop in stops):
        raise _fail("must be a string or a list of strings, none of them empty")
    if len(stops) > MAX_STOPS:
        raise _fail(f"at most {MAX_STOPS} strings")
    if any(len(stop) > MAX_STOP_LENGTH for stop in stops):
        raise _fail(f"at most {MAX_STOP_LENGTH} characters in one string")
    return tuple(stops)


def _salt(value: object) -> str | None:
    """The value never stands in a message: who knows a salt can ask for what its owner has cached."""
    if value is None:
        return None
    if not isinstance(value, str) or not 0 < len(value) <= MAX_SALT_LENGTH:
        raise _fail(f"must be a string of 1 to {MAX_SALT_LENGTH} characters")
    fault = unicode_fault(value)
    if fault is not None:
        raise _fail(fault)
    return value


def _text(value: object) -> str:
    """A message's content as one string; several text parts are joined as they are."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise _fail("must be a string or a list of text parts")
    texts: list[str] = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or set(part) != {"type", "text"}:
            raise _fail('only parts of the form {"type": "text", "text": "..."} are supported')
        if not isinstance(part["text"], str):
            raise _fail("the text of a part must be a string")
        texts.append(part["text"])
    return "".join(texts)


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class StreamOptions(_Body):
    """`include_usage` asks for one more chunk with `usage` before the end of the stream."""

    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class Message(_Body):
    """One turn of a conversation. `developer` is OpenAI's newer name for `system`."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_text)]


class GenerationBody(_Body):
    """What both endpoints share. null means the default, as at OpenAI."""

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Annotated[tuple[str, ...], BeforeValidator(_stop)] = ()
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    cache_salt: Annotated[str | None, BeforeValidator(_salt), Field(repr=False)] = None

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise bad_field(
                "stream_options", "stream_options: only allowed together with stream: true", "invalid_value"
            )
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def check_salt(self) -> None:
        """Raises ApiError (400) without a `cache_salt`."""
        if self.cache_salt is None:
            raise bad_field(
                "cache_salt",
                "cache_salt: this server serves no request without one; send a secret string of your own, the same "
                "with every request that may share cached pages",
                "missing_required_parameter",
            )

    @property
    def new_tokens(self) -> int | None:
        """How many new tokens the client asks for at most."""
        return self.max_tokens

    def name_of(self, field: str) -> str:
        """What this client calls the engine's `prompt` or `max_tokens`."""
        return field


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Annotated[str | tuple[int, ...], BeforeValidator(_prompt)]


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _one_token_limit(self) -> ChatBody:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise bad_field(
                "max_tokens", "max_tokens: send max_tokens or max_completion_tokens, not both", "invalid_value"
            )
        return self

    @property
    def new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def name_of(self, field: str) -> str:
        if field == "max_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        return "messages" if field == "prompt" else field

    def conversation(self) -> list[dict[str, str]]:
        """The messages as a chat template takes them."""
        return [
            {"role": "system" if message.role == "developer" else message.role, "content": message.content}
            for message in self.messages
        ]


B = TypeVar("B", bound=GenerationBody)


def parse_completion(raw: bytes) -> CompletionBody:
    """Raises ApiError (400) that names the first wrong field."""
    return _validate(CompletionBody, _drop_neutral(json_object(raw), NEUTRAL_COMPLETION))


def parse_chat(raw: bytes) -> ChatBody:
    """Raises ApiError (400) that names the first wrong field."""
    body = _drop_neutral(json_object(raw), NEUTRAL_CHAT)
    messages = body.get("messages")
    if isinstance(messages, list):
        body["messages"] = [_message(message, number) for number, message in enumerate(messages)]
    return _validate(ChatBody, body)


def _message(message: object, number: int) -> object:
    return _drop_neutral(message, _NEUTRAL_MESSAGE, f"messages[{number}].") if isinstance(message, dict) else message


def _validate(kind: type[B], body: dict[str, Any]) -> B:
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise from_validation(error) from error
