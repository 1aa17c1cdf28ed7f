"""Compiles a step while the vocabulary is learnt and the text is encoded."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread

import torch

from malmoi.checkpoint import Checkpoint
from malmoi.messages import StatusLog
from malmoi.model import Network
from malmoi.text.documents import read_documents
from malmoi.text.sentences import sentence_splitter
from malmoi.training.data.encode import build_stores
from malmoi.training.feed import make_feeds
from malmoi.training.loop import COMPILING
from malmoi.training.losses import objective
from malmoi.training.parallel import ProcessGroup
from malmoi.training.prepare import TrainingRun
from malmoi.training.sizing import SizedRecipe
from malmoi.training.trainer import Trainer

logger = StatusLog(__name__)

STEPS = 3  # batches of varied shapes are compiled for one shape first, then for all


@contextmanager
def compiling_ahead(sized: SizedRecipe | None, group: ProcessGroup) -> Iterator[bool]:
    """Compiles, on a GPU of its own, beside what is done within the context; yields whether."""
    if sized is None or group.device.type != "cuda" or group.world > 1:
        yield False
        return
    logger.info(COMPILING, seconds=20)
    thread = Thread(target=_rehearse, args=(sized, group, torch.get_num_threads()), daemon=True)
    before = sys.getswitchinterval()
    # a thread that loads files waits this long after each for one that computes
    sys.setswitchinterval(before / 20)
    try:
        thread.start()
        yield True
        thread.join()
    finally:
        sys.setswitchinterval(before)


def _rehearse(sized: SizedRecipe, group: ProcessGroup, threads: int) -> None:
    """Takes steps on the sample; all networks of these shapes share what was compiled."""
    torch.set_num_threads(threads)  # of this thread; other code would be compiled for others
    with suppress(Exception), TemporaryDirectory() as folder:
        trainer = Trainer(_sample_run(sized, Path(folder), group))
        trainer.network.train()
        c = trainer.config
        for step in range(STEPS):
            passes = trainer.feeds[0]._step(step * c.batch, c.batch, trainer.micro, group.device)
            trainer.learn_eagerly([one.tensors for one in passes])
        trainer.log.close()
        del trainer, passes
    gc.collect()
    torch.cuda.empty_cache()


def _sample_run(sized: SizedRecipe, folder: Path, group: ProcessGroup) -> TrainingRun:
    recipe, words = sized.recipe, sized.words
    recipe = replace(recipe, train=replace(recipe.train, tensorboard=False, track=()))
    text = folder / "sample.txt"
    text.write_text("\n\n\n".join(sized.sample), "utf-8")
    sentences = None if recipe.causal else sentence_splitter(recipe.data.sentences)
    end = words.specials.eos if recipe.causal else None
    reader = read_documents(text, documents="blanks")
    stores = build_stores(reader, words, folder / "data", sentences=sentences, end=end)
    feeds, _ = make_feeds(recipe, [stores], words, packed=True)
    network = Network(recipe.model, dict.fromkeys(objective(recipe.objective).heads, 0))
    return TrainingRun(recipe, Checkpoint(network, words), feeds, [], folder, group)
