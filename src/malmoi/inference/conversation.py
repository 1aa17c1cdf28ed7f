"""What a language model is shown of a conversation, and where its turn ends."""

from dataclasses import dataclass
from typing import Any

from malmoi.inference.prompt import start_token
from malmoi.tokenizer import Tokenizer
from malmoi.tokenizer.chat_template import PLAIN_STOPS, Messages, encode_chat, template_of

MAX_REPLY_TOKENS = 256  # tokens of an answer, unless another number is wished for


@dataclass(frozen=True)
class Conversation:
    """The tokens of a conversation up to the answer, and the texts that end it."""

    tokens: list[int]
    stop: tuple[str, ...] = ()

    def settings(self, given: dict[str, Any]) -> dict[str, Any]:
        """The settings of `generate` with what a conversation adds to them."""
        stop = given.get("stop", ())
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        return {"max_new_tokens": MAX_REPLY_TOKENS, **given, "stop": (*stops, *self.stop)}


def encode_conversation(
    tokenizer: Tokenizer, messages: Messages | str, **values: Any
) -> Conversation:
    """Messages in the model's own template, or as a plain dialogue where it has none. A text is
    what a user says.
    """
    said = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    # the template writes the opening token itself where the model wants one
    tokens = encode_chat(tokenizer, said, **values)
    return Conversation(
        tokens or [start_token(tokenizer)], () if template_of(tokenizer) else PLAIN_STOPS
    )
