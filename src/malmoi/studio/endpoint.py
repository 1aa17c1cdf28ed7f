"""The studio's endpoints: a view is a function of a model and a request's fields; tokens."""

import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, Field, create_model

from malmoi.errors import require_that, required
from malmoi.inference import Model
from malmoi.inference.generation.token_bytes import token_bytes
from malmoi.inference.prompt import encode_prompt
from malmoi.server.api.requests import ApiRequest, NameField, TextField, Token
from malmoi.server.api.responses import token_name
from malmoi.server.executor import run_on_model
from malmoi.server.model_registry import ModelRegistry
from malmoi.tokenizer import Tokenizer

router = APIRouter(prefix="/studio", tags=["studio"])
View = TypeVar("View", bound=Callable[..., Any])
Names = Annotated[list[NameField], Field(max_length=4096)]
Tokens = Annotated[tuple[Token, ...], Field(max_length=20_000, strict=False)]
Layer = Annotated[int, Field(ge=-1000, le=1000)]  # from the end if negative
Index = Annotated[int, Field(ge=0, le=10_000)]
ShortText = Annotated[str, Field(max_length=2000)]


class StudioRequest(BaseModel):
    """A request that names no model."""

    model_config = ApiRequest.model_config


def model_view(path: str) -> Callable[[View], View]:
    """Serves a view of the model that a request names, computed by that model's executor.

    The view's other parameters are the fields of the request.
    """

    def serve(view: View) -> View:
        hints = get_type_hints(view, include_extras=True)
        _, *given = signature(view).parameters.values()
        fields: dict[str, Any] = {
            one.name: (hints[one.name], ... if one.default is one.empty else one.default)
            for one in given
        }

        async def endpoint(request: Request, body: Any) -> Any:
            served = registry_of(request).get(body.model)
            values = {name: getattr(body, name) for name in fields}
            return await run_on_model(request, served, partial(view, served.model, **values))

        body_type = create_model(view.__name__, __base__=ApiRequest, __doc__=view.__doc__, **fields)
        endpoint.__annotations__["body"] = body_type
        endpoint.__doc__ = view.__doc__
        router.add_api_route(path, endpoint, methods=["POST"], response_model=hints["return"])
        return view

    return serve


def registry_of(request: Request) -> ModelRegistry:
    found: ModelRegistry = request.app.state.registry
    return found


def runs_folder(request: Request) -> Path:
    folder: Path | None = request.app.state.settings.runs
    return required(folder, "No folder of runs was given: start the server with --runs DIR.")


Registry = Annotated[ModelRegistry, Depends(registry_of)]
RunsFolder = Annotated[Path, Depends(runs_folder)]


def require_head(layer: int, head: int, layers: int, heads: int) -> None:
    require_that(
        layer < layers and head < heads,
        "There are {layers} layers of {heads} heads here; choose one of them.",
        layers=layers,
        heads=heads,
    )


# ------------------------------------------------------------------ tokens in readable form


def readable_token(tokenizer: Tokenizer, token: str) -> str:
    """The text of a token; WordPiece tokens are readable already."""
    id = tokenizer.id(token)
    return token if id is None or tokenizer.kind == "wordpiece" else token_name(tokenizer, id)


def token_chance(tokenizer: Tokenizer, token: str, probability: float) -> dict[str, Any]:
    return {"text": readable_token(tokenizer, token), "probability": probability}


@model_view("/branch")
def prompt_branch(
    model: Model, written: Names, prompt: TextField = "", tokens: Tokens = ()
) -> dict[str, list[int]]:
    """The tokens to continue from, instead of the prompt's own ones: these and those written.

    Generated tokens are kept, however the text would be tokenized.
    """
    known = _by_name(model.tokenizer)
    unknown = next((one for one in written if one not in known), None)
    require_that(
        unknown is None, "This model's vocabulary has no token {target!r:.60}.", target=unknown
    )
    before = tokens or encode_prompt(model.tokenizer, prompt).tokens
    return {"tokens": [*before, *(known[one] for one in written)]}


