"""Conversations in rows of data: lists of messages with a role and a content."""

import json
from collections.abc import Mapping
from typing import Any

from malmoi.errors import UsageError

SPEAKERS = {"human": "user", "gpt": "assistant", "bot": "assistant"}  # ShareGPT's roles
Message = dict[str, str]  # role, content


def parse_messages(given: Any) -> list[Message]:
    """A conversation as [{"role": …, "content": …}], also from JSON text or ShareGPT's names."""
    found = given
    if isinstance(given, str):
        try:
            found = json.loads(given)
        except ValueError:
            found = None
    if not isinstance(found, list) or not found:
        raise UsageError("a conversation is a list of messages, not {given!r:.60}", given=given)
    return [_message(one) for one in found]


def _message(one: Any) -> Message:
    values = one if isinstance(one, Mapping) else {}
    role = values.get("role") or values.get("from")
    content = values.get("content", values.get("value"))
    if not isinstance(role, str) or not isinstance(content, str):
        raise UsageError(
            "a message needs a role and a content, both texts, not {one!r:.60}", one=one
        )
    return {"role": SPEAKERS.get(role, role), "content": content}
