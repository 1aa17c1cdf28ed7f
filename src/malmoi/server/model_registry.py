"""The models that are served, by name."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

from malmoi.errors import UsageError, nearest, require_that
from malmoi.inference import Model, load
from malmoi.inference.engine import Engine
from malmoi.server.config import ServeConfig
from malmoi.server.error_replies import ApiError


@dataclass(frozen=True)
class ServedModel:
    """A model under a name, with an engine if it generates text."""

    name: str
    model: Model
    engine: Engine | None
    path: Path

    @cached_property
    def max_characters(self) -> int:
        """The most characters that fit into the model's context."""
        return self.model.config.context * self.model.tokenizer.longest_token

    @property
    def writer(self) -> Engine:
        """The engine; raises an error if the model does not generate."""
        if self.engine is None:
            raise UsageError(
                "The model {name!r} does not generate text. It can: {can}.",
                name=self.name,
                can=", ".join(self.model.abilities),
            )
        return self.engine


class ModelRegistry:
    """Models in the order given; the first is the default."""

    def __init__(self, served: Sequence[ServedModel], aliases: Sequence[str] = ()) -> None:
        """`aliases`: more names of the first model."""
        require_that(served, "There is no model to serve: give at least one folder.")
        self._served = {one.name: one for one in served}
        self.names = {**self._served, **dict.fromkeys(aliases, served[0])}

    @classmethod
    def open(
        cls,
        models: Sequence[Model | str | Path],
        settings: ServeConfig,
        *,
        device: str | None = None,
        dtype: str | None = None,
    ) -> Self:
        """Loads every folder; a model is named after its folder."""
        paths = [
            Path(one.checkpoint.source or "model" if isinstance(one, Model) else one)
            for one in models
        ]
        names = settings.served_model_name or distinct_names(paths)
        require_that(
            len(set(names)) == len(names) and (len(models) <= 1 or len(models) == len(names)),
            "served_model_name has {names} names for {models} models: give each model its own.",
            names=len(names),
            models=len(models),
        )
        opened = [
            model if isinstance(model, Model) else load(model, device=device, dtype=dtype)
            for model in models
        ]
        named = zip(names, opened, paths, strict=False)
        served = [serve_model(name, model, path, settings) for name, model, path in named]
        return cls(served, names[len(models) :])

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._served.values())

    def get(self, name: str | None) -> ServedModel:
        if name is None:
            return next(iter(self))
        if name not in self.names:
            raise ApiError(
                404,
                "There is no model {name!r}.{hint}",
                param="model",
                code="model_not_found",
                name=name[:80],
                hint=nearest(name[:200], self.names),
            )
        return self.names[name]

    def close(self) -> None:
        """Stops every engine; what it still generates is cancelled."""
        for one in self:
            if one.engine is not None:
                one.engine.close(drain=False)


def serve_model(name: str, model: Model, path: Path, settings: ServeConfig) -> ServedModel:
    """A model ready to serve."""
    writes = "generate" in model.abilities and model.network.trunk.is_causal
    engine = Engine(model, slots=settings.slots, queue=settings.queue) if writes else None
    return ServedModel(name, model, engine, path)


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """The folders' names; a repeated one follows its parent's, as in demo-ko-gpt, or a number."""
    taken: list[str] = []
    for path in map(Path.resolve, paths):
        name = (path.stem if path.suffix == ".gguf" else path.name) or "model"
        longer = f"{path.parent.name}-{name}".removeprefix("-")
        numbered = (f"{longer}-{i}" for i in range(2, len(paths) + 2))
        taken.append(next(one for one in (name, longer, *numbered) if one not in taken))
    return taken
