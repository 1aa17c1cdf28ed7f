"""Chat prompts: a conversation as tokens, and where the reply ends."""

from dataclasses import dataclass
from typing import Any

from malmoi.inference.prompt import start_token
from malmoi.tokenizer import Tokenizer
from malmoi.tokenizer.chat_template import PLAIN_STOPS, Messages, encode_chat, template_of

MAX_REPLY_TOKENS = 256  # tokens of an answer, unless another number is wished for


@dataclass(frozen=True)
class Conversation:
    """The tokens of a conversation up to the reply, and the stop strings that end it."""

    tokens: list[int]
    stop: tuple[str, ...] = ()

    def settings(self, given: dict[str, Any]) -> dict[str, Any]:
        """The settings of `generate`, with a conversation's defaults and stop strings."""
        stop = given.get("stop", ())
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        return {"max_new_tokens": MAX_REPLY_TOKENS, **given, "stop": (*stops, *self.stop)}


def encode_conversation(
    tokenizer: Tokenizer, messages: Messages | str, **values: Any
) -> Conversation:
    """Messages in the model's chat template, else as a plain dialogue. A str is a user message."""
    said = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    # the template writes the opening token itself where the model wants one
    tokens = encode_chat(tokenizer, said, **values)
    return Conversation(
        tokens or [start_token(tokenizer)], () if template_of(tokenizer) else PLAIN_STOPS
    )
