"""Function calling: what a request declares, how a model writes a call, and calls in its text.

A grammar lets the model write calls only in the format of its chat template, and arguments only by
the function's JSON schema; so they can be read from the text as it arrives.
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal
from uuid import uuid4

from pydantic import BaseModel, Field

from malmoi.tokenizer import Tokenizer
from malmoi.tokenizer.chat_template import template_of

FunctionName = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$", examples=["get_weather"])


class ToolFunction(BaseModel, strict=True):
    """A function that the model may call."""

    name: str = FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(
        default=None, description="JSON schema of the arguments."
    )


class Tool(BaseModel):
    """A tool."""

    type: Literal["function"]
    function: ToolFunction


ToolChoice = Literal["none", "auto", "required"] | Tool


class CalledFunction(BaseModel):
    """A function's name and arguments; a stream has them in parts."""

    name: str | None = None
    arguments: str = Field(default="", description="JSON.")


class ToolCall(BaseModel):
    """A call of a function."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def plain(self) -> dict[str, Any]:
        """As chat templates read it: with the arguments as an object."""
        arguments: Any = self.function.arguments
        with suppress(ValueError, RecursionError):  # the template then shows what was written
            arguments = json.loads(arguments)
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.function.name, "arguments": arguments},
        }


class ToolCallPart(ToolCall):
    """A part of a call in a stream."""

    index: int


@dataclass(frozen=True)
class CallFormat:
    """The text of a call: trigger, opening, name, middle, arguments, closing."""

    trigger: str  # begins a call wherever a model writes it
    opening: str
    key: str
    closing: str

    @property
    def middle(self) -> str:
        return f'", "{self.key}": '

    @property
    def beginning(self) -> re.Pattern[str]:
        parts = (self.trigger + self.opening, self.middle)
        return re.compile('([^"]+)'.join(map(re.escape, parts)))

    def grammar(self, tools: Sequence[Tool], *, forced: bool, several: bool) -> str:
        """A text with calls of these tools in it; if forced, one call and nothing else."""
        calls = [
            f"{json.dumps(self.opening + tool.function.name + self.middle)} {_arguments(tool)}"
            for tool in tools
        ]
        trigger = json.dumps(self.trigger)
        texts = "(trigger call)* TEXT" if several else "TEXT | trigger call"
        rules = [
            f"start: {f'{trigger} call' if forced else texts}",
            f"call: ({' | '.join(calls)}) {json.dumps(self.closing)}",
        ]
        free = [r"TEXT: /(.|\n)*/", f"trigger[lazy]: TEXT {trigger}"]
        return "\n".join(rules if forced else rules + free)


def _arguments(tool: Tool) -> str:
    schema = tool.function.parameters or {"properties": {}}
    from malmoi.inference.generation.grammar import json_rule

    return json_rule({"type": "object", **schema})


def call_format(tokenizer: Tokenizer) -> CallFormat | None:
    """How the chat template tells a model to write calls; None if it has no tools."""
    template = template_of(tokenizer, tools=True) or ""
    if not re.search(r"\btools\b", template):
        return None
    named = re.search(r'"arguments\\?"', template) or '"parameters' not in template
    key = "arguments" if named else "parameters"
    if "<tool_call>" in template:  # as Hermes and Qwen write
        return CallFormat("<tool_call>", '\n{"name": "', key, "}\n</tool_call>")
    return CallFormat('{"name"', ': "', key, "}")  # as Llama 3 writes


class CallReader:
    """Separates calls from the text around them, as it arrives."""

    def __init__(self, form: CallFormat) -> None:
        self.form = form
        self.beginning = form.beginning
        self.rest = ""  # of the text, not read yet
        self.sent = 0  # characters of it that were sent as arguments
        self.count = 0  # calls so far
        self.inside = False

    def read(self, text: str, *, last: bool) -> Iterator[str | ToolCallPart]:
        """What this text adds: text, and parts of calls."""
        self.rest += text
        if not self.inside:
            yield from self._read_text(last=last)
        if self.inside:
            yield from self._read_arguments(last=last)

    def _read_text(self, *, last: bool) -> Iterator[str | ToolCallPart]:
        found = self.beginning.search(self.rest)
        end = found.start() if found else len(self.rest) if last else self._held_from()
        if found or not last:  # white space before a call is not shown
            end = len(self.rest[:end].rstrip())
        shown = self.rest[:end]
        self.rest = self.rest[found.end() if found else end :]
        if shown:
            yield shown
        if found:
            self.inside = True
            id = f"call_{uuid4().hex[:24]}"
            yield ToolCallPart(index=self.count, id=id, function=CalledFunction(name=found[1]))

    def _held_from(self) -> int:
        """Where a call may have begun."""
        trigger = self.form.trigger
        ends = (size for size in range(len(trigger), 0, -1) if self.rest.endswith(trigger[:size]))
        at = self.rest.find(trigger)
        return len(self.rest) - next(ends, 0) if at < 0 else at

    def _read_arguments(self, *, last: bool) -> Iterator[str | ToolCallPart]:
        try:
            _, end = json.JSONDecoder().raw_decode(self.rest)
        except (ValueError, RecursionError):
            end = 0
        new = self.rest[self.sent : end or None]
        self.sent += len(new)
        if new:
            yield ToolCallPart(index=self.count, function=CalledFunction(arguments=new))
        closed = end + len(self.form.closing)
        if end and len(self.rest) >= closed:
            self.rest = self.rest[closed:]
            self.sent = 0
            self.count += 1
            self.inside = False
            yield from self.read("", last=last)
