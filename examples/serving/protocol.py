"""Requests as JSON, in the form of OpenAI's completions and chat completions. What cannot be served
is refused with a status and a sentence."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from serving.sampling import GREEDY, Sampling
from serving.wire import Kind, Refused

DEFAULT = 16  # tokens of a completion, where a request does not say
MOST_STOPS = 4
ROLES = ("system", "developer", "user", "assistant", "tool")
FIXED: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "echo": (False,), "suffix": ("",), "logprobs": (False, 0),
    "presence_penalty": (0,), "frequency_penalty": (0,), "logit_bias": ({},), "tools": ([],),
    "response_format": ({"type": "text"},), "top_logprobs": (0,),
}  # fmt: skip
"""Parameters of the API that would change a text and that this server does not have, each with the
values that ask for nothing."""


@dataclass(frozen=True)
class Request:
    """What is asked for."""

    prompt: tuple[int, ...]
    limit: int
    stream: bool = False
    sampling: Sampling = GREEDY
    stop: tuple[str, ...] = ()
    include_usage: bool = False


@dataclass(frozen=True)
class Served:
    """What a request is checked against: the model's name, its tokenizer and its sizes."""

    name: str
    words: Any  # encode, decode, and chat where there is a template
    vocabulary: int
    context: int


def read(body: bytes, kind: Kind, served: Served, seed: int = 0) -> Request:
    """The request of a body; Refused with a sentence if there is something wrong. `seed` is for
    those who have not said one."""
    asked = _object(body)
    if asked.get("model") not in (None, served.name):
        raise Refused(
            404,
            f"there is no model {asked['model']!r} here, only {served.name!r}",
            "model",
            "model_not_found",
        )
    for name, values in FIXED.items():
        if asked.get(name) is not None and asked[name] not in values:
            raise Refused(400, f"{name} is not supported: leave it out", name)
    encode = _chat if kind is Kind.CHAT else _prompt
    prompt = encode(asked, served)
    limit = _limit(asked, kind, served.context - len(prompt))
    if len(prompt) + limit > served.context:
        raise Refused(
            400,
            f"the prompt has {len(prompt)} tokens and max_tokens is {limit}, together more than "
            f"the {served.context} that a text can have here",
            "messages" if kind is Kind.CHAT else "prompt",
            "context_length_exceeded",
        )
    options = _of(asked, "stream_options", {}, lambda v: isinstance(v, dict), "an object")
    return Request(
        prompt,
        limit,
        _flag(asked, "stream"),
        _sampling(asked, seed),
        _stops(asked),
        _flag(options, "include_usage"),
    )


def _object(body: bytes) -> dict[str, Any]:
    try:
        asked = json.loads(body)
    except ValueError as e:
        raise Refused(400, f"the body is no JSON: {e}") from None
    if not isinstance(asked, dict):
        raise Refused(400, 'the body must be an object such as {"prompt": "...", "max_tokens": 16}')
    return asked


def _of(
    asked: Mapping[str, Any], name: str, default: Any, good: Callable[[Any], bool], wanted: str
) -> Any:
    """A parameter, which may be left out or null."""
    value = asked.get(name)
    if value is None:
        return default
    if not good(value):
        raise Refused(400, f"{name} must be {wanted}, not {json.dumps(value)}", name)
    return value


def _flag(asked: Mapping[str, Any], name: str) -> bool:
    return bool(_of(asked, name, False, lambda v: isinstance(v, bool), "true or false"))


def _number(low: float, high: float) -> Callable[[Any], bool]:
    return lambda v: type(v) in (int, float) and low <= v <= high


def _integer(low: int, high: float = float("inf")) -> Callable[[Any], bool]:
    return lambda v: type(v) is int and low <= v <= high


