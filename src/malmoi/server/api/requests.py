"""Request bodies. Names and defaults are OpenAI's where it has them."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from malmoi.errors import nearest
from malmoi.inference.generation.detokenize import MAX_STOP_CHARACTERS, MAX_STOP_STRINGS

MAX_TEXTS = 256  # of one request
MAX_TOP_LOGPROBS = 20  # tokens named beside each that is written

Token = Annotated[int, Field(ge=0, lt=2**31)]
TextList = Annotated[list[str], Field(min_length=1, max_length=MAX_TEXTS)]
Tokens = Annotated[list[Token], Field(min_length=1)]
TokenLists = Annotated[list[Tokens], Field(min_length=1, max_length=MAX_TEXTS)]
PromptInput = str | TextList | Tokens | TokenLists
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Top = Annotated[int, Field(ge=1, le=100)]


class ApiRequest(BaseModel):
    """A request. What it says in a field that does not exist would be lost, so such a field is
    refused.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str | None = Field(
        None, max_length=200, description="A name of /v1/models; none: the first."
    )

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        unknown = (
            [name for name in given if name not in cls.model_fields]
            if isinstance(given, dict)
            else []
        )
        if unknown:
            told = {"name": unknown[0][:80], "hint": nearest(unknown[0][:80], cls.model_fields)}
            raise PydanticCustomError("unknown_field", "There is no field {name} here.{hint}", told)
        return given


class StreamOptions(BaseModel):
    """How a stream ends."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = Field(False, description="A last event with the numbers of tokens.")
    include_obfuscation: bool = Field(
        False, description="Taken and not needed: nothing is added to events."
    )


class GenerationFields(ApiRequest):
    """What a text may be asked to be like."""

    max_tokens: int | None = Field(None, ge=0, description="Maximum new tokens.")
    temperature: float = Field(1.0, ge=0, le=100, description="0 always takes the likeliest token.")
    top_p: float | None = Field(
        None, gt=0, le=1, description="Among the likeliest tokens that reach p together."
    )
    top_k: int | None = Field(None, ge=1, le=2**31, description="Among the k likeliest tokens.")
    repetition_penalty: float = Field(
        1.0, ge=0.01, le=100, description="Above 1, repetition becomes less likely."
    )
    n: int = Field(1, ge=1, le=128, description="Continuations of each prompt.")
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOP_STRINGS)] | None = Field(
        None, description="Texts to stop before."
    )
    seed: int | None = Field(None, ge=-(2**63), lt=2**63, description="Random seed.")
    stream: bool = Field(False, description="Server-sent events, the last of them [DONE].")
    stream_options: StreamOptions | None = None
    presence_penalty: float = Field(
        0, ge=0, le=0, description="Not offered; see repetition_penalty."
    )
    frequency_penalty: float = Field(
        0, ge=0, le=0, description="Not offered; see repetition_penalty."
    )
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = Field(
        None, description="Not offered."
    )
    user: str | None = Field(None, description="Taken and not kept.")

    def settings(self) -> dict[str, Any]:
        """The same as settings of `generate`, but for how many and how long."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        names = ("temperature", "top_p", "top_k", "repetition_penalty")
        return {"stop": tuple(stops)} | {name: getattr(self, name) for name in names}

    def seeds(self, count: int) -> list[int | None]:
        """One for each continuation of a prompt: s, s + 1, …"""
        return [None if self.seed is None else self.seed + i for i in range(count)]


class CompletionRequest(GenerationFields):
    """A text to go on from."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"prompt": "The state of", "max_tokens": 16, "temperature": 0}]
        }
    )

    prompt: PromptInput = Field("", description="A text, its tokens, or a list of either.")
    max_tokens: int | None = Field(
        16, ge=0, description="The most tokens to write; 0 only with echo."
    )
    logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description="Likely tokens to name beside each."
    )
    echo: bool = Field(False, description="The prompt comes first.")
    best_of: int | None = Field(
        None, ge=1, le=128, description="Write so many and give the n likeliest."
    )
    suffix: Literal[""] | None = Field(
        None, description="Not offered: these models read from left to right."
    )


class TextPart(BaseModel):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """What someone said."""

    model_config = ConfigDict(strict=True)

    role: str = Field(min_length=1, max_length=80, examples=["user"])
    content: str | Annotated[list[TextPart], Field(max_length=MAX_TEXTS)] | None = Field(
        None, examples=["안녕?"]
    )
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """As a chat template reads it."""
        parts = self.content if isinstance(self.content, list) else []
        text = "".join(part.text for part in parts) if parts else self.content or ""
        return {"role": self.role, "content": str(text)}


class ChatRequest(GenerationFields):
    """A conversation to answer in."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 16}]
        }
    )

    messages: list[Message] = Field(min_length=1, max_length=1000)
    max_completion_tokens: int | None = Field(
        None, ge=1, description="The newer name of max_tokens."
    )
    logprobs: bool = Field(False, description="The log-probability of each token.")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description="Likely tokens to name beside each."
    )


class EmbeddingRequest(ApiRequest):
    """Texts to turn into vectors."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"input": ["a text", "another"]}]})

    input: PromptInput = Field(description="A text, its tokens, or a list of either.")
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1, description="Only the model's own width.")
    layers: list[int] = Field(
        [-1], min_length=1, max_length=200, description="0 is the embedding, -1 the last; averaged."
    )
    pool: Literal["mean", "cls"] = Field(
        "mean", description="Over the tokens, or the one that speaks for the text."
    )
    truncate: bool = Field(False, description="Cut texts that are longer than the context.")
    user: str | None = Field(None, description="Taken and not kept.")


class FillRequest(ApiRequest):
    """A text with masks in it."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"text": "나는 오늘 [MASK] 갔다.", "top": 5}]}
    )

    text: str
    top: Top = Field(5, description="Candidates for each mask.")


class ClassifyRequest(ApiRequest):
    """A text to say a label of: by a model that was fine-tuned for it, or any model among the
    labels given.
    """

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"text": "I love this movie!", "labels": ["good", "bad"]}]}
    )

    text: str | TextList
    pair: str | TextList | None = Field(None, description="The second text of each pair.")
    labels: Annotated[list[str], Field(min_length=2, max_length=64)] | None = Field(
        None, description="For a model without a head for labels: those to choose among."
    )
    prompt: str | None = Field(None, description="How to ask, with {text} and perhaps {labels}.")


class NerRequest(ApiRequest):
    """Texts to mark names in."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"text": "Ada Lovelace lived in London."}]}
    )

    text: str | TextList


class AnswerRequest(ApiRequest):
    """A question, about a text where there is one."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"question": "Where is Ada?", "context": "Ada is in London."}]
        }
    )

    question: str
    context: str = ""
    max_tokens: int = Field(
        32, ge=1, description="Of an answer that is written, not found in the text."
    )


class ScoreRequest(ApiRequest):
    """Continuations of one context, to say how likely each is."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"context": "The capital of France is", "continuations": [" Paris", " Rome"]}
            ]
        }
    )

    context: str = ""
    continuations: TextList


class AttentionRequest(ApiRequest):
    """A text, or a pair of texts, to look at the attention of."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"text": "어제 카페 갔었어", "pair": None}]}
    )

    text: str
    pair: str | None = None


class LensRequest(ApiRequest):
    """A text to see what every layer would say of."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"text": "The capital of France is", "top": 3}]}
    )

    text: str
    top: Top = Field(5, description="Tokens at each place of each layer.")
