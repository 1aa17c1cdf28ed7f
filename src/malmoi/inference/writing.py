"""Answers of a fine-tuned GPT: encodes prompts and conversations, and generates greedily."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from malmoi.errors import require_that
from malmoi.inference.batches import in_order
from malmoi.inference.generation.generate import TextGenerator
from malmoi.inference.generation.options import GenerationConfig, Sampling
from malmoi.inference.predict import Predictor
from malmoi.inference.prompt import truncate_text
from malmoi.kernels.kv_slots import common_prefix_length
from malmoi.system.progress import tracked
from malmoi.system.result import Result
from malmoi.text.rows import Message, parse_messages
from malmoi.tokenizer import Tokenizer
from malmoi.tokenizer.chat_template import encode_chat
from malmoi.tokenizer.padding import length_batches


@dataclass(frozen=True, repr=False)
class Reply(Result):
    """The answer of a model that was fine-tuned for writing.

    Examples:
        >>> malmoi.Reply("Good morning.").text
        'Good morning.'
    """

    text: str


# ------------------------------------------------------------------ what is asked


def as_messages(prompt: Any) -> list[Message]:
    """The messages before the answer; a text, or a text with its context, is a user message."""
    if isinstance(prompt, list):
        messages = parse_messages(prompt)
        while messages and messages[-1]["role"] == "assistant":  # the answer itself
            messages.pop()
        require_that(messages, "A conversation without a message to answer cannot be answered.")
        return messages
    parts = [prompt] if isinstance(prompt, str) else prompt
    return [{"role": "user", "content": "\n\n".join(part for part in parts if part)}]


# ------------------------------------------------------------------ tokens


@dataclass(frozen=True)
class AnswerRow:
    """A conversation's tokens, and the spans of them (first, end) that are answers."""

    tokens: list[int]
    spans: tuple[tuple[int, int], ...]
    prompt_cut: bool = False
    answer_cut: bool = False


def encode_answer(
    tokenizer: Tokenizer, messages: Sequence[Message], answer: str, ends: Sequence[int], limit: int
) -> AnswerRow:
    """A conversation and answer in `limit` tokens: the prompt is cut first, down to half."""
    row = _turns(tokenizer, messages, answer, ends)
    shorter = list(messages)
    if len(row.tokens) > limit and len(row.spans) == 1:
        first, end = row.spans[0]
        shorter = cut_prompt(tokenizer, messages, prompt_room(limit, end - first))
        row = _turns(tokenizer, shorter, answer, ends)
    spans = tuple((first, min(end, limit)) for first, end in row.spans if first < limit)
    cut = shorter != list(messages)
    return AnswerRow(row.tokens[:limit], spans, cut, len(row.tokens) > limit)


def prompt_room(limit: int, answer: int) -> int:
    """Maximum tokens of a prompt, given the tokens reserved for the answer."""
    return max(limit - answer, limit // 2)


def cut_prompt(tokenizer: Tokenizer, messages: Sequence[Message], room: int) -> list[Message]:
    """The messages, the last one cut at its end until the prompt has at most `room` tokens."""
    *before, last = messages
    content = last["content"]
    surplus = len(encode_chat(tokenizer, messages)) - room
    while surplus > 0 and content:
        tokens = len(tokenizer.encode(content, specials=False).tokens)
        content = truncate_text(tokenizer, content, tokens - surplus)
        last = {**last, "content": content}
        surplus = len(encode_chat(tokenizer, [*before, last])) - room
    return [*before, last]


def _turns(
    tokenizer: Tokenizer, messages: Sequence[Message], answer: str, ends: Sequence[int]
) -> AnswerRow:
    """The tokens of a conversation as its template writes it; every answer is a span.

    A span starts where generation would, and ends after the end-of-text token, which is added to
    the last one if the template writes none.
    """
    turns = [*messages, {"role": "assistant", "content": answer}]
    whole = encode_chat(tokenizer, turns, reply=False)
    spans = []
    for i in (i for i, turn in enumerate(turns) if turn["role"] == "assistant"):
        first = common_prefix_length(encode_chat(tokenizer, turns[:i]), whole)
        is_last = i == len(turns) - 1
        after = whole if is_last else encode_chat(tokenizer, turns[: i + 1], reply=False)
        end = common_prefix_length(after, whole)
        ended = next((at + 1 for at in range(first, end) if whole[at] in ends), None)
        spans.append((first, ended or end))
    # the last turn is an answer
    whole = whole[:ended] if ended else [*whole, ends[0]]
    return AnswerRow(whole, (*spans[:-1], (first, len(whole))))


# ------------------------------------------------------------------ answers


def write_answers(reading: Predictor, asked: Sequence[Any]) -> list[Reply]:
    """Answers each prompt or conversation greedily, in batches of similar length."""
    limit = reading.max_tokens
    room = min(prompt_room(limit, reading.answer_tokens), limit - 1)
    tokenizer = reading.tokenizer
    cut = (cut_prompt(tokenizer, as_messages(one), room) for one in asked)
    prompts = [encode_chat(tokenizer, messages) for messages in cut]
    config = GenerationConfig(
        reading.answer_tokens, Sampling(temperature=0), end_tokens=frozenset(reading.ends)
    )
    generator = TextGenerator(reading.network, tokenizer)
    groups = tracked(length_batches(list(map(len, prompts))), "predict", len(prompts))
    # the key-value cache has the dtype of the weights, which autocast would not write into it
    with torch.autocast(reading.network.device.type, enabled=False):
        found = in_order(
            (group, generator.continuations([prompts[i] for i in group], config))
            for group in groups
        )
    return [Reply(text.strip()) for (text,) in found]