def _sampling(asked: Mapping[str, Any], seed: int) -> Sampling:
    """As OpenAI's: a temperature of 1 and all tokens where nothing is said."""
    return Sampling(
        _of(asked, "temperature", 1.0, _number(0, 2), "a number from 0 to 2"),
        max(0, _of(asked, "top_k", 0, _integer(-1), "a whole number, 0 or -1 for all tokens")),
        _of(asked, "top_p", 1.0, _number(1e-9, 1), "a number above 0, at most 1"),
        _of(asked, "seed", seed, _integer(-(2**63), 2**63 - 1), "a whole number of 64 bits"),
    )


def _stops(asked: Mapping[str, Any]) -> tuple[str, ...]:
    given = asked.get("stop")
    found = [given] if isinstance(given, str) else given or []
    texts = isinstance(found, list) and all(isinstance(s, str) and s for s in found)
    if not texts or len(found) > MOST_STOPS:
        raise Refused(400, f"stop must be a text or a list of at most {MOST_STOPS} texts", "stop")
    return tuple(found)


def _limit(asked: Mapping[str, Any], kind: Kind, free: int) -> int:
    """How many tokens an answer has at most. A chat may go on to the end of the context."""
    default = max(free, 1) if kind is Kind.CHAT else DEFAULT
    for name in ("max_completion_tokens", "max_tokens"):
        limit = _of(asked, name, None, _integer(1), "a number from 1 on")
        if limit is not None:
            return int(limit)
    return default


def _prompt(asked: Mapping[str, Any], served: Served) -> tuple[int, ...]:
    given = asked.get("prompt")
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], str | list):
        (given,) = given  # a batch of one
    if given == "" or given == []:
        raise Refused(400, "the prompt is empty", "prompt")
    if isinstance(given, str):
        given = served.words.encode(given)
    elif not isinstance(given, list) or any(type(t) is not int for t in given):
        raise Refused(400, "prompt must be one text, or a list of numbers of tokens", "prompt")
    return _checked(given, served, "prompt")


def _chat(asked: Mapping[str, Any], served: Served) -> tuple[int, ...]:
    given = asked.get("messages")
    if not isinstance(given, list) or not given:
        raise Refused(400, "messages must be a list of at least one message", "messages")
    return _checked(chat_tokens([_message(m) for m in given], served.words), served, "messages")


def _message(given: Any) -> dict[str, str]:
    role = given.get("role") if isinstance(given, dict) else None
    if role not in ROLES:
        raise Refused(400, f"a message must have a role, one of {', '.join(ROLES)}", "messages")
    content = given.get("content")
    if isinstance(content, list):  # parts
        if any(not isinstance(p, dict) or p.get("type") != "text" for p in content):
            raise Refused(400, "parts of a message must be texts", "messages")
        content = "".join(str(p.get("text", "")) for p in content)
    if not isinstance(content, str):
        raise Refused(400, "the content of a message must be a text", "messages")
    if not content and role == "user":
        raise Refused(400, "a message of the user is empty", "messages")
    return {"role": role, "content": content}


def chat_tokens(messages: list[dict[str, str]], words: Any) -> list[int]:
    """Tokens of a conversation, by the template of the tokenizer. Without one, a line for each
    message."""
    if getattr(words, "chat", None) is not None:
        try:
            return list(words.chat(messages))
        except Exception as e:  # templates raise what they like, about an order of roles for one
            raise Refused(400, f"the model's chat template refuses this: {e}", "messages") from None
    lines = [f"{m['role']}: {m['content']}" for m in messages]
    return list(words.encode("\n".join([*lines, "assistant:"])))


def _checked(tokens: list[int], served: Served, param: str) -> tuple[int, ...]:
    beyond = next((t for t in tokens if not 0 <= t < served.vocabulary), None)
    if beyond is not None:
        last = served.vocabulary - 1
        raise Refused(400, f"the prompt has token {beyond}, but they go from 0 to {last}", param)
    if not tokens:
        raise Refused(400, "the prompt is empty", param)
    return tuple(tokens)
