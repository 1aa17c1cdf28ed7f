"""A model in a user's hands: what `malmoi.load` returns."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, overload

import numpy as np
import torch

from malmoi.checkpoint import Checkpoint, write_checkpoint
from malmoi.config import ModelConfig
from malmoi.errors import UsageError, nearest
from malmoi.inference.answer import Answer
from malmoi.inference.conversation import encode_conversation
from malmoi.inference.embed import Float32Array, Pool, embed_texts
from malmoi.inference.fill import Fill, fills
from malmoi.inference.generation.config import GenerationConfig
from malmoi.inference.generation.constraints import CONSTRAINT_SETTINGS, build_constraint
from malmoi.inference.generation.fast_argmax import column_major, fast_argmax_for
from malmoi.inference.generation.generate import TextGenerator, continuations, stream_texts
from malmoi.inference.generation.prefix_cache import PrefixCache
from malmoi.inference.generation.sampling import Sampling
from malmoi.inference.precision import open_for_use
from malmoi.inference.predict import (
    MultiLabelPrediction,
    Prediction,
    Predictor,
    Span,
    row_texts,
)
from malmoi.inference.predictors import TASK_HEADS, TaskHead, task_heads
from malmoi.inference.prompt import encode_prompt
from malmoi.inference.score import Score, score_pairs, sliding_bits_per_byte, sliding_perplexity
from malmoi.inference.zero_shot import ZeroShot
from malmoi.model import Network
from malmoi.tokenizer import Encoding, Tokenizer
from malmoi.tokenizer.chat_template import Messages

# a text, a pair, a question and its context, a text (and a question) and its choices, or a row
Asked = (
    str
    | tuple[str, str]
    | tuple[str, Sequence[str]]
    | tuple[str, str, Sequence[str]]
    | Mapping[str, object]
)
Predicted = Prediction | MultiLabelPrediction | Answer | list[Span]
# without training: see zero_shot.py
ZERO_SHOT_ABILITIES = ("classify", "answer", "summarise", "translate")
ABILITIES = {
    "lm": (
        "generate",
        "stream",
        "chat",
        "score",
        "perplexity",
        "bits_per_byte",
        "logits",
        *ZERO_SHOT_ABILITIES,
    ),
    "mlm": ("fill", "logits", "classify"),
    **{one.head: ("predict",) for one in TASK_HEADS},
}


class GenerationOptions(TypedDict, total=False):
    """How text is generated."""

    max_new_tokens: int  # 40
    temperature: float  # 1.0; 0 is greedy
    top_k: int | None
    top_p: float | None
    repetition_penalty: float  # 1.0
    frequency_penalty: float  # 0.0: subtracted for each time a token was generated
    presence_penalty: float  # 0.0: subtracted from every token that was generated
    min_p: float | None  # only tokens at least this many times as likely as the best
    logit_bias: Mapping[int, float]  # added to the scores of tokens
    ignore_eos: bool  # False; True: the end-of-text token does not end the text
    min_tokens: int  # at least this many before the end
    # the text is JSON of this schema; True: any object
    json_schema: Mapping[str, Any] | Literal[True]
    stop: str | Sequence[str]  # texts to stop before
    seed: int | None  # the same seed gives the same text, alone or in a batch
    choices: Sequence[str]  # the text is one of these
    regex: str  # the text matches this as a whole
    # tokens; or a function of those written so far
    allowed: Iterable[int] | Callable[[list[int]], Iterable[int]]
    banned: Sequence[str]  # words that are not written
    beams: int  # 1; more: the likeliest text by beam search, with temperature=0
    length_penalty: float  # 1.0: beams are scored by log p / length^penalty
    early_stopping: bool | Literal["never"]  # False: when a beam search ends
    # False; True: drafts from the text itself, with temperature=0; the same text, sooner
    speculate: bool


class GenerationSettings(GenerationOptions, total=False):
    """The same, with the number of continuations."""

    n: int  # 1: continuations of each prompt


def load(
    path: str | Path,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
) -> "Model":
    """Opens a folder written by Malmoi, transformers or PEFT, or a hub id where there is a network.

    The device is the GPU where there is one; the numbers are those of the folder unless a dtype is
    named: fp32, bf16, fp16, or "int8" for weights of a quarter of the size on a processor (see
    `malmoi.model.int8`). Numbers that this machine emulates are computed in fp32 unless they are
    named: `notes` says so.

    Examples:
        >>> malmoi.load("runs/tiny-gpt")
        Model(width=16, depth=2, context=128, can: generate, stream, chat, score, ...)
    """
    checkpoint = open_for_use(path, device, dtype)
    column_major(checkpoint.network)
    return Model(checkpoint)


class Model(ZeroShot):
    """A network, its tokenizer and its labels, and everything one does with them.

    Examples:
        >>> lm = malmoi.load("runs/tiny-gpt")
        >>> lm.perplexity("The state of the union is strong.") > 1
        True
        >>> lm.save("copy")
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.network: Network = checkpoint.network.eval()

    # ------------------------------------------------------------------ what it is

    @property
    def tokenizer(self) -> Tokenizer:
        if self.checkpoint.tokenizer is None:
            raise UsageError(
                "This model's folder has no tokenizer; put its tokenizer.json beside the weights."
            )
        return self.checkpoint.tokenizer

    @property
    def config(self) -> ModelConfig:
        return self.network.config

    @property
    def labels(self) -> tuple[str, ...]:
        return self.checkpoint.labels

    @property
    def notes(self) -> tuple[str, ...]:
        """What was missing or left unused when the folder was read."""
        return self.checkpoint.notes

    @property
    def abilities(self) -> tuple[str, ...]:
        """The methods that this model's heads allow."""
        heads = [*self.network.heads, *([self.task_head.head] if self.task_head else [])]
        heads += [] if self.masked is self else self.masked.network.heads
        return (*dict.fromkeys(verb for head in heads for verb in ABILITIES.get(head, ())), "embed")

    @cached_property
    def task_head(self) -> TaskHead | None:
        """What the model was fine-tuned for; None where it was not."""
        found = task_heads(Predictor.of(self.checkpoint)) if self.checkpoint.tokenizer else []
        return found[0] if found else None

    @cached_property
    def masked(self) -> "Model":
        """This model as a BERT: of one that was trained both ways its bidirectional reading, of any
        other the model itself.
        """
        if not (self.config.both_ways and self._causal):
            return self
        return Model(replace(self.checkpoint, network=self.network.masked()))

    def __repr__(self) -> str:
        c = self.config
        return (
            f"Model(width={c.width}, depth={c.depth}, context={c.context}, can: "
            f"{', '.join(self.abilities)})"
        )

    def save(self, folder: str | Path) -> None:
        """Writes a Hugging Face folder that `transformers` opens."""
        write_checkpoint(self.checkpoint, folder)

    def tokens(self, text: str) -> list[str]:
        """How the tokenizer cuts a text."""
        return [self.tokenizer.token(token) for token in self.tokenizer.encode(text).tokens]

    # ------------------------------------------------------------------ language models

    @overload
    def generate(  # type: ignore[overload-overlap]  # a text is a sequence of texts to Python
        self,
        prompt: str,
        *,
        n: Literal[1] = 1,
        parse_special: bool = False,
        **options: Unpack[GenerationOptions],
    ) -> str: ...
    @overload
    def generate(
        self,
        prompt: Sequence[str],
        *,
        n: Literal[1] = 1,
        parse_special: bool = False,
        **options: Unpack[GenerationOptions],
    ) -> list[str]: ...
    @overload
    def generate(
        self,
        prompt: str | Sequence[str],
        *,
        n: int,
        parse_special: bool = False,
        **options: Unpack[GenerationOptions],
    ) -> str | list[str] | list[list[str]]: ...

    def generate(
        self,
        prompt: str | Sequence[str],
        *,
        n: int = 1,
        parse_special: bool = False,
        **options: Unpack[GenerationOptions],
    ) -> str | list[str] | list[list[str]]:
        """The continuation of a prompt; of a list of prompts a list; with n > 1 a list of n for
        each.

        An empty prompt starts after the token that begins, or else ends, a text; without one it is
        refused. A prompt is text, "<|endoftext|>" in it too, unless `parse_special` says that such
        names mean the tokens. Options: max_new_tokens=40, temperature=1.0 (0 is greedy),
        top_k=None, top_p=None, repetition_penalty=1.0, stop=(), seed=None; choices, regex, allowed
        and banned constrain the text; beams=1, length_penalty=1.0, early_stopping=False;
        speculate=False.
        """
        self._require_head("lm", "generate")
        config = self._generation_config(n=n, **options)
        prompts = _listed(prompt, "prompt")
        texts = continuations(
            self.generator, self._prompts(prompts, parse_special=parse_special), config
        )
        if n == 1:
            return texts[0][0] if isinstance(prompt, str) else [some[0] for some in texts]
        return texts[0] if isinstance(prompt, str) else texts

    def stream(
        self, prompt: str, *, parse_special: bool = False, **options: Unpack[GenerationSettings]
    ) -> Iterator[str]:
        """The same text as `generate`, piece by piece as it is written; whole characters only."""
        self._require_head("lm", "generate")
        config = self._generation_config(**options)
        if not isinstance(prompt, str) or config.n != 1:
            raise UsageError(
                "Only one continuation of one prompt can be streamed; use generate for several."
            )
        pieces = stream_texts(
            self.generator, self._prompts([prompt], parse_special=parse_special), config
        )
        return (text for _, text in pieces)

    def chat(self, messages: Messages | str, **options: Unpack[GenerationSettings]) -> str:
        """The answer to a conversation [{"role": "user", "content": "…"}, …], by the model's own
        chat template.

        A text alone is what a user says. A model without a template continues "User:
        …\\nAssistant:". The settings are those of `generate`, but max_new_tokens=256.
        """
        return "".join(self.chat_stream(messages, **options)).strip()

    def chat_stream(
        self, messages: Messages | str, **options: Unpack[GenerationSettings]
    ) -> Iterator[str]:
        """The same answer, piece by piece as it is written."""
        self._require_head("lm", "chat")
        said = encode_conversation(self.tokenizer, messages)
        config = self._generation_config(**said.settings(dict(options)))
        if config.n != 1:
            raise UsageError(
                "A conversation has one answer at a time; ask again with another seed for another."
            )
        return (text for _, text in stream_texts(self.generator, [said.tokens], config))

    @overload
    def score(  # type: ignore[overload-overlap]
        self, context: str, continuation: str
    ) -> Score: ...
    @overload
    def score(self, context: str | Sequence[str], continuation: Sequence[str]) -> list[Score]: ...

    def score(
        self, context: str | Sequence[str], continuation: str | Sequence[str]
    ) -> Score | list[Score]:
        """log p(continuation | context). Lists are scored in batches; one context may stand
        before many.
        """
        self._require_head("lm", "score")
        if isinstance(context, str) and isinstance(continuation, str):
            return score_pairs(
                self.network, self.tokenizer, [(context, continuation)], self._prefixes
            )[0]
        contexts = [context] * len(continuation) if isinstance(context, str) else list(context)
        if isinstance(continuation, str) or len(contexts) != len(continuation):
            raise UsageError(
                "score takes one continuation for each context, or many for a single one."
            )
        pairs = list(zip(contexts, continuation, strict=True))
        return score_pairs(self.network, self.tokenizer, pairs, self._prefixes)

    def perplexity(self, text: str, *, stride: int | None = None) -> float:
        """exp of the mean loss per token, by a window that slides on by `stride` tokens (half
        the context).
        """
        self._require_head("lm", "perplexity")
        return sliding_perplexity(self.network, self.tokenizer, text, stride)

    def bits_per_byte(self, text: str, *, stride: int | None = None) -> float:
        """Like perplexity, but comparable between models of different tokenizers."""
        self._require_head("lm", "bits_per_byte")
        return sliding_bits_per_byte(self.network, self.tokenizer, text, stride)

    # ------------------------------------------------------------------ masked models, vectors,
    # fine-tuned heads

    @overload
    def fill(  # type: ignore[overload-overlap]
        self, text: str, top: int = 5
    ) -> list[Fill]: ...
    @overload
    def fill(self, text: Sequence[str], top: int = 5) -> list[list[Fill]]: ...

    def fill(self, text: str | Sequence[str], top: int = 5) -> list[Fill] | list[list[Fill]]:
        """The `top` best tokens for the mask in a text; of a list of texts a list.

        A text with several masks gives one list for each, as `fill_masks` always does.
        """
        if not isinstance(text, str):
            return [self.fill(one, top) for one in text]
        found = self.fill_masks(text, top)
        return found[0] if len(found) == 1 else found

    def fill_masks(self, text: str, top: int = 5) -> list[list[Fill]]:
        """The `top` best tokens for each mask in a text, every other mask left as it is."""
        self.masked._require_head("mlm", "fill")
        return fills(self.masked.network, self.tokenizer, text, top)

    @overload
    def embed(  # type: ignore[overload-overlap]
        self,
        texts: str,
        layers: int | Sequence[int] = (-1,),
        pool: Pool = "mean",
        *,
        truncate: bool = False,
    ) -> Float32Array: ...
    @overload
    def embed(
        self,
        texts: Sequence[str],
        layers: int | Sequence[int] = (-1,),
        pool: Literal["mean", "cls"] = "mean",
        *,
        truncate: bool = False,
    ) -> Float32Array: ...
    @overload
    def embed(
        self,
        texts: Sequence[str],
        layers: int | Sequence[int] = (-1,),
        *,
        pool: Literal["none"],
        truncate: bool = False,
    ) -> list[Float32Array]: ...
    @overload
    def embed(
        self,
        texts: Sequence[str],
        layers: int | Sequence[int],
        pool: Pool,
        *,
        truncate: bool = False,
    ) -> Float32Array | list[Float32Array]: ...

    def embed(
        self,
        texts: str | Sequence[str],
        layers: int | Sequence[int] = (-1,),
        pool: Pool = "mean",
        *,
        truncate: bool = False,
    ) -> Float32Array | list[Float32Array]:
        """Vectors [N, D] of texts ([D] of one): hidden states of the layers averaged, then pooled
        over the tokens.

        Layer 0 is the embedding, -1 the last. pool: mean | cls | none; "none" gives an array [T, D]
        for each text.
        """
        reader = self.masked
        encodings = [reader._encoded(text, truncate=truncate) for text in _listed(texts, "texts")]
        found = embed_texts(
            reader.network, encodings, (layers,) if isinstance(layers, int) else tuple(layers), pool
        )
        if isinstance(texts, str):
            return found[0]
        return (
            found
            if pool == "none"
            else np.stack(found)
            if found
            else np.empty((0, self.config.width), np.float32)
        )

    @torch.inference_mode()
    def logits(self, text: str) -> Float32Array:
        """The scores over the vocabulary at every token [T, V]."""
        head = next((name for name in ("lm", "mlm") if name in self.network.heads), "lm")
        self._require_head(head, "logits")
        # [MASK] in the text is meant: what stands there is what one asks for
        masked = head == "mlm"
        encoding = (
            self._fitting(self.tokenizer.encode_masked(text))
            if masked
            else self._encoded(text, truncate=False)
        )
        tokens = torch.tensor([encoding.tokens], device=self._device)
        segments = (
            torch.tensor([encoding.segments], device=self._device) if self.config.segments else None
        )
        scores: torch.Tensor = self.network(tokens, heads=(head,), segments=segments)[head][0]
        return scores.float().cpu().numpy()

    @overload
    def predict(  # type: ignore[overload-overlap]
        self, texts: Asked
    ) -> Predicted: ...
    @overload
    def predict(self, texts: Sequence[Asked]) -> list[Predicted]: ...

    def predict(self, texts: Asked | Sequence[Asked]) -> Predicted | list[Predicted]:
        """What the model was fine-tuned to say of a text, of a pair (a, b), of a row of the table
        that it learnt from, or of a list of them; a DataFrame is a list of rows.

        A classifier gives `Prediction(label, scores)`, one of several labels a text
        `MultiLabelPrediction(labels, scores)`, a tagger a list of `Span(text, label, start, end,
        score)`. A model that answers takes (question, context) and gives `Answer(text, start, end,
        score, candidates, null)`; one that chooses takes (text, choices) and gives a `Prediction`
        of the likeliest choice.
        """
        reading = Predictor.of(self.checkpoint)
        if self.task_head is None:
            raise UsageError(
                "This model cannot predict: it was not fine-tuned. Fine-tune it first: malmoi "
                f"finetune rows.csv --model {self.checkpoint.source or 'DIR'}"
            )
        alone = isinstance(texts, str | tuple | Mapping)
        asked = row_texts([texts] if alone else texts, reading.columns)
        found = self.task_head.predict(reading, asked)
        return found[0] if alone else found

    # ------------------------------------------------------------------ within

    @property
    def _device(self) -> torch.device:
        return self.network.device

    def _require_head(self, head: str, verb: str) -> None:
        if head not in self.network.heads:
            can = ", ".join(verb for verb in self.abilities if verb != "stream")
            heads = ", ".join(self.network.heads) or "none"
            raise UsageError(
                f"This model cannot {verb}: it has no {head} head (its heads: {heads}). It can: "
                f"{can}."
            )

    def _generation_config(self, **options: Unpack[GenerationSettings]) -> GenerationConfig:
        for name in options:
            if name not in GenerationSettings.__annotations__:
                raise UsageError(
                    "generate has no setting "
                    f"{name!r}.{nearest(name, GenerationSettings.__annotations__)}"
                )
        rules = {
            name: value for name, value in options.items() if name in Sampling.__dataclass_fields__
        }
        limits = {name: value for name, value in options.items() if name in CONSTRAINT_SETTINGS}
        others = {name: value for name, value in options.items() if name not in rules | limits}
        wanted = {name: value for name, value in limits.items() if value is not None}
        constraint = build_constraint(self.tokenizer, self._ends, **wanted) if wanted else None  # type: ignore[arg-type]
        ends = self._ends | self._stop_tokens(options.get("stop", ()))
        if others.pop("ignore_eos", False):
            ends = frozenset()
        sampling = Sampling(**rules)  # type: ignore[arg-type]
        if wrong := [token for token, _ in sampling.logit_bias if token >= self.config.vocab]:
            raise UsageError(f"logit_bias has the token {wrong[0]}; see this model's vocabulary.")
        return GenerationConfig(
            sampling=sampling,
            end_tokens=ends,
            constraint=constraint,
            **others,  # type: ignore[arg-type]
        )

    @cached_property
    def generator(self) -> TextGenerator:
        """What writes: the parts of this model that an engine needs."""
        self._require_head("lm", "generate")
        return TextGenerator(self.network, self.tokenizer, fast_argmax_for(self.network))

    @cached_property
    def _prefixes(self) -> PrefixCache:
        """Beginnings of contexts that `score` has read before."""
        return PrefixCache(self.network)

    @property
    def _ends(self) -> frozenset[int]:
        """Tokens that end a text: generation_config.json's, else the tokenizer's."""
        ends = self.checkpoint.generation.get("eos_token_id", self.tokenizer.specials.eos)
        listed = ends if isinstance(ends, list) else [ends]
        return frozenset(end for end in listed if end is not None)

    def _stop_tokens(self, stop: str | Sequence[str]) -> frozenset[int]:
        """Control tokens among the stop strings: as tokens they have no text that could be found
        in what is written.
        """
        known = self.tokenizer.control_tokens
        stops = [stop] if isinstance(stop, str) else stop
        return frozenset(known[name] for name in stops if isinstance(name, str) and name in known)

    def _prompts(self, texts: Sequence[str], *, parse_special: bool = False) -> list[list[int]]:
        return [
            encode_prompt(self.tokenizer, text, parse_special=parse_special).tokens
            for text in texts
        ]

    @cached_property
    def _causal(self) -> bool:
        return all(pattern.is_causal for pattern in self.network.trunk.patterns)

    def _encoded(self, text: str, *, truncate: bool) -> Encoding:
        """A text as this model reads it; too long is refused unless it may be cut."""
        read = encode_prompt if self._causal else Tokenizer.encode
        return self._fitting(
            read(self.tokenizer, text, max_tokens=self.config.context if truncate else None)
        )

    def _fitting(self, encoding: Encoding) -> Encoding:
        context = self.config.context
        if len(encoding.tokens) > context:
            raise UsageError(
                f"The text has {len(encoding.tokens)} tokens, more than this model's context of "
                f"{context}; shorten it.",
                code="context_length_exceeded",
            )
        return encoding


def _listed(texts: str | Sequence[str], name: str) -> list[str]:
    listed = [texts] if isinstance(texts, str) else list(texts)
    for text in listed:
        if not isinstance(text, str):
            raise UsageError(
                f"{name} must be a text or a list of texts, not {type(text).__name__}: "
                f"{text!r:.60}."
            )
    return listed
