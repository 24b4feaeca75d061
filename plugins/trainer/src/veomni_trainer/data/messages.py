"""Reads the turns of a chat, in OpenAI's form (``role``, ``content``) or ShareGPT's (``from``, ``value``).

The content of a turn is text, or a list of parts: ``{"type": "text", "text": ...}``, and ``{"type": "image"}`` (or
``video``, ``audio``) with its ``source``, or without one where a column of the row has it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from veomni_core.commands import shown
from veomni_core.errors import did_you_mean
from veomni_trainer.data.reading import BadLine


class Message(dict[str, Any]):
    """A turn as chat templates take it; ``excluded``: whether its row says that it is not to be trained on."""

    excluded = False


ASSISTANT = "assistant"
ONLY_TEXT = "only text is trained on"
_KINDS = {  # of a part, in the words of OpenAI, transformers and TRL
    **{"text": "text", "input_text": "text", "image": "image", "image_url": "image", "input_image": "image"},
    **{"video": "video", "video_url": "video", "audio": "audio", "audio_url": "audio", "input_audio": "audio"},
}
_SOURCES = ("url", "path", "base64", "data", "bytes")
_EXCLUDING = ("train", "training", "loss", "weight")  # false, or 0, on a turn: it is not to be trained on
_ROLES = ("system", "developer", "user", ASSISTANT, "tool")
_CALLS = "function_call"  # ShareGPT's turn that holds calls as JSON
_SHAREGPT_ROLES = {
    "human": "user",
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "observation": "tool",
    _CALLS: ASSISTANT,
    **{role: role for role in _ROLES},
}


def read_messages(value: Any, learned: bool = True, no_media: str = ONLY_TEXT) -> list[Message]:
    """The turns as chat templates take them; ``value`` may be JSON text, as in a CSV file.

    Args:
        value: the turns.
        learned: whether some of them must be learned.
        no_media: why turns may hold no images, video and audio; empty if they may.

    Raises:
        BadLine: they are no turns; there is none of the assistant's in a chat to be ``learned`` from; or some turns of
            what can only be learned whole are not to be trained on.
    """
    turns = _parsed(value, "the chat")
    if not turns:
        raise BadLine("a chat without turns")
    messages = [_message(turn, f"turn {number}", no_media) for number, turn in enumerate(turns, start=1)]
    taught = [message for message in messages if message["role"] == ASSISTANT]
    if learned and not taught:
        raise BadLine("a chat without a turn of the assistant")
    if learned and all(message.excluded for message in taught):
        raise BadLine("a chat of which no turn is to be trained on")
    return messages


def check_characters(text: str, what: str) -> None:
    """Raise BadLine if ``text`` holds half a character, which no tokenizer takes and JSON can write."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise BadLine(f"{what} holds half a character (a lone surrogate)") from None


def read_tools(value: Any) -> list[dict[str, Any]] | None:
    """The tools that a chat may call, as JSON schemas; ``None`` if there are none.

    Raises:
        BadLine: they are no list of mappings.
    """
    if value is None or value == "":
        return None
    tools = _parsed(value, "the tools")
    for tool in tools:
        if not isinstance(tool, dict):
            raise BadLine(f"the tools must be mappings, got {shown(tool)}")
    return tools or None


def parse_json(text: str) -> Any:
    """The value in ``text``. Raises ValueError where it is no JSON, or a key is twice in an object."""
    return json.loads(text, object_pairs_hook=_with_each_key_once)


def _with_each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} is there twice, with {shown(found[key])} and {shown(value)}")
        found[key] = value
    return found


def _parsed(value: Any, what: str) -> list[Any]:
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except (ValueError, RecursionError) as error:
            raise BadLine(f"{what} must be a list, or one as JSON; got {shown(value)}: {error}") from None
    if not isinstance(value, list):
        raise BadLine(f"{what} must be a list, got {shown(value)}")
    return value


