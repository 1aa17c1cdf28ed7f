"""Request bodies. Names and defaults are OpenAI's where it has them."""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, create_model, model_validator
from pydantic_core import PydanticCustomError

from malmoi.errors import nearest, require_that
from malmoi.inference.generation.options import (
    MAX_LOGIT_BIAS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    ConstraintOptions,
    GenerationConfig,
    Sampling,
)
from malmoi.messages import msg
from malmoi.server.api.tools import Tool, ToolCall, ToolChoice
from malmoi.settings import settings_of

MAX_TEXTS = 256  # per request
MAX_TOP_LOGPROBS = 20

Token = Annotated[int, Field(ge=0, lt=2**31)]
TextList = Annotated[list[str], Field(min_length=1, max_length=MAX_TEXTS)]
Tokens = Annotated[list[Token], Field(min_length=1)]
TokenLists = Annotated[list[Tokens], Field(min_length=1, max_length=MAX_TEXTS)]
PromptInput = str | TextList | Tokens | TokenLists
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Stops = Annotated[list[Stop], Field(max_length=MAX_STOP_STRINGS)]
Choices = Annotated[list[str], Field(min_length=1, max_length=1024)]
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
Top = Annotated[int, Field(ge=1, le=100)]
BiasField = Annotated[float, Field(ge=-MAX_LOGIT_BIAS, le=MAX_LOGIT_BIAS)]
LogitBias = Annotated[dict[str, BiasField], Field(max_length=1024)]
TextField = Annotated[str, Field(max_length=20_000)]
NameField = Annotated[str, Field(max_length=200)]


# fields of OpenAI's API and vLLM's for features we lack, with the values that request nothing
NOT_OFFERED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "verbosity": ("medium",),
    "suffix": ("",),
    "best_of": (1,),
    "previous_response_id": (),
    "conversation": (),
    "include": ([],),
    "background": (False,),
    "truncation": ("disabled",),
    "use_beam_search": (False,),
    "skip_special_tokens": (True,),
    "stop_token_ids": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
