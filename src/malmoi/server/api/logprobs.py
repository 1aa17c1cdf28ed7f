"""Log-probabilities in OpenAI's two formats."""

from collections.abc import Iterable, Sequence

from malmoi.inference.engine import GenerationJob, TextChunk
from malmoi.inference.generation.detokenize import detokenizer
from malmoi.inference.generation.sampling import Logprob
from malmoi.inference.generation.token_bytes import token_bytes
from malmoi.server.api.responses import ChatLogprobs, Logprobs, NamedLogprob, TokenLogprob
from malmoi.tokenizer import Tokenizer


def bytes_of(tokenizer: Tokenizer, token: int) -> bytes | None:
    """A token's bytes; None for special tokens and padding of the vocabulary."""
    return token_bytes(tokenizer)[token] or None if token < tokenizer.vocab_size else None


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