def words_of(message: Mapping[str, Any]) -> str:
    """The text of a turn, without what stands between its parts."""
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _message(turn: Any, where: str, no_media: str) -> Message:
    if not isinstance(turn, Mapping):
        raise BadLine(f"{where} must be a mapping, got {shown(turn)}")
    check_characters("".join(map(str, turn)), f"a key of {where}")
    turn = {key: value for key, value in turn.items() if value is not None}
    if "role" in turn:
        role, content, roles = turn.pop("role"), turn.pop("content", None), {role: role for role in _ROLES}
    elif "from" in turn:
        role, content, roles = turn.pop("from"), turn.pop("value", None), _SHAREGPT_ROLES
    else:
        raise BadLine(f"{where} has neither role nor from; its keys are {', '.join(map(str, turn)) or 'none'}")
    if not isinstance(role, str) or role not in roles:
        raise BadLine(f"{where} has the role {role!r}. {did_you_mean(str(role), roles)}")
    marks = {key: turn.pop(key) for key in _EXCLUDING if key in turn}
    if unread := [f"{key}: {value!r}" for key, value in marks.items() if value not in (0, 1)]:
        raise BadLine(f"{where} has {unread[0]}, which is neither true nor false; leave the key or the turn out")
    if role == _CALLS:
        turn["tool_calls"], content = _calls_in(content, where), None
    calls = _tool_calls(turn.pop("tool_calls", []), where)
    text = _content(content, where, no_media)
    if roles[role] == ASSISTANT and not text and not calls:
        raise BadLine(f"{where} is an empty turn of the assistant")
    message = Message({**turn, "role": roles[role], "content": text, **({"tool_calls": calls} if calls else {})})
    message.excluded = not all(marks.values())
    return message


def _content(content: Any, where: str, no_media: str) -> str | list[dict[str, Any]]:
    """The text of a turn; of a list of parts, all of them joined, unless there are others than text."""
    if content is None:
        return ""
    if isinstance(content, list):
        parts = [_part(part, where, no_media) for part in content]
        if any(part["type"] != "text" for part in parts):
            return parts
        return "".join(part["text"] for part in parts)
    if not isinstance(content, str):
        raise BadLine(f"the content of {where} must be text, got {shown(content)}")
    return content


def _part(part: Any, where: str, no_media: str) -> dict[str, Any]:
    written = part.get("type") if isinstance(part, dict) else shown(part)
    kind = _KINDS.get(written) if isinstance(written, str) else None
    if kind is None or (kind != "text" and no_media):
        raise BadLine(f"{where} has a part of type {written!r}; {no_media or 'known are ' + ', '.join(_KINDS)}")
    if kind == "text":
        return {"type": kind, "text": _content(part.get("text"), where, no_media)}
    source = next((part[key] for key in (written, kind, *_SOURCES) if part.get(key) is not None), None)
    while isinstance(source, Mapping) and "path" not in source and "bytes" not in source:  # OpenAI nests it
        source = next((source[key] for key in _SOURCES if source.get(key) is not None), None)
    return {"type": kind, **({} if source is None else {"source": source})}


def _calls_in(text: Any, where: str) -> list[Any]:
    """The calls in the JSON of a turn of ShareGPT: one, or a list of them."""
    value = _parsed_of(text, f"the calls of {where}")
    return [{"type": "function", "function": each} for each in (value if isinstance(value, list) else [value])]


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """The calls, with arguments as mappings: OpenAI writes them as JSON text, and templates write them as JSON."""
    functions = (
        [call.get("function", call) for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    )
    if not isinstance(calls, list) or len(functions) < len(calls) or not all(isinstance(f, dict) for f in functions):
        raise BadLine(f"the tool_calls of {where} must be a list of mappings, got {shown(calls)}")
    return [_call(call, where) for call in calls]


def _call(call: dict[str, Any], where: str) -> dict[str, Any]:
    if isinstance(function := call.get("function"), dict):
        return {**call, "function": _call(function, where)}
    if not isinstance(arguments := call.get("arguments"), str):
        return call
    return {**call, "arguments": _parsed_of(arguments, f"the arguments of a call in {where}")}


def _parsed_of(text: Any, what: str) -> Any:
    try:
        return parse_json(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadLine(f"{what} are not JSON: {shown(text)}: {error}") from None
