"""The tokenizer: encode, decode and truncate."""

import hashlib
import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import repeat
from pathlib import Path
from typing import Any, Literal, Unpack, overload

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as Rust

from malmoi.errors import UsageError, ensure, require_that, required
from malmoi.messages import msg
from malmoi.system.result import PlainValue, fact_table, plain
from malmoi.system.untrusted import collection_paused
from malmoi.tokenizer import hf_files, pipeline
from malmoi.tokenizer.call import (
    TENSORS,
    ArrayRows,
    CallOptions,
    Rows,
    TensorRows,
    as_arrays,
    pad_rows,
)
from malmoi.tokenizer.checks import check_texts, encoding_explained, integers, panics_explained
from malmoi.tokenizer.chunks import (
    Offsets,
    load_kiwi,
    mark_morphemes,
    moved_offsets,
    truncate_to_tokens,
    widened,
    without_marks,
)
from malmoi.tokenizer.hf_settings import special_names, write_tokenizer
from malmoi.tokenizer.sentencepiece_model import MarianPieces
from malmoi.tokenizer.word_cache import EncodedTexts, TextEncoder, make_encoder

MANY_CHARACTERS = 1 << 17  # of all texts; a cache of words pays for its start from here on
TEXTS_PER_CALL = 2_000  # since the library's encodings hold far more than ids
COUNTED_CHARACTERS = 65_536  # of a text, counted at once
LONGEST_UNKNOWN_WORD = 100  # characters; WordPiece's limit for a word that it splits
NO_SUCH_TOKEN = "There is no token with id {id}: they end at {last}."


@dataclass(frozen=True, eq=False)
class TokenRow:
    """A network's input for a text or a pair: tokens and segments."""

    tokens: NDArray[np.int32]
    segments: NDArray[np.int32]


@dataclass(frozen=True)
class Encoding:
    """One encoded sequence; `offsets` count characters of the text, or of the pair in segment 1.

    `specials` marks tokens that represent no text ([CLS], [SEP], a [MASK] in the text…); an unknown
    word is text. `words` numbers the words of each text from 0; None: no word.
    """

    tokens: list[int]
    segments: list[int]
    offsets: list[tuple[int, int]]
    specials: list[bool]
    words: list[int | None]


@dataclass(frozen=True)
class Specials:
    """The ids of the special tokens; None for those it lacks."""

    pad: int | None = None
    unk: int | None = None
    cls: int | None = None
    sep: int | None = None
    mask: int | None = None
    bos: int | None = None
    eos: int | None = None


