"""A model in a user's hands: what `malmoi.load` returns."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, overload

import numpy as np
import torch

from malmoi.checkpoint import Checkpoint
from malmoi.checkpoint import write as write_folder
from malmoi.config import ModelConfig
from malmoi.decode.constrain import LIMITS, constrain
from malmoi.decode.fast import lay_out, screen_for
from malmoi.decode.generate import Speaker, Wish, continuations, write
from malmoi.decode.prefix import Prefixes
from malmoi.decode.sample import Sampling
from malmoi.errors import UsageError, nearest
from malmoi.infer.ask import Answering
from malmoi.infer.chat import conversation
from malmoi.infer.embed import vectors
from malmoi.infer.fill import fills
from malmoi.infer.precision import open_for_use
from malmoi.infer.predict import Reading
from malmoi.infer.prompt import encode_prompt
from malmoi.infer.readers import predictions, reader_of
from malmoi.infer.score import Score, scores, sliding_bits_per_byte, sliding_perplexity
from malmoi.model import Network
from malmoi.tokenizer import Encoding, Tokenizer
from malmoi.tokenizer.chat import Messages

ASKED = ("classify", "answer", "summarise", "translate")  # without training: see ask.py
ABILITIES = {
    "lm": ("generate", "stream", "chat", "score", "perplexity", "bits_per_byte", "logits", *ASKED),
    "mlm": ("fill", "logits", "classify"),
    "classify": ("predict",),
    "tag": ("predict",),
    "span": ("predict",),
    "choice": ("predict",),
}


class Wishes(TypedDict, total=False):
    """The settings of `generate` and `stream`."""

    max_new_tokens: int  # 40
    temperature: float  # 1.0; 0 is greedy
    top_k: int | None
    top_p: float | None
    repetition_penalty: float  # 1.0
    stop: str | Sequence[str]  # texts to stop before
    seed: int | None  # the same seed gives the same text, alone or in a batch
    n: int  # 1: continuations of each prompt
    choices: Sequence[str]  # the text is one of these
    regex: str  # the text matches this as a whole
    allowed: Iterable[int] | Callable[[list[int]], Iterable[int]]  # tokens; or a function of those written so far
    banned: Sequence[str]  # words that are not written
    beams: int  # 1; more: the likeliest text by beam search, with temperature=0
    length_penalty: float  # 1.0: beams are scored by log p / length^penalty
    early_stopping: bool | Literal["never"]  # False: when a beam search ends
    speculate: bool  # False; True: drafts from the text itself, with temperature=0; the same text, sooner


def load(
    path: str | Path, *, device: str | torch.device | None = None, dtype: str | torch.dtype | None = None
) -> "Model":
    """Opens a folder written by Malmoi, transformers or PEFT, or a hub id where there is a network.

    The device is the GPU where there is one; the numbers are those of the folder unless a dtype is named: fp32, bf16,
    fp16, or "int8" for weights of a quarter of the size on a processor (see `malmoi.model.int8`). Numbers that this
    machine emulates are computed in fp32 unless they are named: `notes` says so.
    """
    checkpoint = open_for_use(path, device, dtype)
    lay_out(checkpoint.network)
    return Model(checkpoint)


class Model(Answering):
    """A network, its tokenizer and its labels, and everything one does with them."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.network: Network = checkpoint.network.eval()

    # ------------------------------------------------------------------ what it is

    @property
    def tokenizer(self) -> Tokenizer:
        if self.checkpoint.tokenizer is None:
            raise UsageError("This model's folder has no tokenizer; put its tokenizer.json beside the weights.")
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
        heads = [*self.network.heads, *(["classify"] if "words" in self.checkpoint.extra else [])]
        return (*dict.fromkeys(verb for head in heads for verb in ABILITIES.get(head, ())), "embed")

    def __repr__(self) -> str:
        c = self.config
        return f"Model(width={c.width}, depth={c.depth}, context={c.context}, can: {', '.join(self.abilities)})"

    def save(self, folder: str | Path) -> None:
        """Writes a Hugging Face folder that `transformers` opens."""
        write_folder(self.checkpoint, folder)

    def tokens(self, text: str) -> list[str]:
        """How the tokenizer cuts a text."""
        return [self.tokenizer.token(token) for token in self.tokenizer.encode(text).tokens]

    # ------------------------------------------------------------------ language models

    def generate(self, prompt: str | Sequence[str], *, parse_special: bool = False, **wishes: Unpack[Wishes]) -> Any:
        """The continuation of a prompt; of a list of prompts a list; with n > 1 a list of n for each.

        An empty prompt starts after the token that begins, or else ends, a text; without one it is refused.
        A prompt is text, "<|endoftext|>" in it too, unless `parse_special` says that such names mean the tokens.
        Settings (see `Wishes`): max_new_tokens=40, temperature=1.0 (0 is greedy), top_k=None, top_p=None,
        repetition_penalty=1.0, stop=(), seed=None, n=1; choices, regex, allowed and banned constrain what is written;
        beams=1, length_penalty=1.0, early_stopping=False; speculate=False.
        """
        self._need("lm", "generate")
        wish, prompts = self._wish(**wishes), _listed(prompt, "prompt")
        texts = continuations(self.speaker, self._prompts(prompts, parse_special=parse_special), wish)
        results = [some[0] if wish.n == 1 else some for some in texts]
        return results[0] if isinstance(prompt, str) else results

    def stream(self, prompt: str, *, parse_special: bool = False, **wishes: Unpack[Wishes]) -> Iterator[str]:
        """The same text as `generate`, piece by piece as it is written; whole characters only."""
        self._need("lm", "generate")
        wish = self._wish(**wishes)
        if not isinstance(prompt, str) or wish.n != 1:
            raise UsageError("Only one continuation of one prompt can be streamed; use generate for several.")
        pieces = write(self.speaker, self._prompts([prompt], parse_special=parse_special), wish)
        return (text for _, text in pieces)

    def chat(self, messages: Messages | str, **wishes: Unpack[Wishes]) -> str:
        """The answer to a conversation [{"role": "user", "content": "…"}, …], by the model's own chat template.

        A text alone is what a user says. A model without a template continues "User: …\\nAssistant:". The settings
        are those of `generate`, but max_new_tokens=256.
        """
        return "".join(self.chat_stream(messages, **wishes)).strip()

    def chat_stream(self, messages: Messages | str, **wishes: Unpack[Wishes]) -> Iterator[str]:
        """The same answer, piece by piece as it is written."""
        self._need("lm", "chat")
        said = conversation(self.tokenizer, messages)
        wish = self._wish(**said.wishes(dict(wishes)))
        if wish.n != 1:
            raise UsageError("A conversation has one answer at a time; ask again with another seed for another.")
        return (text for _, text in write(self.speaker, [said.tokens], wish))

    @overload
    def score(self, context: str, continuation: str) -> Score: ...
    @overload
    def score(self, context: str | list[str], continuation: list[str]) -> list[Score]: ...

    def score(self, context: Any, continuation: Any) -> Any:
        """log p(continuation | context). Lists are scored in batches; one context may stand before many."""
        self._need("lm", "score")
        if isinstance(context, str) and isinstance(continuation, str):
            return scores(self.network, self.tokenizer, [(context, continuation)], self._prefixes)[0]
        contexts = [context] * len(continuation) if isinstance(context, str) else list(context)
        if isinstance(continuation, str) or len(contexts) != len(continuation):
            raise UsageError("score takes one continuation for each context, or many for a single one.")
        pairs = list(zip(contexts, continuation, strict=True))
        return scores(self.network, self.tokenizer, pairs, self._prefixes)

    def perplexity(self, text: str, *, stride: int | None = None) -> float:
        """exp of the mean loss per token, by a window that slides on by `stride` tokens (half the context)."""
        self._need("lm", "perplexity")
        return sliding_perplexity(self.network, self.tokenizer, text, stride)

    def bits_per_byte(self, text: str, *, stride: int | None = None) -> float:
        """Like perplexity, but comparable between models of different tokenizers."""
        self._need("lm", "bits_per_byte")
        return sliding_bits_per_byte(self.network, self.tokenizer, text, stride)

    # ------------------------------------------------------------------ masked models, vectors, fine-tuned heads

    def fill(self, text: str, top: int = 5) -> Any:
        """The `top` best tokens for the mask in a text; for several masks one list each."""
        self._need("mlm", "fill")
        found = fills(self.network, self.tokenizer, text, top)
        return found[0] if len(found) == 1 else found

    def embed(
        self,
        texts: str | Sequence[str],
        layers: int | Sequence[int] = (-1,),
        pool: str = "mean",
        *,
        truncate: bool = False,
    ) -> Any:
        """Vectors [N, D] of texts ([D] of one): hidden states of the layers averaged, then pooled over the tokens.

        Layer 0 is the embedding, -1 the last. pool: mean | cls | none; "none" gives an array [T, D] for each text.
        """
        encodings = [self._encoded(text, truncate) for text in _listed(texts, "texts")]
        found = vectors(self.network, encodings, (layers,) if isinstance(layers, int) else tuple(layers), pool)
        if isinstance(texts, str):
            return found[0]
        return found if pool == "none" else np.stack(found) if found else np.empty((0, self.config.width), np.float32)

    @torch.inference_mode()
    def logits(self, text: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The scores over the vocabulary at every token [T, V]."""
        head = next((name for name in ("lm", "mlm") if name in self.network.heads), "lm")
        self._need(head, "logits")
        masked = head == "mlm"  # [MASK] in the text is meant: what stands there is what one asks for
        encoding = self._fitting(self.tokenizer.encode_masked(text)) if masked else self._encoded(text, truncate=False)
        tokens = torch.tensor([encoding.tokens], device=self._device)
        segments = torch.tensor([encoding.segments], device=self._device) if self.config.segments else None
        return self.network(tokens, heads=(head,), segments=segments)[head][0].float().cpu().numpy()

    def predict(self, texts: Any) -> Any:
        """What the model was fine-tuned to say of a text, of a pair (a, b), or of a list of either.

        A classifier gives `Prediction(label, scores)`, a tagger a list of `Span(text, label, start, end, score)`.
        A model that answers takes (question, context) and gives `Answer(text, start, end, score, candidates, null)`;
        one that chooses takes (text, choices) and gives a `Prediction` of the likeliest choice.
        """
        reading = Reading.of(self.checkpoint)
        if reader_of(reading) is None:
            self._need("classify", "predict")
        alone = isinstance(texts, str | tuple)
        found = predictions(reading, [texts] if alone else list(texts))
        return found[0] if alone else found

    # ------------------------------------------------------------------ within

    @property
    def _device(self) -> torch.device:
        return self.network.trunk.embed.token.weight.device

    def _need(self, head: str, verb: str) -> None:
        if head not in self.network.heads:
            can = ", ".join(verb for verb in self.abilities if verb != "stream")
            heads = ", ".join(self.network.heads) or "none"
            raise UsageError(f"This model cannot {verb}: it has no {head} head (its heads: {heads}). It can: {can}.")

    def _wish(self, **wishes: Unpack[Wishes]) -> Wish:
        for name in wishes:
            if name not in Wishes.__annotations__:
                raise UsageError(f"generate has no setting {name!r}.{nearest(name, Wishes.__annotations__)}")
        rules = {name: value for name, value in wishes.items() if name in Sampling.__dataclass_fields__}
        limits = {name: value for name, value in wishes.items() if name in LIMITS}
        others = {name: value for name, value in wishes.items() if name not in rules | limits}
        constraint = constrain(self.tokenizer, self._ends, **limits) if limits else None  # type: ignore[arg-type]
        ends = self._ends | self._stop_tokens(wishes.get("stop", ()))
        return Wish(sampling=Sampling(**rules), ends=ends, constraint=constraint, **others)  # type: ignore[arg-type]

    @cached_property
    def speaker(self) -> Speaker:
        """What writes: the parts of this model that an engine needs."""
        self._need("lm", "generate")
        return Speaker(self.network, self.tokenizer, screen_for(self.network))

    @cached_property
    def _prefixes(self) -> Prefixes:
        """Beginnings of contexts that `score` has read before."""
        return Prefixes(self.network)

    @property
    def _ends(self) -> frozenset[int]:
        """Tokens that end a text: generation_config.json's, else the tokenizer's."""
        ends = self.checkpoint.generation.get("eos_token_id", self.tokenizer.specials.eos)
        listed = ends if isinstance(ends, list) else [ends]
        return frozenset(end for end in listed if end is not None)

    def _stop_tokens(self, stop: str | Sequence[str]) -> frozenset[int]:
        """Control tokens among the stop strings: as tokens they have no text that could be found in what is written."""
        known, stops = self.tokenizer.control_tokens, [stop] if isinstance(stop, str) else stop
        return frozenset(known[name] for name in stops if isinstance(name, str) and name in known)

    def _prompts(self, texts: Sequence[str], *, parse_special: bool = False) -> list[list[int]]:
        return [encode_prompt(self.tokenizer, text, parse_special=parse_special).tokens for text in texts]

    @cached_property
    def _causal(self) -> bool:
        return all(pattern.is_causal for pattern in self.network.trunk.patterns)

    def _encoded(self, text: str, truncate: bool) -> Encoding:
        """A text as this model reads it; too long is refused unless it may be cut."""
        read = encode_prompt if self._causal else Tokenizer.encode
        return self._fitting(read(self.tokenizer, text, max_tokens=self.config.context if truncate else None))

    def _fitting(self, encoding: Encoding) -> Encoding:
        context = self.config.context
        if len(encoding.tokens) > context:
            raise UsageError(
                f"The text has {len(encoding.tokens)} tokens, more than this model's context of {context}; shorten it.",
                code="context_length_exceeded",
            )
        return encoding


def _listed(texts: str | Sequence[str], name: str) -> list[str]:
    listed = [texts] if isinstance(texts, str) else list(texts)
    for text in listed:
        if not isinstance(text, str):
            raise UsageError(f"{name} must be a text or a list of texts, not {type(text).__name__}: {text!r:.60}.")
    return listed
