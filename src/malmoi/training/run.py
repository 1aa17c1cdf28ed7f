"""A prepared run: its parts, and how its checkpoint is written."""

import shutil
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from malmoi.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from malmoi.errors import UsageError
from malmoi.model import Network
from malmoi.system.files import make_folder, scratch_folder
from malmoi.training.feed import PhaseFeed
from malmoi.training.parallel import ProcessGroup
from malmoi.training.recipe import Recipe

if TYPE_CHECKING:
    from malmoi.inference import Model


@dataclass
class TrainingRun:
    """Everything a trainer needs, prepared."""

    recipe: Recipe
    checkpoint: Checkpoint
    feeds: list[PhaseFeed]
    valid: list[PhaseFeed]  # one per phase; empty if the text is too short
    out: Path
    group: ProcessGroup
    # nats per token of a model that knows only how frequent tokens are; 0: unknown
    frequency_loss: float = 0.0
    prompt: str = ""

    @property
    def network(self) -> Network:
        return self.checkpoint.network

    @property
    def _sharded(self) -> bool:
        return self.recipe.train.parallel == "fsdp" and self.group.world > 1

    def model(self) -> "Model":
        """The trained model; one sharded over processes is read back from its folder."""
        from malmoi.inference import Model

        return Model(read_checkpoint(self.out) if self._sharded else self.checkpoint)

    def save(self) -> None:
        """Writes the checkpoint at the top of the run folder."""
        checkpoint = self._gathered()
        if self.group.first:
            write_checkpoint(checkpoint, self.out)

    def save_snapshot(self, step: int) -> None:
        """Writes the model after a step to its own folder, atomically."""
        checkpoint = self._gathered()
        if not self.group.first:
            return
        folder = self.snapshot_root / f"{step:06d}"
        make_folder(self.snapshot_root)
        with scratch_folder(self.snapshot_root) as scratch:
            write_checkpoint(checkpoint, scratch / folder.name)
            shutil.rmtree(folder, ignore_errors=True)
            (scratch / folder.name).replace(folder)

    def drop_snapshots_after(self, step: int) -> None:
        """Removes snapshots that a resumed or rolled back run has not reached yet."""
        for folder in self.snapshot_root.glob("[0-9]*") if self.group.first else ():
            if folder.name.isdecimal() and int(folder.name) > step:
                shutil.rmtree(folder)

    @property
    def snapshot_root(self) -> Path:
        return self.out / "snapshots"

    def _gathered(self) -> Checkpoint:
        """The checkpoint; gathered by the first process if the model is sharded."""
        if not self._sharded:
            return self.checkpoint
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(self.network, options=options)
        if not self.group.first:
            return self.checkpoint
        pooler = self.network.pooler is not None
        whole = Network(self.network.config, self.network.classes, pooler=pooler)
        whole.load_state_dict(weights)
        return replace(self.checkpoint, network=whole)

    def sample(self) -> str:
        """Generates a short sample from the current weights."""
        if not self.prompt:
            return ""
        from malmoi.inference import Model

        model = Model(self.checkpoint)
        prompt = self.prompt
        with suppress(UsageError):  # this vocabulary may be unable to encode the prompt
            if self.network.config.encoder_depth:
                return f"{prompt} → {model.translate(prompt, beams=1)}"
            if "lm" in self.network.heads:
                text = model.generate(prompt, max_new_tokens=40, temperature=0.8, seed=0)
                return (prompt + text).replace("\n", " ")
            mask = model.tokenizer.token(model.tokenizer.specials.mask or 0)
            guesses = " | ".join(one.token for one in model.fill(prompt, top=3))
            return prompt.replace(mask, f"[{guesses}]")
        return ""
