"""What the demo does and what it found: the plan, and the story that its page tells."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ERAS = ((1900, "before 1900"), (1946, "1900–1945"), (9999, "after 1945"))
HELD_OUT_MESSAGES = 6  # one message in so many
GENERATION_PROMPTS = (
    "The state of the Union is",
    "My fellow Americans,",
    "We must",
    "The people of the United States",
)
MASKED_SENTENCES = (
    "The [MASK] of the United States is strong.",
    "I ask the [MASK] to pass this bill.",
    "We are at [MASK] with all nations.",
)
ATTENTION_SENTENCE = "The Congress must act now to protect the people."


@dataclass(frozen=True)
class DemoSize:
    """A model that learns as much as its seconds allow, and the samples it learns from."""

    seconds: float
    width: int
    depth: int
    length: int
    batch: int


# What the GPT may take: on matrix units or many cores, and on two cores of the slowest kind that
# was tried (fp32 at 60 GFLOP/s). Its size follows by the rule of `pretrain gpt`.
GPT_SECONDS = (60, 100)
GPT_LENGTH = 128  # tokens of a sample
TEXT_TOKENS = 2_200_000  # of the speeches that are not held out, about
# From large to small: a machine takes the first that it can give enough updates.
BERT_SIZES = (
    DemoSize(seconds=84, width=128, depth=2, length=64, batch=64),
    DemoSize(seconds=170, width=128, depth=2, length=64, batch=32),
)
ENOUGH_UPDATES = 200
CLEAR_GAIN = 0.04  # of accuracy: some two standard errors of three seeds on 400 rows
FEW_UPDATES = 60  # fewer teach nothing that a page could show


@dataclass(frozen=True)
class DemoConfig:
    """How long each part takes and how large the models are: the one place to tune."""

    gpt: DemoSize = DemoSize(seconds=60, width=128, depth=2, length=128, batch=16)
    bert: DemoSize = BERT_SIZES[0]
    vocab: int = 4096
    labelled: int = 120  # paragraphs with their era to learn from: few, as labels are in life
    judged: int = 400  # paragraphs of messages that were held out
    updates: int = 60  # of a fine-tuning
    seeds: int = 3  # fine-tunings of each kind; their mean is reported


@dataclass(frozen=True)
class Paragraph:
    text: str
    year: int

    @property
    def era(self) -> str:
        return next(name for end, name in ERAS if self.year < end)


@dataclass
class Story:
    """Everything the page shows."""

    plan: DemoConfig
    out: Path
    seconds: dict[str, float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    cut: dict[str, list[str]] = field(default_factory=dict)  # a sentence as each vocabulary has it
    samples: list[tuple[str, str]] = field(default_factory=list)
    fills: list[tuple[str, list[tuple[str, float]]]] = field(default_factory=list)
    # accuracy of telling the era, by who tells it
    scores: dict[str, float] = field(default_factory=dict)
    said: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    attention: list[Any] = field(default_factory=list)  # [heads, T, T] of each layer
