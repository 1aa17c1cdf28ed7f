"""Request bodies. Names and defaults are OpenAI's where it has them."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from malmoi.errors import nearest
from malmoi.inference.generation.detokenize import MAX_STOP_CHARACTERS, MAX_STOP_STRINGS

MAX_TEXTS = 256  # per request
MAX_TOP_LOGPROBS = 20

Token = Annotated[int, Field(ge=0, lt=2**31)]
TextList = Annotated[list[str], Field(min_length=1, max_length=MAX_TEXTS)]
Tokens = Annotated[list[Token], Field(min_length=1)]
TokenLists = Annotated[list[Tokens], Field(min_length=1, max_length=MAX_TEXTS)]
PromptInput = str | TextList | Tokens | TokenLists
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Top = Annotated[int, Field(ge=1, le=100)]
TextField = Annotated[str, Field(max_length=20_000)]
NameField = Annotated[str, Field(max_length=200)]


def _example(**fields: Any) -> dict[str, Any]:
    return {"examples": [fields]}


class ApiRequest(BaseModel):
    """A request. Unknown fields are refused, so that a misspelt one is not silently ignored."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: NameField | None = Field(None, description="A name from /v1/models; default: the first.")

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        for name in given if isinstance(given, dict) else ():
            if name not in cls.model_fields:
                about = {"name": name[:80], "hint": nearest(name[:80], cls.model_fields)}
                sentence = "There is no field {name} here.{hint}"
                raise PydanticCustomError("unknown_field", sentence, about)
        return given


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = Field(False, description="End with an event that holds the usage.")
    include_obfuscation: bool = Field(False, description="Accepted and ignored.")


class GenerationFields(ApiRequest):
    """How text is generated."""

    max_tokens: int | None = Field(None, ge=0, description="Maximum new tokens.")
    temperature: float = Field(1.0, ge=0, le=100, description="0 always takes the likeliest token.")
    top_p: float | None = Field(None, gt=0, le=1, description="Nucleus sampling.")
    top_k: int | None = Field(None, ge=1, le=2**31, description="Sample from the k likeliest.")
    repetition_penalty: float = Field(1.0, ge=0.01, le=100, description="Above 1: less repetition.")
    n: int = Field(1, ge=1, le=128, description="Continuations of each prompt.")
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOP_STRINGS)] | None = Field(
        None, description="Texts to stop before."
    )
    seed: int | None = Field(None, ge=-(2**63), lt=2**63, description="Random seed.")
    stream: bool = Field(False, description="Server-sent events, the last of them [DONE].")
    stream_options: StreamOptions | None = None
    presence_penalty: float = Field(0, ge=0, le=0, description="Only 0; see repetition_penalty.")
    frequency_penalty: float = Field(0, ge=0, le=0, description="Only 0; see repetition_penalty.")
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = Field(
        None, description="Not supported."
    )
    user: str | None = Field(None, description="Accepted and not stored.")

    def settings(self) -> dict[str, Any]:
        """The settings of `generate`, except the number and length of the texts."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        names = ("temperature", "top_p", "top_k", "repetition_penalty")
        return {"stop": tuple(stops)} | {name: getattr(self, name) for name in names}

    def seeds(self, count: int) -> list[int | None]:
        """One for each continuation of a prompt: s, s + 1, …"""
        return [None if self.seed is None else self.seed + i for i in range(count)]


class CompletionRequest(
    GenerationFields,
    json_schema_extra=_example(prompt="The state of", max_tokens=16, temperature=0),
):
    """A prompt to continue."""

    prompt: PromptInput = Field("", description="A text, its tokens, or a list of either.")
    max_tokens: int | None = Field(16, ge=0, description="Maximum new tokens; 0 only with echo.")
    logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description="Number of top tokens to return for each."
    )
    echo: bool = Field(False, description="Return the prompt too.")
    best_of: int | None = Field(
        None, ge=1, le=128, description="Generate this many and return the n likeliest."
    )
    suffix: Literal[""] | None = Field(None, description="Not supported.")


class TextPart(BaseModel):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A message of a conversation."""

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


class ChatRequest(
    GenerationFields,
    json_schema_extra=_example(messages=[{"role": "user", "content": "Hello!"}], max_tokens=16),
):
    """A conversation to answer."""

    messages: list[Message] = Field(min_length=1, max_length=1000)
    max_completion_tokens: int | None = Field(None, ge=1, description="New name of max_tokens.")
    logprobs: bool = Field(False, description="Return the log-probability of each token.")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description="Number of top tokens to return for each."
    )


class EmbeddingRequest(ApiRequest, json_schema_extra=_example(input=["a text", "another"])):
    """Texts to embed."""

    input: PromptInput = Field(description="A text, its tokens, or a list of either.")
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1, description="Only the model's own width.")
    layers: list[int] = Field(
        [-1], min_length=1, max_length=200, description="0: the embedding, -1: the last; averaged."
    )
    pool: Literal["mean", "cls"] = Field(
        "mean", description="The mean over the tokens, or the [CLS] token (a GPT's last token)."
    )
    truncate: bool = Field(False, description="Truncate texts longer than the context.")
    user: str | None = Field(None, description="Accepted and not stored.")


class FillRequest(ApiRequest, json_schema_extra=_example(text="나는 오늘 [MASK] 갔다.", top=5)):
    """A text with masks."""

    text: str
    top: Top = Field(5, description="Candidates for each mask.")


class ClassifyRequest(
    ApiRequest, json_schema_extra=_example(text="I love this movie!", labels=["good", "bad"])
):
    """Texts to classify, by a fine-tuned model or zero-shot among the labels given."""

    text: str | TextList
    pair: str | TextList | None = Field(None, description="The second text of each pair.")
    labels: Annotated[list[str], Field(min_length=2, max_length=64)] | None = Field(
        None, description="Labels to choose from, for a model without a classification head."
    )
    prompt: str | None = Field(None, description="A prompt with {text} and optionally {labels}.")


class NerRequest(ApiRequest, json_schema_extra=_example(text="Ada Lovelace lived in London.")):
    """Texts to tag."""

    text: str | TextList


class AnswerRequest(
    ApiRequest, json_schema_extra=_example(question="Where is Ada?", context="Ada is in London.")
):
    """A question, optionally about a text."""

    question: str
    context: str = ""
    max_tokens: int = Field(32, ge=1, description="Of a generated, not an extracted answer.")


class ScoreRequest(
    ApiRequest,
    json_schema_extra=_example(
        context="The capital of France is", continuations=[" Paris", " Rome"]
    ),
):
    """Continuations of one context to score."""

    context: str = ""
    continuations: TextList


class AttentionRequest(ApiRequest, json_schema_extra=_example(text="어제 카페 갔었어")):
    """A text, or a pair of texts, whose attention maps to return."""

    text: str
    pair: str | None = None


class LensRequest(ApiRequest, json_schema_extra=_example(text="The capital of France is", top=3)):
    """A text for the logit lens."""

    text: str
    top: Top = Field(5, description="Tokens at each position of each layer.")