# fields that change nothing in an answer: notes for an account, hints for a cache or a queue
IGNORED = {
    *("user", "metadata", "store", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_retention", "cache_salt", "priority", "request_id"),
    *("reasoning", "reasoning_effort"),  # read by chat templates alone
}


def field(default: Any, about: str, **bounds: Any) -> Any:
    """A field that may be left out."""
    return Field(default, description=about, **bounds)


def example(**fields: Any) -> dict[str, Any]:
    return {"examples": [fields]}


class ApiRequest(BaseModel, extra="forbid", strict=True, allow_inf_nan=False):
    """A request; unknown fields are refused, so that a misspelt one is not silently ignored.

    null means the default, fields that change nothing here (`user`, `tools: []`) are accepted, and
    `input` may be written for `text`.
    """

    # fields whose texts are cut or read in parts; any other must fit into the model's context
    long_texts: ClassVar[frozenset[str]] = frozenset()

    model: NameField | None = field(None, "A name from /v1/models; default: the first.")

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        kept = {name: value for name, value in given.items() if value is not None}
        known = cls.model_fields
        if "text" in known and "input" not in known and "text" not in kept and "input" in kept:
            kept["text"] = kept.pop("input")  # the name that OpenAI's routes have for a text
        # the table's order: a request with tools and tool_choice is refused for its tools
        for name in dict.fromkeys((*NOT_OFFERED, *given)):
            if name in known or name not in kept:
                continue
            value = kept.pop(name)
            if name in IGNORED or value in NOT_OFFERED.get(name, ()):
                continue
            sentence = "There is no field {name} here.{hint}"
            if name in NOT_OFFERED:
                sentence = "{name} is not offered by this server: omit it."
            said = msg(sentence, name=name[:80], hint=nearest(name[:80], known))
            raise PydanticCustomError("unknown_field", "{said}", {"said": said, "name": name[:80]})
        return kept


class StreamOptions(BaseModel, extra="forbid", strict=True):
    """Options of a stream."""

    include_usage: bool = field(False, "End with an event that holds the token usage.")
    include_obfuscation: bool = field(False, "Accepted and ignored.")
    continuous_usage_stats: bool = field(False, "Token usage in every event.")


class NamedSchema(BaseModel, strict=True):
    """A JSON schema, as OpenAI's clients send it."""

    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(BaseModel, extra="forbid", strict=True):
    """What the text must be: anything, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: NamedSchema | None = None
    # instructor sends a schema without a name
    schema_: dict[str, Any] | None = Field(None, alias="schema")

    def json_value(self) -> dict[str, Any] | Literal[True] | None:
        if self.type == "text":
            return None
        given = self.schema_ if self.json_schema is None else self.json_schema.schema_
        require_that(
            given is not None or self.type != "json_schema",
            "response_format of type json_schema needs its json_schema.",
        )
        return True if given is None else given


SETTINGS = settings_of(GenerationConfig, ConstraintOptions)
# settings of `generate` that a request has under the same names, with the same bounds
SHARED = [*(name for name in settings_of(Sampling) if name != "logit_bias"), "ignore_eos"]


def request_field(name: str, **changes: Any) -> Any:
    """The field of a request for a setting of `generate`."""
    one = SETTINGS[name]
    return field(one.default, one.help, **{**one.bounds, **changes})


if TYPE_CHECKING:
    SharedFields = ApiRequest
else:
    SharedFields = create_model(
        "SharedFields",
        __base__=ApiRequest,
        **{name: (SETTINGS[name].kind, request_field(name)) for name in SHARED},
    )


class GenerationFields(SharedFields):
    """How text is generated."""

    max_tokens: int | None = field(None, "Maximum new tokens.", ge=0)
    max_completion_tokens: int | None = field(None, "New name of max_tokens.", ge=1)
    n: int = request_field("n", le=128)
    stop: Stop | Stops | None = field(None, "Texts to stop before.")
    seed: int | None = request_field("seed")
    stream: bool = field(False, "Server-sent events, the last of them [DONE].")
    stream_options: StreamOptions | None = None
    logit_bias: LogitBias | None = field(None, "Added to the scores of tokens, by id.")
    min_tokens: int | None = request_field("min_tokens")
    response_format: ResponseFormat | None = field(None, "Plain JSON, or a schema.")
    guided_json: dict[str, Any] | None = field(None, "JSON schema to follow.")
    guided_regex: str | None = field(None, SETTINGS["regex"].help)
    guided_choice: Choices | None = field(None, "The text must be one of these.")

    @property
    def limit(self) -> int | None:
        """The maximum number of new tokens, under either name; None: the default."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def settings(self) -> dict[str, Any]:
        """The settings of `generate`, except the number and length of the texts."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        constraints = self.constraints()
        require_that(
            len(constraints) <= 1,
            "{constraints} cannot be combined: choose one.",
            constraints=" and ".join(constraints),
        )
        return {
            **{name: getattr(self, name) for name in SHARED},
            "stop": tuple(stops),
            "logit_bias": self._bias(),
            **dict(constraints.values()),
            **({"min_tokens": self.min_tokens} if self.min_tokens else {}),
        }

    def _bias(self) -> dict[int, float]:
        require_that(
            all(token.isdecimal() and len(token) < 10 for token in self.logit_bias or {}),
            "logit_bias must map token ids to numbers.",
        )
        return {int(token): value for token, value in (self.logit_bias or {}).items()}

    def constraints(self) -> dict[str, tuple[str, Any]]:
        """The setting of `generate` for each field that constrains the text."""
        form = self.response_format
        given = {
            "response_format": ("json_schema", form.json_value() if form else None),
            "guided_json": ("json_schema", self.guided_json),
            "guided_regex": ("regex", self.guided_regex),
            "guided_choice": ("choices", self.guided_choice),
        }
        return {field: pair for field, pair in given.items() if pair[1] is not None}

    @property
    def constrained(self) -> bool:
        """Whether the text must be something, so that a grammar may have to be compiled."""
        return bool(getattr(self, "tools", False) or self.constraints() or self.min_tokens)

    @property
    def seeds(self) -> list[int | None]:
        """One seed for each continuation of a prompt: s, s + 1, …"""
        return [None if self.seed is None else self.seed + i for i in range(self.n)]


class CompletionRequest(
    GenerationFields, json_schema_extra=example(prompt="The state of", max_tokens=16, temperature=0)
):
    """A prompt to continue."""

    prompt: PromptInput = field("", "A text, its tokens, or a list of either.")
    max_tokens: int | None = field(16, "Maximum new tokens; 0 only with echo.", ge=0)
    logprobs: TopLogprobs | None = field(None, "Number of top tokens to return for each.")
    echo: bool = field(False, "Return the prompt too.")


class TextPart(BaseModel):
    """A part of a message."""

    type: Literal["text", "input_text", "output_text"]
    text: str


TextParts = Annotated[list[TextPart], Field(max_length=MAX_TEXTS)]


class Message(BaseModel, strict=True):
    """A message of a conversation."""

    role: str = Field(min_length=1, max_length=80, examples=["user"])
    content: str | TextParts | None = Field(None, examples=["안녕?"])
    name: str | None = None
    tool_calls: list[ToolCall] | None = field(None, "What an assistant called.", max_length=128)
    tool_call_id: str | None = field(None, "The call that a tool's message answers.")
    function_call: None = field(None, "Of an older API: use tool_calls.")

    @property
    def uses_tools(self) -> bool:
        return self.role in ("tool", "function") or bool(self.tool_calls)

    def plain(self) -> dict[str, Any]:
        """As a chat template reads it; OpenAI's newer role "developer" is "system"."""
        parts = self.content if isinstance(self.content, list) else []
        text = "".join(part.text for part in parts) if parts else self.content or ""
        role = "system" if self.role == "developer" else self.role
        found = {"role": role, "content": str(text)}
        if not self.uses_tools:
            return found
        calls = [call.plain() for call in self.tool_calls or ()]
        known = {"name": self.name, "tool_call_id": self.tool_call_id, "tool_calls": calls}
        return found | {name: value for name, value in known.items() if value}


class ChatRequest(
    GenerationFields,
    json_schema_extra=example(messages=[{"role": "user", "content": "Hello!"}], max_tokens=16),
):
    """A conversation to answer."""

    messages: list[Message] = Field(min_length=1, max_length=1000)
    logprobs: bool = field(False, "Return the log-probability of each token.")
    top_logprobs: TopLogprobs | None = field(None, "Number of top tokens to return for each.")
    tools: list[Tool] = field(
        [], "Functions that the model may call, if its chat template has tools.", max_length=128
    )
    tool_choice: ToolChoice = field("auto", "Whether it must call one, and which.")
    parallel_tool_calls: bool = field(True, "Whether it may call more than one.")
    reasoning_effort: str | None = field(None, "For the chat template.")

    @property
    def must_call(self) -> bool:
        return self.tool_choice not in ("none", "auto")

    @property
    def callable_tools(self) -> list[Tool]:
        """The tools that the answer may call."""
        if isinstance(self.tool_choice, Tool):
            name = self.tool_choice.function.name
            return [tool for tool in self.tools if tool.function.name == name]
        return [] if self.tool_choice == "none" else self.tools
