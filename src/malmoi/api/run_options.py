"""Options of everything that is loaded or built; apart from the records that need others."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from malmoi.settings import described, option

Settings = Mapping[str, object]  # by path: {"train.floor": 0.1}


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    device: str | None = option(
        None, "cpu, cuda, cuda:1… or mps.", shown="a GPU if there is one", metavar="NAME"
    )


@dataclass(frozen=True, kw_only=True)
class LoadOptions(DeviceOptions):
    """How a model is loaded."""

    dtype: str | None = option(
        None, "fp32, bf16, fp16, or int8 on a CPU.", shown="as stored", metavar="NAME"
    )


@dataclass(frozen=True, kw_only=True)
class RecipeSettings:
    settings: Settings = field(
        default_factory=dict, metadata=described('Any setting by its path: {"train.floor": 0.1}.')
    )


@dataclass(frozen=True, kw_only=True)
class BuildOptions(RecipeSettings):
    """Options of what is built in a folder, besides its settings."""

    overwrite: bool = option(False, "Discard what the output already has and start over.")


@dataclass(frozen=True, kw_only=True)
class RunOptions(DeviceOptions, BuildOptions):
    """Options of every training run besides its settings."""
