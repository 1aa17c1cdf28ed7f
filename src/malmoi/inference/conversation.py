"""Chat prompts: a conversation as tokens, and where the reply ends."""

from dataclasses import dataclass
from typing import Any

from malmoi.inference.prompt import start_token
from malmoi.tokenizer import Tokenizer
from malmoi.tokenizer.chat_template import PLAIN_STOPS, Messages, encode_chat, template_of

MAX_REPLY_TOKENS = 256  # default for max_new_tokens


@dataclass(frozen=True)
class Conversation:
    """The tokens of a conversation up to the reply, and the strings that end the reply."""

    tokens: list[int]
    stop: tuple[str, ...] = ()

    def settings(self, given: dict[str, Any]) -> dict[str, Any]:
        """Options for `generate`, with the defaults and stop strings of a conversation."""
        stop = given.get("stop", ())
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        return {"max_new_tokens": MAX_REPLY_TOKENS, **given, "stop": (*stops, *self.stop)}


def encode_conversation(
    tokenizer: Tokenizer, messages: Messages | str, **values: Any
) -> Conversation:
    """Encodes messages with the chat template, or as a plain dialogue; a str is a user message."""
    turns = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    # the template itself writes a beginning-of-text token if the model needs one
    tokens = encode_chat(tokenizer, turns, **values)
    return Conversation(
        tokens or [start_token(tokenizer)], () if template_of(tokenizer) else PLAIN_STOPS
    )
