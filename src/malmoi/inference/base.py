"""What every ability of a model builds on: its parts, its abilities, and how it encodes a text."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Self

from malmoi.checkpoint import Checkpoint
from malmoi.config import ModelConfig
from malmoi.errors import UsageError
from malmoi.inference.prompt import encode_prompt, require_fit
from malmoi.messages import msg
from malmoi.tokenizer import Encoding, Tokenizer

if TYPE_CHECKING:
    from malmoi.inference.predict import Predictor
    from malmoi.inference.predictors import TaskHead
    from malmoi.tracing.index import TextIndex

# available without fine-tuning: see zero_shot.py
ZERO_SHOT_ABILITIES = ("classify", "answer", "summarise", "translate")
LANGUAGE_ABILITIES = ("generate", "stream", "chat", "score", "perplexity", "bits_per_byte")
ABILITIES = {
    "lm": (*LANGUAGE_ABILITIES, "logits", *ZERO_SHOT_ABILITIES),
    "mlm": ("fill", "logits", "classify"),
    **dict.fromkeys(("classify", "tag", "span", "choice"), ("predict",)),
}


class LoadedModel:
    """A network with its tokenizer and labels."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.network = checkpoint.network.eval()

    @property
    def tokenizer(self) -> Tokenizer:
        return self.checkpoint.required_tokenizer

    @property
    def config(self) -> ModelConfig:
        return self.network.config

    @property
    def labels(self) -> tuple[str, ...]:
        return self.checkpoint.labels

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes of loading: weights that were missing or unused, a changed dtype."""
        return self.checkpoint.notes

    @property
    def abilities(self) -> tuple[str, ...]:
        """The methods that this model's heads allow."""
        if self.config.encoder_depth:
            return ("translate", "cross_attention")
        if self.config.feature_count:
            return ("describe",)
        heads = [*self.network.heads]
        heads += [] if self.masked is self else self.masked.network.heads
        verbs = dict.fromkeys(verb for head in heads for verb in ABILITIES.get(head, ()))
        if self.config.mixer == "bilstm":  # its language model reads both ways: scores only
            verbs = dict.fromkeys(v for v in verbs if v in ("score", "perplexity", "bits_per_byte"))
        verbs |= {"predict": None} if self.task_head else {}
        from malmoi.inference.predictors import entailment_class

        described = self.checkpoint.sentence or entailment_class(self.checkpoint) is not None
        verbs |= {"classify": None} if described else {}
        return (*verbs, "embed")

    @cached_property
    def task_head(self) -> "TaskHead | None":
        """The head the model was fine-tuned with; None if it was not fine-tuned."""
        from malmoi.inference.predictors import task_heads

        found = task_heads(self.predictor) if self.checkpoint.tokenizer else []
        return found[0] if found else None

    @cached_property
    def predictor(self) -> "Predictor":
        """The network as it was fine-tuned to read its inputs."""
        from malmoi.inference.predict import Predictor

        return Predictor.of(self.checkpoint)

    @cached_property
    def masked(self) -> Self:
        """The bidirectional form of a model trained both ways; any other model itself."""
        if not (self.config.both_ways and self._causal):
            return self
        return type(self)(replace(self.checkpoint, network=self.network.masked()))

    def _require_text_input(self, verb: str) -> None:
        if self.config.encoder_depth:
            raise UsageError("This model cannot {verb}: it translates. Use translate.", verb=verb)
        if self.config.feature_count:
            raise UsageError(
                "This model cannot {verb}: it generates text from features. Use describe.",
                verb=verb,
            )

    def _require_head(self, head: str, verb: str) -> None:
        self._require_text_input(verb)
        if head not in self.network.heads:
            can = ", ".join(verb for verb in self.abilities if verb != "stream")
            heads = ", ".join(self.network.heads) or msg("none")
            raise UsageError(
                "This model cannot {verb}: it has no {head} head (its heads: {heads}). It "
                "can: {can}.",
                verb=verb,
                head=head,
                heads=heads,
                can=can,
            )

    @property
    def input_columns(self) -> dict[str, str]:
        """The columns that a fine-tuned model reads of a row: text, pair, and any choices."""
        from malmoi.inference.predictors import CHOICE

        names = ("text", "pair", "choices") if self.task_head is CHOICE else ("text", "pair")
        known = self.predictor.columns
        return {name: known[name] for name in names if name in known}

    @property
    def _ends(self) -> frozenset[int]:
        """Tokens that end a text: generation_config.json's, else the tokenizer's."""
        return frozenset(self.checkpoint.end_tokens)

    @cached_property
    def _own_text(self) -> "TextIndex":
        """The index of the text that the model was trained on, in its run's folder."""
        from malmoi.tracing.index import TextIndex

        if self.checkpoint.source is None:
            raise UsageError("This model has not been saved yet: call model.save(folder) first.")
        return TextIndex.open(self.checkpoint.source, self.tokenizer)

    @cached_property
    def _causal(self) -> bool:
        return self.network.trunk.is_causal

    def _encoded(self, text: str, *, truncate: bool) -> Encoding:
        """Encodes a text for this model; one that is too long is an error unless `truncate`."""
        read = encode_prompt if self._causal else Tokenizer.encode
        encoding = read(self.tokenizer, text, max_tokens=self._longest if truncate else None)
        return require_fit(encoding, self.config.context)

    @property
    def _longest(self) -> int:
        """Tokens at which a text is truncated: a sentence encoder's folder sets its own limit."""
        sentence = self.checkpoint.sentence
        limit = 0 if sentence is None else sentence.max_tokens
        return min(self.config.context, limit or self.config.context)


def listed_texts(texts: str | Sequence[str], name: str) -> list[str]:
    listed = [texts] if isinstance(texts, str) else list(texts)
    for text in listed:
        if not isinstance(text, str):
            raise UsageError(
                "{name} must be a text or a list of texts, not {type}: {text!r:.60}.",
                name=name,
                type=type(text).__name__,
                text=text,
            )
    return listed
