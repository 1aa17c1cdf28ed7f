"""What a request may say, field by field. Names and defaults are OpenAI's where it has them."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from malmoi.decode.stream import LONGEST_STOP, MOST_STOPS
from malmoi.errors import nearest

MOST_TEXTS = 256  # of one request
MOST_TOP = 20  # tokens named beside each that is written

Token = Annotated[int, Field(ge=0, lt=2**31)]
Texts = Annotated[list[str], Field(min_length=1, max_length=MOST_TEXTS)]
Tokens = Annotated[list[Token], Field(min_length=1)]
TokenLists = Annotated[list[Tokens], Field(min_length=1, max_length=MOST_TEXTS)]
Prompt = str | Texts | Tokens | TokenLists
Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
Top = Annotated[int, Field(ge=1, le=100)]


class Ask(BaseModel):
    """A request. What it says in a field that does not exist would be lost, so such a field is refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str | None = Field(None, max_length=200, description="A name of /v1/models; none: the first.")

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        unknown = [name for name in given if name not in cls.model_fields] if isinstance(given, dict) else []
        if unknown:
            told = {"name": unknown[0][:80], "hint": nearest(unknown[0][:80], cls.model_fields)}
            raise PydanticCustomError("unknown_field", "There is no field {name} here.{hint}", told)
        return given


class StreamOptions(BaseModel):
    """How a stream ends."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = Field(False, description="A last event with the numbers of tokens.")
    include_obfuscation: bool = Field(False, description="Taken and not needed: nothing is added to events.")


class WriteAsk(Ask):
    """What a text may be asked to be like."""

    max_tokens: int | None = Field(None, ge=0, description="The most tokens to write.")
    temperature: float = Field(1.0, ge=0, le=100, description="0 always takes the likeliest token.")
    top_p: float | None = Field(None, gt=0, le=1, description="Among the likeliest tokens that reach p together.")
    top_k: int | None = Field(None, ge=1, le=2**31, description="Among the k likeliest tokens.")
    repetition_penalty: float = Field(1.0, ge=0.01, le=100, description="Above 1, repetition becomes less likely.")
    n: int = Field(1, ge=1, le=128, description="Continuations of each prompt.")
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS)] | None = Field(
        None, description="Texts to stop before."
    )
    seed: int | None = Field(None, ge=-(2**63), lt=2**63, description="The same seed writes the same text.")
    stream: bool = Field(False, description="Server-sent events, the last of them [DONE].")
    stream_options: StreamOptions | None = None
    presence_penalty: float = Field(0, ge=0, le=0, description="Not offered; see repetition_penalty.")
    frequency_penalty: float = Field(0, ge=0, le=0, description="Not offered; see repetition_penalty.")
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = Field(None, description="Not offered.")
    user: str | None = Field(None, description="Taken and not kept.")

    def settings(self) -> dict[str, Any]:
        """The same as settings of `generate`, but for how many and how long."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        names = ("temperature", "top_p", "top_k", "repetition_penalty")
        return {"stop": tuple(stops)} | {name: getattr(self, name) for name in names}

    def seeds(self, count: int) -> list[int | None]:
        """One for each continuation of a prompt: s, s + 1, …"""
        return [None if self.seed is None else self.seed + i for i in range(count)]


class CompletionAsk(WriteAsk):
    """A text to go on from."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"prompt": "The state of", "max_tokens": 16, "temperature": 0}]}
    )

    prompt: Prompt = Field("", description="A text, its tokens, or a list of either.")
    max_tokens: int | None = Field(16, ge=0, description="The most tokens to write; 0 only with echo.")
    logprobs: int | None = Field(None, ge=0, le=MOST_TOP, description="Likely tokens to name beside each.")
    echo: bool = Field(False, description="The prompt comes first.")
    best_of: int | None = Field(None, ge=1, le=128, description="Write so many and give the n likeliest.")
    suffix: Literal[""] | None = Field(None, description="Not offered: these models read from left to right.")


class TextPart(BaseModel):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """What someone said."""

    model_config = ConfigDict(strict=True)

    role: str = Field(min_length=1, max_length=80, examples=["user"])
    content: str | Annotated[list[TextPart], Field(max_length=MOST_TEXTS)] | None = Field(None, examples=["안녕?"])
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """As a chat template reads it."""
        parts = self.content if isinstance(self.content, list) else []
        text = "".join(part.text for part in parts) if parts else self.content or ""
        return {"role": self.role, "content": str(text)}


class ChatAsk(WriteAsk):
    """A conversation to answer in."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 16}]}
    )

    messages: list[Message] = Field(min_length=1, max_length=1000)
    max_completion_tokens: int | None = Field(None, ge=1, description="The newer name of max_tokens.")
    logprobs: bool = Field(False, description="The log-probability of each token.")
    top_logprobs: int | None = Field(None, ge=0, le=MOST_TOP, description="Likely tokens to name beside each.")


class EmbeddingAsk(Ask):
    """Texts to turn into vectors."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"input": ["a text", "another"]}]})

    input: Prompt = Field(description="A text, its tokens, or a list of either.")
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1, description="Only the model's own width.")
    layers: list[int] = Field(
        [-1], min_length=1, max_length=200, description="0 is the embedding, -1 the last; averaged."
    )
    pool: Literal["mean", "cls"] = Field("mean", description="Over the tokens, or the one that speaks for the text.")
    truncate: bool = Field(False, description="Cut texts that are longer than the context.")
    user: str | None = Field(None, description="Taken and not kept.")


class FillAsk(Ask):
    """A text with masks in it."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"text": "나는 오늘 [MASK] 갔다.", "top": 5}]})

    text: str
    top: Top = Field(5, description="Candidates for each mask.")


class ClassifyAsk(Ask):
    """A text to say a label of: by a model that was fine-tuned for it, or any model among the labels given."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"text": "I love this movie!", "labels": ["good", "bad"]}]}
    )

    text: str | Texts
    pair: str | Texts | None = Field(None, description="The second text of each pair.")
    labels: Annotated[list[str], Field(min_length=2, max_length=64)] | None = Field(
        None, description="For a model without a head for labels: those to choose among."
    )
    prompt: str | None = Field(None, description="How to ask, with {text} and perhaps {labels}.")


class NerAsk(Ask):
    """Texts to mark names in."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"text": "Ada Lovelace lived in London."}]})

    text: str | Texts


class AnswerAsk(Ask):
    """A question, about a text where there is one."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"question": "Where is Ada?", "context": "Ada is in London."}]}
    )

    question: str
    context: str = ""
    max_tokens: int = Field(32, ge=1, description="Of an answer that is written, not found in the text.")


class ScoreAsk(Ask):
    """Continuations of one context, to say how likely each is."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"context": "The capital of France is", "continuations": [" Paris", " Rome"]}]}
    )

    context: str = ""
    continuations: Texts


class AttentionAsk(Ask):
    """A text, or a pair of texts, to look at the attention of."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"text": "어제 카페 갔었어", "pair": None}]})

    text: str
    pair: str | None = None


class LensAsk(Ask):
    """A text to see what every layer would say of."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"text": "The capital of France is", "top": 3}]})

    text: str
    top: Top = Field(5, description="Tokens at each place of each layer.")
