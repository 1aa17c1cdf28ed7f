"""Prompts of causal models: a text's or a conversation's tokens, and where the reply ends."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from malmoi.errors import UsageError, require_that, required
from malmoi.messages import msg
from malmoi.tokenizer import Encoding, Tokenizer

if TYPE_CHECKING:
    from malmoi.tokenizer.chat_template import Messages

MAX_REPLY_TOKENS = 256  # default for max_new_tokens of a conversation


def has_opening_token(tokenizer: Tokenizer) -> bool:
    """Whether this tokenizer prepends a token to every text, such as Llama's <s>."""
    return bool(_opening(tokenizer))


def _opening(tokenizer: Tokenizer) -> list[int]:
    first = tokenizer.encode("a").tokens[0]
    return [first] if first == tokenizer.specials.bos else []


def encode_text(
    tokenizer: Tokenizer, text: str, max_tokens: int | None = None, *, parse_special: bool = False
) -> Encoding:
    """Encodes a text after its beginning-of-text token, if any; nothing ends it.

    A tokenizer may end texts too: BERT's, or that of a model that reads both ways.
    """
    opening = _opening(tokenizer)
    room = None if max_tokens is None else max_tokens - len(opening)
    found = tokenizer.encode(text, max_tokens=room, specials=False, parse_special=parse_special)
    if not opening:
        return found
    columns = zip(vars(_special(*opening)).values(), vars(found).values(), strict=True)
    return Encoding(*(first + rest for first, rest in columns))


def _special(token: int) -> Encoding:
    return Encoding([token], [0], [(0, 0)], [True], [None])


def encode_prompt(
    tokenizer: Tokenizer, text: str, max_tokens: int | None = None, *, parse_special: bool = False
) -> Encoding:
    """Like `encode_text`, but an empty text becomes the beginning- or end-of-text token."""
    encoding = encode_text(tokenizer, text, max_tokens, parse_special=parse_special)
    return encoding if encoding.tokens else _special(start_token(tokenizer))


def encode_prompts(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Encodes many prompts like `encode_prompt`, on all cores."""
    opening = _opening(tokenizer)
    return [opening + ids or [start_token(tokenizer)] for ids in tokenizer.ids(list(texts))]


def text_too_long(tokens: int, limit: int, what: str = "this model's context") -> UsageError:
    return UsageError(
        "The text has {tokens} tokens, more than {what} of {limit}; shorten it.",
        code="context_length_exceeded",
        tokens=tokens,
        what=msg(what),
        limit=limit,
    )


def check_length(tokens: int, limit: int, what: str = "this model's context") -> None:
    """Raises an error if a text of so many tokens is longer than the context, or another limit."""
    if tokens > limit:
        raise text_too_long(tokens, limit, what)


def require_fit(encoding: Encoding, context: int) -> Encoding:
    """The encoding; raises an error if it is longer than the context."""
    check_length(len(encoding.tokens), context)
    return encoding


def check_prompt_length(prompt: Sequence[int], context: int) -> None:
    """Raises an error if a prompt leaves no room for a new token."""
    require_that(
        len(prompt) < context,
        "The prompt has {n} tokens and leaves no room in this model's context of {context}: "
        "shorten it.",
        code="context_length_exceeded",
        n=len(prompt),
        context=context,
    )


def truncate_text(tokenizer: Tokenizer, text: str, room: int) -> str:
    """The beginning of a text that has at most `room` tokens."""
    offsets = tokenizer.encode(text, specials=False).offsets
    if len(offsets) <= room:
        return text
    # a character that is several tokens is cut as a whole
    return text[: min(offsets[room - 1][1], offsets[room][0])] if room > 0 else ""


def mask_token(tokenizer: Tokenizer) -> int:
    """The id of the tokenizer's [MASK]; raises an error if it has none."""
    return required(
        tokenizer.specials.mask, "This model's tokenizer has no mask token, so it cannot fill gaps."
    )


def start_token(tokenizer: Tokenizer) -> int:
    marks = tokenizer.specials
    return required(
        marks.bos if marks.bos is not None else marks.eos,
        "The prompt is empty, and this tokenizer has no token to start from; give a word.",
        code="empty_prompt",
    )


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
    tokenizer: Tokenizer, messages: "Messages | str", **values: Any
) -> Conversation:
    """Encodes messages with the chat template, or as a plain dialogue; a str is a user message."""
    from malmoi.tokenizer.chat_template import PLAIN_STOPS, encode_chat, template_of

    turns = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    tokens = encode_chat(tokenizer, turns, **values)
    if template_of(tokenizer):  # it writes a beginning-of-text token if the model needs one
        return Conversation(tokens or [start_token(tokenizer)])
    return Conversation(_opening(tokenizer) + tokens, PLAIN_STOPS)