class Tokenizer:
    """Text to token ids and back, equal to transformers on the same files. Thread-safe.

    Text is text: "[MASK]" or "<|endoftext|>" in it is encoded as characters, never as a control
    token, as with transformers' `split_special_tokens=True`. With `parse_special=True` (llama.cpp's
    name) the names of control tokens mean the tokens, which is transformers' default.

    Examples:
        >>> tokenizer = malmoi.Tokenizer.load("runs/tiny-gpt")
        >>> tokenizer.decode(tokenizer.encode("The state of").tokens)
        'The state of'
    """

    def __init__(
        self,
        rust: Rust,
        settings: dict[str, Any] | None = None,
        pieces: MarianPieces | None = None,
        where: str = "given here",
        model: pipeline.State | None = None,
    ) -> None:
        """Wraps a `tokenizers.Tokenizer` and its settings; see `load`. Errors name it `where`.

        `model` is that part of its tokenizer.json, if it has just been read.
        """
        self._where = where
        with panics_explained(msg("The tokenizer {where} cannot be used", where=where)):
            rust.no_truncation()
            rust.no_padding()
            state = pipeline.parse_pipeline(rust, model)
            frame = max([0, *rust.encode("").ids, *rust.encode("", "").ids])
        self.settings = dict(settings or {})
        self.kind = pipeline.kind(state)
        self._rust = rust
        self._vocab = pipeline.vocabulary(state, rust)
        self.vocab_size = max(self._vocab.values(), default=-1) + 1
        ensure(
            frame < max(self.vocab_size, 1),
            "The tokenizer {where} puts the token {frame:,} around a text, but its "
            "vocabulary ends at {vocab_size:,}; its post_processor is damaged.",
            where=where,
            frame=frame,
            vocab_size=self.vocab_size - 1,
        )
        names = special_names(state, self.settings)
        self.specials = Specials(**{role: self._vocab.get(name) for role, name in names.items()})
        self.morphemes = pipeline.cuts_morphemes(state)
        if self.morphemes:
            load_kiwi()
        self._pieces = pieces
        ensure(
            pieces is not None or not pipeline.has_marked_pieces(state),
            "This tokenizer is not whole without its SentencePiece models.",
        )
        self._composes = pipeline.composes(state)
        self.control_tokens = pipeline.control_names(state, names, self._vocab)
        # an unknown word is text: [UNK] is no control token, unless it has another role too
        roles = {id for role, id in vars(self.specials).items() if role != "unk"}
        self.control_ids = frozenset(self.control_tokens.values()) - ({self.specials.unk} - roles)
        self._text_only = self._made_text_only(state)

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Reads a folder or file: tokenizer.json, vocab.txt, vocab.json and merges.txt, or the
        SentencePiece model of an XLM-R, ALBERT, LLaMA or Marian."""
        with collection_paused():
            return cls(*hf_files.read_tokenizer_files(Path(path)))

    @classmethod
    def from_json(cls, text: str) -> "Tokenizer":
        """Reads the text of a tokenizer.json."""
        rust, model = hf_files.parse_rust(text, "The tokenizer.json given")
        return cls(rust, model=model)

    @cached_property
    def target(self) -> "Tokenizer":
        """The tokenizer of what a Marian writes, which has the same ids; of others, itself."""
        if self._pieces is None:
            return self
        return Tokenizer(self._rust, self.settings, replace(self._pieces, side="target"))

    @property
    def chat_template(self) -> PlainValue:
        """The chat template from the tokenizer's folder, or several by name, or None."""
        return plain(self.settings.get("chat_template"))

    @property
    def model_max_length(self) -> int | None:
        """The model's maximum number of tokens according to tokenizer_config.json."""
        length = self.settings.get("model_max_length")
        # transformers writes 1e30 for "no limit"
        return int(length) if length is not None and length < 1e12 else None

    def encode(
        self,
        text: str,
        pair: str | None = None,
        *,
        max_tokens: int | None = None,
        specials: bool = True,
        parse_special: bool = False,
    ) -> Encoding:
        """Encodes a text or a pair with segments, offsets and words, truncated to `max_tokens`.

        `specials` adds special tokens around it; `parse_special` recognises those named in it.
        """
        options = {"specials": specials, "parse_special": parse_special}
        pairs = None if pair is None else [pair]
        return self.encode_batch([text], pairs, max_tokens=max_tokens, **options)[0]

    def encode_batch(
        self,
        texts: Sequence[str],
        pairs: Sequence[str] | None = None,
        *,
        max_tokens: int | None = None,
        specials: bool = True,
        parse_special: bool = False,
    ) -> list[Encoding]:
        """Encodes many texts at once, on all cores."""
        self._check(texts, pairs, max_tokens, specials=specials)
        rust = self._parsing if parse_special else self._text_only
        with encoding_explained(texts, pairs or ()):
            firsts = self._marked(texts, parse_special=parse_special)
            seconds = None if pairs is None else self._marked(pairs, parse_special=parse_special)
            # avoids waking the thread pool; but no other thread runs meanwhile
            if len(texts) == 1 and len(texts[0]) <= 8_192:
                pair = seconds[0] if seconds else None
                encoded = [rust.encode(firsts[0], pair, add_special_tokens=specials)]
            else:
                inputs = firsts if seconds is None else zip(firsts, seconds, strict=True)
                encoded = rust.encode_batch(list(inputs), add_special_tokens=specials)
        nothing = [""] * len(texts)
        given = zip(texts, pairs or nothing, strict=True)
        marked = zip(firsts, seconds or nothing, strict=True)
        names = self._names if parse_special else None
        offsets = map(self._offsets, encoded, given, marked, repeat(names))
        return [
            self._encoding(one, places, max_tokens)
            for one, places in zip(encoded, offsets, strict=True)
        ]

    def encode_parts(self, parts: Sequence[str | int]) -> Encoding:
        """Encodes a sequence of texts and control tokens (by id); no text becomes a control token.

        Offsets refer to the joined parts, with each control token written by its name.
        """
        return self._encode_secretly([parts], [_spelt(parts, self.token)], specials=False)

    def encode_masked(self, text: str, pair: str | None = None) -> Encoding:
        """Encodes a text or a pair in which only the mask token's name is a control token."""
        mask = self.specials.mask
        given = [text] if pair is None else [text, pair]
        if mask is None or not any(self.token(mask) in one for one in given):
            return self.encode(text, pair)
        # a token that includes the space before its word is replaced by a mask that does too
        space = " ?" if self.tokens_have_spaces else ""
        shown = [re.split(f"({space}{re.escape(self.token(mask))})", one) for one in given]
        parts = [[mask if i % 2 else part for i, part in enumerate(some)] for some in shown]
        return self._encode_secretly(parts, shown, specials=True)

    def _encode_secretly(
        self,
        sequences: Sequence[Sequence[str | int]],
        shown: Sequence[Sequence[str]],
        *,
        specials: bool,
    ) -> Encoding:
        """Encodes one or two texts given in parts, with control tokens under secret names.

        Offsets refer to the parts as they are `shown`.
        """
        for parts in sequences:
            check_texts([part for part in parts if not isinstance(part, int)], "parts")
        given = [_spelt(parts, self._secret) for parts in sequences]
        require_that(
            self._pieces is None, "A translation model's tokenizer encodes whole texts only."
        )
        # control tokens between parts keep their secret names: those have no Hangul to mark
        marked = ["".join(self._marked(parts)) for parts in given]
        first, second = [*marked, None][:2]
        with encoding_explained(marked):
            one = self._secretive.encode(first, second, add_special_tokens=specials)
        encoding = self._encoding(one, self._offsets(one, marked, marked, None), None)
        places = [moved_offsets(*both) for both in zip(given, shown, strict=True)]
        offsets = [
            offset if which is None else (places[which](offset[0]), places[which](offset[1]))
            for which, offset in zip(one.sequence_ids, encoding.offsets, strict=True)
        ]
        return replace(encoding, offsets=offsets)

    def rows(
        self,
        texts: Sequence[str],
        pairs: Sequence[str] | None = None,
        *,
        max_tokens: int | None = None,
    ) -> list[TokenRow]:
        """Only the tokens and segments of `encode_batch`, in a fraction of its memory."""
        self._check(texts, pairs, max_tokens, specials=True)
        # the fast method may lose which text of a pair a token belongs to
        rust = self._text_only
        encode = rust.encode_batch_fast if pairs is None else rust.encode_batch
        found = []
        with encoding_explained(texts, pairs or ()):
            inputs: list[Any] = list(self._marked(texts))
            if pairs is not None:
                inputs = list(zip(inputs, self._marked(pairs), strict=True))
            for start in range(0, len(inputs), TEXTS_PER_CALL):
                encoded = encode(inputs[start : start + TEXTS_PER_CALL], add_special_tokens=True)
                found += [_row(one, max_tokens) for one in encoded]
        return found

    def ids(self, texts: list[str], *, parse_special: bool = False) -> list[list[int]]:
        """Only the tokens of many texts, without specials: the fastest way, on all cores."""
        check_texts(texts, "texts")
        if parse_special or sum(map(len, texts)) < MANY_CHARACTERS:
            return self._library_ids(texts, parse_special=parse_special)
        flat, lengths = self.encode_texts(texts)
        return [row.tolist() for row in np.split(flat, np.cumsum(lengths)[:-1])]

    def encode_texts(self, texts: Sequence[str]) -> EncodedTexts:
        """The `ids` of many texts as one array, and how many each has; words are cached."""
        with encoding_explained(texts):
            return self._words(texts)

    @cached_property
    def _words(self) -> TextEncoder:
        return make_encoder(self._library_ids, self.kind, pipeline.parse_pipeline(self._text_only))

    def _library_ids(self, texts: list[str], *, parse_special: bool = False) -> list[list[int]]:
        rust = self._parsing if parse_special else self._text_only
        with encoding_explained(texts):
            marked = self._marked(texts, parse_special=parse_special)
            return [one.ids for one in rust.encode_batch_fast(marked, add_special_tokens=False)]

    def count(self, text: str, most: int) -> int:
        """How many tokens a text has, special ones included, counted up to `most`.

        A long text is counted in parts, and not further than that takes. A cut between two parts
        may count a token twice.
        """
        total = self._rust.num_special_tokens_to_add(is_pair=False)
        for start in range(0, len(text), COUNTED_CHARACTERS):
            total += len(self.ids([text[start : start + COUNTED_CHARACTERS]])[0])
            if total >= most:
                return most
        return total

    @cached_property
    def longest_token(self) -> int:
        """The most characters of a text that become one token."""
        return max(LONGEST_UNKNOWN_WORD, *map(len, self._vocab))

    def decode(self, ids: Iterable[int], *, skip_specials: bool = True) -> str:
        """The text of some token ids (a list, an array or a tensor of integers)."""
        return self.decode_batch([ids], skip_specials=skip_specials)[0]

    def decode_batch(
        self, batch: Iterable[Iterable[int]], *, skip_specials: bool = True
    ) -> list[str]:
        """The texts of many sequences of token ids, on all cores."""
        rows = [integers(ids) for ids in batch]
        for row in rows:
            if row and not 0 <= min(row) <= max(row) < self.vocab_size:
                wrong = next(token for token in row if not 0 <= token < self.vocab_size)
                raise UsageError(NO_SUCH_TOKEN, id=wrong, last=self.vocab_size - 1)
        with panics_explained("These tokens cannot be decoded"):
            texts: list[str] = self._rust.decode_batch(rows, skip_special_tokens=skip_specials)
        return [text.strip() for text in texts] if self._pieces else texts

    def token(self, id: int) -> str:
        """The token with this id, as in the vocabulary."""
        token = self._rust.id_to_token(int(id)) if 0 <= id < self.vocab_size else None
        return str(required(token, NO_SUCH_TOKEN, id=id, last=self.vocab_size - 1))

    def id(self, token: str) -> int | None:
        """The id of a token as in the vocabulary, or None."""
        return self._vocab.get(token)

    def vocab(self) -> dict[str, int]:
        """Every token with its id, including special and added tokens."""
        return dict(self._vocab)

    def save(self, folder: str | Path, *, segments: bool = True) -> None:
        """Writes tokenizer.json, tokenizer_config.json and the family's vocabulary files."""
        names = {role: self.token(id) for role, id in vars(self.specials).items() if id is not None}
        inputs = {} if segments else {"model_input_names": ["input_ids", "attention_mask"]}
        write_tokenizer(self._rust, self.settings | inputs, names, Path(folder), self._pieces)

    def fingerprint(self) -> str:
        """A sha256 of everything that decides the ids."""
        state = pipeline.parse_pipeline(self._rust)
        parts = {
            key: state[key]
            for key in ("added_tokens", "normalizer", "pre_tokenizer", "post_processor", "model")
        }
        if isinstance(scores := state["model"].get("vocab"), list):
            # the library changes the last digit of a Unigram's scores when it reads what it wrote
            parts["model"] |= {"vocab": [[piece, f"{score:.9g}"] for piece, score in scores]}
        own = b"" if self._pieces is None else self._pieces.source + self._pieces.target
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode() + own).hexdigest()

    @overload
    def __call__(
        self,
        text: str | Sequence[str],
        text_pair: str | Sequence[str] | None = None,
        *,
        return_tensors: Literal["pt"],
        **options: Unpack[CallOptions],
    ) -> TensorRows: ...
    @overload
    def __call__(
        self,
        text: str | Sequence[str],
        text_pair: str | Sequence[str] | None = None,
        *,
        return_tensors: Literal["np"],
        **options: Unpack[CallOptions],
    ) -> ArrayRows: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]  # to Python, a str is a sequence of str
        self,
        text: str,
        text_pair: str | None = None,
        *,
        return_tensors: None = None,
        **options: Unpack[CallOptions],
    ) -> dict[str, list[int]]: ...
    @overload
    def __call__(
        self,
        text: Sequence[str],
        text_pair: Sequence[str] | None = None,
        *,
        return_tensors: None = None,
        **options: Unpack[CallOptions],
    ) -> Rows: ...
    def __call__(  # noqa: PLR0913  # as transformers' tokenizers have them
        self,
        text: str | Sequence[str],
        text_pair: str | Sequence[str] | None = None,
        *,
        return_tensors: Literal["pt", "np"] | None = None,
        padding: bool | Literal["longest", "max_length"] = False,
        truncation: bool = False,
        max_length: int | None = None,
        add_special_tokens: bool = True,
    ) -> dict[str, list[int]] | Rows | ArrayRows | TensorRows:
        """Model inputs in the format of transformers' tokenizers.

        A dict of input_ids, attention_mask and, for a BERT, token_type_ids. Unlike in `encode`,
        names of control tokens in the text ("[MASK]") mean the tokens.

        Examples:
            >>> tokenizer = malmoi.Tokenizer.load("runs/tiny-bert")
            >>> batch = tokenizer(["one", "one and two"], padding=True, return_tensors="pt")
            >>> batch["input_ids"].shape == batch["attention_mask"].shape
            True
        """
        require_that(
            return_tensors in TENSORS,
            "return_tensors is 'pt' or 'np', not {x!r}.",
            x=return_tensors,
        )
        texts = [text] if isinstance(text, str) else list(text)
        pairs = [text_pair] if isinstance(text_pair, str) else text_pair
        limit = self.model_max_length if max_length is None else max_length
        encodings = self.encode_batch(
            texts,
            pairs,
            max_tokens=limit if truncation else None,
            specials=add_special_tokens,
            parse_special=True,
        )
        rows = self._model_inputs(encodings)
        if padding:
            left = self.settings.get("padding_side") == "left"
            rows = pad_rows(rows, padding, limit, self.specials.pad, left=left)
        if return_tensors is not None:
            return as_arrays(rows, torch=return_tensors == "pt")
        return {name: some[0] for name, some in rows.items()} if isinstance(text, str) else rows

    def _model_inputs(self, encodings: Sequence[Encoding]) -> Rows:
        rows: Rows = {"input_ids": [list(one.tokens) for one in encodings]}
        if self.has_segments:
            rows["token_type_ids"] = [list(one.segments) for one in encodings]
        return rows | {"attention_mask": [[1] * len(row) for row in rows["input_ids"]]}

    @property
    def has_segments(self) -> bool:
        """Whether a model of this tokenizer reads token_type_ids."""
        names = self.settings.get("model_input_names")
        if names is not None:
            return "token_type_ids" in names
        plain = str(self.settings.get("tokenizer_class", "")).startswith("DistilBert")
        return self.kind == "wordpiece" and not plain

    def __repr__(self) -> str:
        return f"Tokenizer(kind={self.kind!r}, vocab_size={self.vocab_size})"

    def _repr_html_(self) -> str:
        specials = {role: id for role, id in vars(self.specials).items() if id is not None}
        special = ", ".join(f"{self.token(id)} ({role}, {id})" for role, id in specials.items())
        facts = [("kind", self.kind), ("vocabulary", f"{self.vocab_size:,}"), ("special", special)]
        return fact_table("Tokenizer", facts)

    def __reduce__(self) -> tuple[Any, ...]:
        # a copied Rust object loses `encode_special_tokens`
        return Tokenizer, (self._rust, self.settings, self._pieces)

    @property
    def tokens_have_spaces(self) -> bool:
        """Whether the space before a word is part of its token."""
        return self.kind == "byte-bpe" or self.morphemes

    def _marked(self, texts: Sequence[str], *, parse_special: bool = False) -> Sequence[str]:
        """The texts as the pipeline expects them: with marks between what it splits."""
        if self._pieces is not None:
            return self._pieces.marked(texts, self._names if parse_special else None)
        return list(map(mark_morphemes, texts)) if self.morphemes else texts

    @cached_property
    def _names(self) -> re.Pattern[str] | None:
        return pipeline.names_pattern(self.control_tokens)

    def _made_text_only(self, state: pipeline.State) -> Rust:
        """The encoder that finds no control tokens in text."""
        with panics_explained(msg("The tokenizer {where} cannot be used", where=self._where)):
            if pipeline.is_reachable(state, self.control_tokens):
                return self._secretive
        self._rust.encode_special_tokens = True
        return self._rust

    @cached_property
    def _parsing(self) -> Rust:
        """The encoder that finds control tokens by name."""
        with panics_explained(msg("The tokenizer {where} cannot be used", where=self._where)):
            return Rust.from_str(self._rust.to_str())

    @cached_property
    def _secrets(self) -> dict[str, str]:
        return pipeline.secret_names(self.control_tokens)

    @cached_property
    def _secretive(self) -> Rust:
        """The encoder that finds control tokens by their secret names only."""
        with panics_explained(msg("The tokenizer {where} cannot be used", where=self._where)):
            return pipeline.renamed(self._rust, self.control_tokens, self._secrets)

    def _secret(self, id: int) -> str:
        name = self.token(id)
        require_that(
            name in self._secrets, "{name!r} is not a control token: write it as text.", name=name
        )
        return self._secrets[name]

    def _check(self, texts: Any, pairs: Any, max_tokens: int | None, *, specials: bool) -> None:
        check_texts(texts, "texts")
        if pairs is not None:
            check_texts(pairs, "pairs")
            require_that(
                len(pairs) == len(texts),
                "There are {texts} texts but {pairs} pairs: give one for each.",
                texts=len(texts),
                pairs=len(pairs),
            )
        if max_tokens is not None:
            frame = self._rust.num_special_tokens_to_add(pairs is not None) if specials else 0
            require_that(
                max_tokens >= max(frame, 1),
                "max_tokens={n}: the special tokens alone take {frame}; give at least {least}.",
                n=max_tokens,
                frame=frame,
                least=max(frame, 1),
            )

    def _encoding(self, one: Any, offsets: Offsets, max_tokens: int | None) -> Encoding:
        tokens = one.ids
        flags = zip(one.special_tokens_mask, tokens, strict=True)
        specials = [bool(flag) or token in self.control_ids for flag, token in flags]
        columns: list[list[Any]] = [tokens, one.type_ids, offsets, specials, one.word_ids]
        if max_tokens is None or len(tokens) <= max_tokens:
            return Encoding(*columns)
        keep = truncate_to_tokens(one.sequence_ids, max_tokens)
        return Encoding(*([column[at] for at in keep] for column in columns))

    def _offsets(
        self, one: Any, given: Sequence[str], texts: Sequence[str], names: re.Pattern[str] | None
    ) -> Offsets:
        """The characters of each token, including all parts of decomposed characters.

        `texts` are those given with marks; `names` are control tokens looked for in them.
        """
        if self._pieces is not None:
            pieces = [iter(self._pieces.places(text, names)) for text in given]
            return [(0, 0) if i is None else next(pieces[i]) for i in one.sequence_ids]
        found: Offsets = one.offsets
        for which, text in enumerate(texts):
            places = [at for at, sequence in enumerate(one.sequence_ids) if sequence == which]
            here = [found[at] for at in places]
            if self._composes and not unicodedata.is_normalized("NFC", text):
                here = widened(text, here)
            if self.morphemes:
                here = without_marks(text, here)
            for at, place in zip(places, here, strict=True):
                found[at] = place
        return found


def _spelt(parts: Sequence[str | int], name: Callable[[int], str]) -> list[str]:
    return [part if isinstance(part, str) else name(part) for part in parts]


def _row(one: Any, max_tokens: int | None) -> TokenRow:
    columns = np.array([one.ids, one.type_ids], np.int32)
    if max_tokens is not None and len(one.ids) > max_tokens:
        columns = columns.take(truncate_to_tokens(one.sequence_ids, max_tokens), 1)
    return TokenRow(*columns)
