"""The public model class, returned by `malmoi.load`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, Unpack, get_origin, overload

import numpy as np
import torch

from malmoi.errors import UsageError, require_that, required
from malmoi.inference.base import listed_texts, open_for_use
from malmoi.inference.batches import model_inputs
from malmoi.inference.interpretation import Interpretation
from malmoi.inference.language_model import LanguageModel
from malmoi.inference.prompt import require_fit
from malmoi.messages import msg
from malmoi.model import KVCache, count_parameters

if TYPE_CHECKING:
    from malmoi.inference.embed import Float32Array, Pool
    from malmoi.inference.predict import MultiLabelPrediction, Prediction
    from malmoi.inference.pseudo_likelihood import Fill
    from malmoi.inference.spans import Answer, Span
    from malmoi.inference.translation import CrossAttentionMap, TranslationOptions, Translator
    from malmoi.inference.writing import Reply
    from malmoi.text.rows import TableLike
    from malmoi.tracing.trace import Memorisation, NearestSentences, Trace

    ManyAsked = Sequence["Asked"] | Path | TableLike
    Predicted = Prediction | MultiLabelPrediction | Answer | list[Span] | Reply

# a text, a pair, a question with its context, a text (and question) with its choices, or a row
Asked = (
    str
    | tuple[str, str]
    | tuple[str, Sequence[str]]
    | tuple[str, str, Sequence[str]]
    | Mapping[str, object]
)
Layers = int | Sequence[int]


class Reading(TypedDict, total=False):
    """How `embed` reads texts."""

    truncate: bool
    language: int


DESCRIBED_ROWS = 256  # of features, whose texts are generated together
P = TypeVar("P")  # what is predicted for a text


def load(
    path: str | Path,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
) -> "Model":
    """Opens a folder written by Malmoi, transformers or PEFT, or a hub id if there is a network.

    Runs on the GPU if there is one. Weights keep the folder's dtype unless one is given: fp32,
    bf16, fp16, or "int8" for weights of a quarter of the size on a CPU (see `malmoi.kernels.int8`).
    A dtype that this machine can only emulate is replaced by fp32, with an entry in `notes`, unless
    it was given explicitly.

    Examples:
        >>> malmoi.load("runs/tiny-gpt")
        Model(width=16, depth=2, context=128, can: generate, stream, chat, score, ...)
    """
    return Model(open_for_use(path, device, dtype))


class Model(LanguageModel, Interpretation):
    """A network with its tokenizer and labels, and everything you can do with them.

    Examples:
        >>> lm = malmoi.load("runs/tiny-gpt")
        >>> lm.perplexity("The state of the union is strong.") > 1
        True
        >>> lm.save("copy")
    """

    def __repr__(self) -> str:
        c = self.config
        can = ", ".join(self.abilities)
        return f"Model(width={c.width}, depth={c.depth}, context={c.context}, can: {can})"

    def _repr_html_(self) -> str:
        """A summary table for notebooks."""
        from malmoi.system.result import fact_table

        c = self.config
        shape = msg(
            "{depth} layers × {width}, {heads} heads, context {context:,}",
            depth=c.depth,
            width=c.width,
            heads=c.heads,
            context=c.context,
        )
        facts = {
            "parameters": f"{count_parameters(self.network):,}",
            "shape": shape,
            "vocabulary": f"{c.vocab:,}",
            "can": ", ".join(self.abilities),
            "labels": ", ".join(self.labels),
            "folder": str(self.checkpoint.source or ""),
        }
        return fact_table("Model", [(name, fact) for name, fact in facts.items() if fact])

    def save(self, folder: str | Path) -> None:
        """Writes a Hugging Face folder that `transformers` opens, to a path or a URL."""
        from malmoi.checkpoint import write_checkpoint
        from malmoi.system.storage import working_copy

        with working_copy(folder) as place:
            write_checkpoint(self.checkpoint, place)

    def tokens(self, text: str) -> list[str]:
        """The text as token strings."""
        return [self.tokenizer.token(token) for token in self.tokenizer.encode(text).tokens]

    # ------------------------------------------------------------------ translation

    @overload
    def translate(  # type: ignore[overload-overlap]
        self, text: str, to: str = "", **options: "Unpack[TranslationOptions]"
    ) -> str: ...
    @overload
    def translate(
        self, text: Sequence[str], to: str = "", **options: "Unpack[TranslationOptions]"
    ) -> list[str]: ...

    def translate(
        self, text: str | Sequence[str], to: str = "", **options: "Unpack[TranslationOptions]"
    ) -> str | list[str]:
        """Translates a text, or a list of them.

        An encoder-decoder uses beam search: beams=4 (1 is greedy), length_penalty=0.6. A GPT is
        prompted to translate into the language `to` ("French", "한국어"), after the pairs in
        `examples`.
        """
        texts = listed_texts(text, "text")
        if self.config.encoder_depth:
            from malmoi.inference.translation import translate_texts

            found = translate_texts(self.translator, self.tokenizer, texts, options)
        else:
            from malmoi.inference.zero_shot import translation_prompt

            self._require_head("lm", "translate")
            require_that(
                to, "A GPT translates with a prompt: give the language, such as to='French'."
            )
            shown = options.get("examples", ())
            limit = options.get("max_new_tokens", 64)
            found = [self._line(translation_prompt(one, to, shown), limit) for one in texts]
        return found[0] if isinstance(text, str) else found

    def cross_attention(self, source: str, target: str, *, layer: int = -1) -> "CrossAttentionMap":
        """Cross-attention of a translation to its source, averaged over heads."""
        from malmoi.inference.translation import cross_attention

        return cross_attention(self.translator, self.tokenizer, source, target, layer)

    @cached_property
    def translator(self) -> "Translator":
        """The parts of this model that translation needs."""
        from malmoi.inference.translation import Translator, banned_tokens

        vocab = self.config.vocab
        require_that(self.config.encoder_depth, "This model cannot translate: it has no encoder.")
        ends = sorted(self._ends)
        require_that(ends, "This model's tokenizer has no end-of-text token.")
        start = self.checkpoint.generation_setting("decoder_start_token_id")
        start = ends[0] if start is None else start
        require_that(
            start < vocab,
            "This model's decoder_start_token_id is {start}, and it has {vocab} tokens.",
            start=start,
            vocab=vocab,
        )
        banned = banned_tokens(self.checkpoint.generation_setting("bad_words_ids") or [], vocab)
        return Translator(self.network, start, ends[0], self.tokenizer.specials.pad or 0, banned)

    @torch.inference_mode()
    def describe(self, features: np.ndarray[Any, Any], *, max_new_tokens: int = 40) -> list[str]:
        """Generates a text for each row of features [N, P, F] ([N, F]: one vector each), greedily.

        For a model that was trained on features with texts (the recipe caption-small).
        """
        c = self.config
        require_that(c.feature_count, "This model cannot describe: it was trained on no features.")
        room = c.context - c.feature_count
        limit = min(max_new_tokens, room)
        require_that(
            limit >= 1,
            "max_new_tokens={limit}: after the features there is room for {room}.",
            limit=limit,
            room=room,
        )
        network = self.network
        end = min(self._ends)
        given = torch.tensor(np.array(features, np.float32), device=network.device)
        given = given[:, None] if given.ndim == 2 else given
        size = c.feature_count + limit
        found: list[list[int]] = []
        for some in given.split(DESCRIBED_ROWS):
            cache = KVCache(c, len(some), size, dtype=network.dtype, device=network.device)
            tokens = torch.full((len(some), 1), end, device=network.device)
            while tokens.size(1) <= limit and not bool((tokens[:, 1:] == end).any(1).all()):
                shown = some if tokens.size(1) == 1 else None
                hidden = network.trunk(tokens[:, -1:], features=shown, cache=cache)
                tokens = torch.cat((tokens, network.read("lm", hidden[:, -1:]).argmax(-1)), 1)
            found += [[*takewhile(end.__ne__, text)] for text in tokens[:, 1:].tolist()]
        return [self.tokenizer.decode(text).strip() for text in found]

    # ------------------------------------------------------------------ masks, vectors, task heads

    @overload
    def fill(  # type: ignore[overload-overlap]
        self, text: str, top: int = 5
    ) -> "list[Fill]": ...
    @overload
    def fill(self, text: Sequence[str], top: int = 5) -> "list[list[Fill]]": ...

    def fill(self, text: str | Sequence[str], top: int = 5) -> "list[Fill] | list[list[Fill]]":
        """Returns the `top` best tokens for the mask in a text; a list of texts gives a list.

        A text with several masks is an error: use `fill_masks`, which returns one list for each.
        """
        if not isinstance(text, str):
            return [self.fill(one, top) for one in text]
        found = self.fill_masks(text, top)
        require_that(
            len(found) <= 1,
            "The text has {found} masks, but fill takes one: use fill_masks.",
            found=len(found),
        )
        return found[0]

    def fill_masks(self, text: str, top: int = 5) -> "list[list[Fill]]":
        """Returns the `top` best tokens for each mask in a text; other masks stay in place."""
        from malmoi.inference.pseudo_likelihood import fills

        self.masked._require_head("mlm", "fill")
        return fills(self.masked.network, self.tokenizer, text, top)

    @overload
    def embed(  # type: ignore[overload-overlap]
        self, texts: str, layers: Layers = ..., pool: "Pool" = ..., **options: "Unpack[Reading]"
    ) -> "Float32Array": ...
    @overload
    def embed(
        self,
        texts: Sequence[str],
        layers: Layers = ...,
        pool: Literal["auto", "mean", "cls"] = ...,
        **options: "Unpack[Reading]",
    ) -> "Float32Array": ...
    @overload
    def embed(
        self,
        texts: Sequence[str],
        layers: Layers = ...,
        *,
        pool: Literal["none"],
        **options: "Unpack[Reading]",
    ) -> "list[Float32Array]": ...
    @overload
    def embed(
        self, texts: Sequence[str], layers: Layers, pool: "Pool", **options: "Unpack[Reading]"
    ) -> "Float32Array | list[Float32Array]": ...

    def embed(
        self,
        texts: str | Sequence[str],
        layers: Layers = (-1,),
        pool: "Pool" = "auto",
        *,
        truncate: bool = False,
        language: int = 0,
    ) -> "Float32Array | list[Float32Array]":
        """Embeds texts as vectors [N, D] ([D] for a single text).

        Hidden states are averaged over `layers` (0 is the embedding, -1 the last), then pooled over
        tokens. pool: auto | mean | cls | none; "auto" is what a sentence-transformers folder says,
        normalised if it says so, and else the mean; "none" gives an array [T, D] for each text.
        A text longer than the context is an error unless `truncate`; a sentence encoder truncates
        with a note. For a model trained on pairs, `language` is 0 (the source's) or 1.
        """
        from malmoi.inference.embed import embed_texts, note_truncated

        self._require_text_input("embed")
        reader = self.masked
        listed = listed_texts(texts, "texts")
        sentence = self.checkpoint.sentence
        cut = truncate or sentence is not None
        encodings = [reader._encoded(text, truncate=cut) for text in listed]
        if not truncate:
            note_truncated(listed, encodings, reader._longest)
        known = self.config.segments
        require_that(
            0 <= language < max(1, known),
            "This model has no language {language}: it has {known} segments.",
            language=language,
            known=known,
        )
        if language:  # a segment of a model that was trained on pairs
            encodings = [replace(e, segments=[language] * len(e.tokens)) for e in encodings]
        read = (layers,) if isinstance(layers, int) else tuple(layers)
        found = embed_texts(reader.network, encodings, read, pool, sentence)
        if isinstance(texts, str):
            return found[0]
        if pool == "none":
            return found
        return np.stack(found) if found else np.empty((0, self.config.width), np.float32)

    @torch.inference_mode()
    def logits(self, text: str) -> "Float32Array":
        """Logits over the vocabulary at every token [T, V]."""
        head = self.network.language_head or "lm"
        self._require_head(head, "give logits")
        # a BERT is asked about its masks, so [MASK] in the text is parsed as the token
        if head == "mlm":
            encoding = require_fit(self.tokenizer.encode_masked(text), self.config.context)
        else:
            encoding = self._encoded(text, truncate=False)
        inputs = model_inputs(self.network, [encoding])
        scores: torch.Tensor = self.network(**inputs, heads=(head,))[head][0]
        return scores.float().cpu().numpy()

    @overload
    def predict(self, texts: Asked) -> "Predicted": ...  # type: ignore[overload-overlap]
    @overload
    def predict(self, texts: "ManyAsked") -> "list[Predicted]": ...
    @overload
    def predict(self, texts: Asked, kind: type[P]) -> P: ...  # type: ignore[overload-overlap]
    @overload
    def predict(self, texts: "ManyAsked", kind: type[P]) -> list[P]: ...

    def predict(self, texts: "Asked | ManyAsked", kind: Any = object) -> Any:
        """Predicts with the fine-tuned head for a text, a pair (a, b), a row, or a list of them.

        A row has the columns of the training table; a DataFrame, a `datasets.Dataset` or a file at
        a `pathlib.Path` is a list of rows. A classifier returns a `Prediction`, a multi-label one a
        `MultiLabelPrediction`, a tagger a list of `Span`. A question-answering model takes
        (question, context) and returns an `Answer`; a multiple-choice model takes (text, choices)
        and returns the `Prediction` of one; a model fine-tuned for writing returns a `Reply`.

        With `kind`, one of these classes or list[Span], any other prediction is refused.
        """
        from malmoi.inference.predict import refuse_file_name, row_texts

        head = required(
            self.task_head,
            "This model cannot predict: it was not fine-tuned. Name the labels (--labels A,B) or "
            "fine-tune it: malmoi finetune rows.csv --model {source}",
            source=self.checkpoint.source or "DIR",
        )
        refuse_file_name(texts)
        alone = isinstance(texts, str | tuple | Mapping)
        inputs = row_texts([texts] if alone else texts, self.input_columns)
        found = head.predict(self.predictor, inputs)
        if found and not isinstance(found[0], get_origin(kind) or kind):
            own = type(found[0]).__name__
            raise UsageError(
                "This model predicts {own}, not {kind}: give its own kind, or none.",
                own=own,
                kind=kind.__name__,
            )
        return found[0] if alone else found

    # ------------------------------------------------------------------ its training text

    def trace(
        self,
        text: str,
        *,
        words: str = "",
        top: int = 5,
        sentences: int = 3,
        nearest: int = 0,
        data: str | Sequence[str] = (),
    ) -> "Trace":
        """Finds the longest pieces of a text in the text that this model was trained on.

        Returns the `top` longest matches, each with how often the training text has it and some of
        its `sentences`, and the share of n-grams that are new. With `words`, a part of the text,
        only matches that have some of them; with `nearest`, also that many sentences with similar
        hidden states. The text is that of the run's folder, or `data`.
        """
        from malmoi.tracing.index import TextIndex
        from malmoi.tracing.trace import NearestSentences, trace_text

        sources = [data] if isinstance(data, str) else data
        index = TextIndex.of_sources(sources, self.tokenizer) if sources else self._own_text
        found = trace_text(index, text, words, top, sentences)
        if not nearest:
            return found
        near = NearestSentences(self, index) if sources else self._own_sentences
        return replace(found, nearest=near.near(text, nearest))

    def memorisation(self) -> "Memorisation":
        """Measures how much of its training text the model knows by heart and copies.

        The result becomes a section of the run's report.html.
        """
        from malmoi.tracing.trace import report_memorisation

        return report_memorisation(self, self._own_text)

    @cached_property
    def _own_sentences(self) -> "NearestSentences":
        from malmoi.tracing.trace import NearestSentences

        return NearestSentences(self, self._own_text)
