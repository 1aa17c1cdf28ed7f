"""Bodies of OpenAI's responses with generated text."""

from collections.abc import Iterable, Sequence
from typing import Literal

from pydantic import BaseModel

from malmoi.inference.engine import GenerationJob, TextChunk
from malmoi.inference.generation.detokenize import detokenizer
from malmoi.inference.generation.sampling import Logprob
from malmoi.inference.generation.token_bytes import token_bytes
from malmoi.server.api.tools import ToolCall, ToolCallPart
from malmoi.tokenizer import Tokenizer

FinishField = Literal["stop", "length", "tool_calls"]


class Usage(BaseModel):
    """Tokens read and generated."""

    prompt_tokens: int
    completion_tokens: int = 0
    total_tokens: int


class Logprobs(BaseModel):
    """Natural log-probabilities of the tokens under the model, before sampling rules."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One continuation."""

    index: int
    text: str
    logprobs: Logprobs | None = None
    finish_reason: FinishField | None = None


class GenerationResponse(BaseModel):
    """What the responses with generated text have in common."""

    id: str
    created: int
    model: str
    usage: Usage | None = None


class CompletionResponse(GenerationResponse):
    """Continuations, or a part of them in a stream."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


class NamedLogprob(BaseModel):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(NamedLogprob):
    """A generated token, with the likeliest alternatives."""

    top_logprobs: list[NamedLogprob]


class ChatLogprobs(BaseModel):
    """For every token of an answer."""

    content: list[TokenLogprob]


class AssistantMessage(BaseModel):
    """The model's message."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishField


class ChatResponse(GenerationResponse):
    """Answers."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]


class Delta(BaseModel):
    """What was added to a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallPart] | None = None


class ChunkChoice(BaseModel):
    """A part of one answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishField | None = None


class ChatChunk(GenerationResponse):
    """A part of the answers in a stream."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChunkChoice]


class ModelResponse(BaseModel):
    """What a model says about a request."""

    model: str


# ------------------------------------------------------------------ log-probabilities


def bytes_of(tokenizer: Tokenizer, token: int) -> bytes | None:
    """A token's bytes; None for special tokens and padding of the vocabulary."""
    return token_bytes(tokenizer)(token) or None if token < tokenizer.vocab_size else None


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """A token as text, or as bytes:\\xed\\x95 where it is only part of a character."""
    if token >= tokenizer.vocab_size:
        return f"token_id:{token}"
    written = bytes_of(tokenizer, token)
    if written is None:
        return tokenizer.token(token)
    try:
        return written.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in written)


class LogprobRecorder:
    """Log-probabilities of one continuation in the format of /v1/completions."""

    def __init__(self, tokenizer: Tokenizer, job: GenerationJob, top: int) -> None:
        self.tokenizer = tokenizer
        self.top = top
        self.detokenizer = detokenizer(tokenizer, () if job.echo else job.prompt)
        self.at = 0

    def add(self, pieces: Iterable[TextChunk]) -> Logprobs:
        generated = [
            (token, one)
            for piece in pieces
            for token, one in zip(piece.tokens, piece.logprobs, strict=True)
        ]
        return Logprobs(
            tokens=[token_name(self.tokenizer, token) for token, _ in generated],
            token_logprobs=[one.logprob if one else None for _, one in generated],
            top_logprobs=[self._likely(one) if one else None for _, one in generated],
            text_offset=[self._offset(token) for token, _ in generated],
        )

    def _likely(self, one: Logprob) -> dict[str, float]:
        """The likeliest tokens and the one that was generated."""
        return {
            token_name(self.tokenizer, token): value
            for token, value in (*one.top[: self.top], one[:2])
        }

    def _offset(self, token: int) -> int:
        at = self.at
        self.at += len(self.detokenizer.push(token)) if token < self.tokenizer.vocab_size else 0
        return at


def chat_logprobs(
    tokenizer: Tokenizer, logprobs: Sequence[Logprob | None], top: int
) -> ChatLogprobs:
    """Log-probabilities of an answer in the format of /v1/chat/completions."""

    def named(token: int, value: float) -> NamedLogprob:
        written = bytes_of(tokenizer, token)
        listed = None if written is None else list(written)
        return NamedLogprob(token=token_name(tokenizer, token), logprob=value, bytes=listed)

    return ChatLogprobs(
        content=[
            TokenLogprob(
                **dict(named(one.token, one.logprob)),
                top_logprobs=[named(*t) for t in one.top[:top]],
            )
            for one in logprobs
            if one is not None
        ]
    )