@lru_cache(maxsize=8)
def _by_name(tokenizer: Tokenizer) -> dict[str, int]:
    """Every token by its name in /v1/completions; of equal names the first."""
    return {
        token_name(tokenizer, id): id for id in sorted(tokenizer.vocab().values(), reverse=True)
    }


# ------------------------------------------------------------------ how much of a text is known

MAX_TOKENS_PER_CHARACTER = 1.2  # a tokenizer that needs more falls back to bytes or Jamo
MAX_UNKNOWN_SHARE = 0.1


@dataclass(frozen=True)
class Coverage:
    """How much of a text a tokenizer knows."""

    words: int
    unknown: int  # words with a part that the tokenizer does not know
    characters: int
    tokens: int

    @property
    def ratio(self) -> float:
        return self.tokens / max(1, self.characters)

    @property
    def known(self) -> bool:
        few_unknown = self.unknown <= MAX_UNKNOWN_SHARE * self.words
        return few_unknown and self.ratio <= MAX_TOKENS_PER_CHARACTER


class CoverageRequest(StudioRequest):
    """A text, and the models that are to read it."""

    text: TextField
    models: Annotated[list[NameField], Field(max_length=8)]


@router.post("/coverage")
def show_coverage(registry: Registry, body: CoverageRequest) -> dict[str, list[dict[str, Any]]]:
    """How much of a text the tokenizer knows of each model that has one."""
    found = [
        {"name": served.name, **asdict(covers(served.model.tokenizer, body.text))}
        for served in map(registry.get, body.models)
        if served.model.checkpoint.tokenizer is not None
    ]
    return {"models": found}


def covers(words: Tokenizer, text: str) -> Coverage:
    """Words are split at spaces; the masks and other special tokens of a text are known."""
    masked = words.specials.mask is not None
    encoding = words.encode_masked(text) if masked else words.encode(text)
    pieces = zip(encoding.tokens, encoding.offsets, encoding.specials, strict=True)
    # an added end of text may be the unknown token too
    missing = [at for token, (at, _), added in pieces if token == words.specials.unk and not added]
    spans = [found.span() for found in re.finditer(r"\S+", text)]
    return Coverage(
        words=len(spans),
        unknown=sum(any(begin <= at < end for at in missing) for begin, end in spans),
        characters=len(text),
        tokens=encoding.specials.count(False),
    )


# ------------------------------------------------------------------ how tokenizers split a text


class TokenizationRequest(StudioRequest):
    """A text to tokenize."""

    text: TextField


@router.post("/tokens")
def show_tokenization(registry: Registry, body: TokenizationRequest) -> dict[str, Any]:
    """How every loaded tokenizer splits a text; models that share one are listed together."""
    text = body.text
    cuts: dict[str, dict[str, Any]] = {}
    for served in registry:
        words = served.model.checkpoint.tokenizer
        if words is None:
            continue
        if (key := words.fingerprint()) not in cuts:
            cuts[key] = _cut(words, text)
        cuts[key]["models"].append(served.name)
    return {
        "characters": len(text),
        "bytes": len(text.encode()),
        "words": len(text.split()),
        "cuts": list(cuts.values()),
    }


def _cut(words: Tokenizer, text: str) -> dict[str, Any]:
    pieces = list(_pieces(words, text))
    unknown = sum(piece["unknown"] for piece in pieces)
    return {
        "models": [],
        "kind": words.kind,
        "vocab": words.vocab_size,
        "unknown": unknown,
        "pieces": pieces,
    }


def _pieces(words: Tokenizer, text: str) -> Iterator[dict[str, Any]]:
    encoding = words.encode(text)
    for token, (start, end), special in zip(
        encoding.tokens, encoding.offsets, encoding.specials, strict=True
    ):
        covered = text[start:end]
        held = b"" if special else token_bytes(words)(token)
        broken = words.kind == "byte-bpe" and held != covered.encode()
        name = words.token(token)
        unknown = token == words.specials.unk and not special
        yield {
            "id": token,
            "token": name,
            # as text, with WordPiece's ##
            "shown": name if special or unknown else readable_token(words, name),
            "text": covered,
            "special": special,
            "unknown": unknown,
            # of a token that splits a character
            "bytes": held.hex(" ").upper() if broken and held else None,
        }
