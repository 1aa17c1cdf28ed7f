"""A prepared run, and how its folder is made: text, vocabulary, stores, network, recipe.json."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from malmoi.checkpoint import Checkpoint, read_checkpoint
from malmoi.errors import UsageError, require_that
from malmoi.messages import joined, logger, msg, plural
from malmoi.model import Network, count_parameters, initialise
from malmoi.model.heads import POOLED_HEADS
from malmoi.system.files import write_text
from malmoi.text.documents import DocumentReader, read_documents, require_documents
from malmoi.text.formats import DOCUMENT_RULES
from malmoi.text.pairs import read_pairs, split_pair
from malmoi.text.sentences import sentence_splitter
from malmoi.tokenizer import Tokenizer, train_tokenizer
from malmoi.tokenizer.training import Special, first_texts
from malmoi.training.budget import Budget
from malmoi.training.data.captions import TextPerRow, open_features
from malmoi.training.data.encode import Stores, build_stores, draw, open_stores
from malmoi.training.feed import PhaseFeed, make_feeds, prompt_of, samples_per_epoch
from malmoi.training.log import check_trackers
from malmoi.training.losses import objective
from malmoi.training.parallel import ProcessGroup, check_parallel, row_order
from malmoi.training.recipe import BUDGETS, DataConfig, Recipe, pretraining_folder, read_recipe


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
    rehearsed: bool = False  # its step was compiled while it was prepared

    @property
    def network(self) -> Network:
        return self.checkpoint.network

    @property
    def sharded(self) -> bool:
        return self.recipe.train.parallel != "ddp" and self.group.world > 1

    def gathered(self) -> Checkpoint:
        """The checkpoint; gathered by the first process if the model is sharded."""
        if not self.sharded:
            return self.checkpoint
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights: dict[str, Any] = get_model_state_dict(self.network, options=options)
        if not self.group.first:
            return self.checkpoint
        pooler = self.network.pooler is not None
        whole = Network(self.network.config, self.network.classes, pooler=pooler)
        for name in weights:
            order = row_order(name, whole.config, self.group.tensor)
            if order is not None:
                weights[name] = weights[name][order.argsort()]
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


# ------------------------------------------------------------------ preparing it


SOURCES = "data/sources.txt"  # what the text of a run is called
DISTIL = "distil.json"  # records the teacher of a distillation run
MAX_COUNTED = 2_000_000  # tokens per source for their frequencies
MAX_DESCRIBED_FILES = 3  # more files than this are not described one by one
# settings that may change between resumes; a plugin's file may be renamed
FREE = (
    *("save_every", "keep", "snapshots", "valid_every", "valid_batches", "log_every", "prompt"),
    *("tensorboard", "track", "fit_batch", "micro", "compile", "parallel", "tensor", "stretch"),
    "max_epochs",
)
# a longer run reads more of the text
CHANGEABLE_SETTINGS = {
    *(f"train.{name}" for name in (*BUDGETS, *FREE)),
    *("about", "plugins", "data.fraction"),
}
SPECIAL: dict[str, Special] = {"both": "mask", "translation": "pad"}  # by objective
# a vocabulary is learnt from this much of the text, …
TOKENIZER_CHARACTERS = 200_000_000
# … and of that from so many characters per token, drawn evenly: a quarter of 94 MB of novels and
# reviews makes 0.1 % more tokens than all of it, in a third of the time
CHARACTERS_PER_TOKEN = 3000


@dataclass
class RunSources:
    """Where a run's text, vocabulary and initial weights come from."""

    sources: tuple[str, ...]
    tokenizer: Path | None = None
    start: str | Path | None = None
    learnt: Tokenizer | None = None  # of this text, when the size was chosen
    _opened: list[DocumentReader] | None = None  # standard input can be opened only once

    def readers(self, data: DataConfig) -> list[DocumentReader]:
        """One reader for all sources, or one each if they are mixed by weight."""
        if self._opened is None:
            self._opened = self._open(data)
        return self._opened

    def _open(self, data: DataConfig) -> list[DocumentReader]:
        if data.features:
            require_that(
                len(self.sources) == 1 and Path(self.sources[0]).is_file(),
                "Features need one text file with a line for each row, not {sources}.",
                sources=", ".join(self.sources),
            )
            rows = len(open_features(data.features))
            return [DocumentReader([TextPerRow(Path(self.sources[0]), ".txt", rows)], "line", "")]
        if data.pairs:
            return [read_pairs(self.sources, (data.source, data.target))]
        kinds = dict(documents=data.documents, text=data.text)
        if not data.weights:
            return [read_documents(self.sources, **kinds)]
        require_that(
            len(data.weights) == len(self.sources),
            "data.weights has {weights} numbers for {sources} sources; give one for each.",
            weights=len(data.weights),
            sources=len(self.sources),
        )
        return [read_documents([source], **kinds) for source in self.sources]


def whole_names(sources: Sequence[str]) -> str:
    """Files and folders by their absolute names, a line each; others as they are."""
    return "\n".join(str(Path(s).absolute()) if Path(s).exists() else s for s in sources)


def prepare_run(recipe: Recipe, origin: RunSources, out: Path, group: ProcessGroup) -> TrainingRun:
    """Prepares a run up to its first step; the first process writes, the others read its files."""
    recipe = _with_fitted_batch(recipe, out)
    group = replace(group, tensor=recipe.train.tensor if group.world > 1 else 1)
    check_request(recipe, group)
    if group.first:
        require_that(
            (out / "recipe.json").is_file() or not any(out.glob("*.safetensors")),
            "{out} holds a model that was not pre-trained here: choose another folder.",
            out=out,
        )
        _prepare_tokenizer(recipe, out, origin)
    group.barrier()
    words = Tokenizer.load(out)
    if not origin.start:
        recipe = replace(recipe, model=replace(recipe.model, vocab=words.vocab_size))
    if recipe.data.features:
        _, count, width = open_features(recipe.data.features).shape
        seen = (f"causal | prefix:{count}",)
        shape = dict(feature_count=count, feature_width=width, attention=seen)
        recipe = replace(recipe, model=replace(recipe.model, **shape))
    checkpoint = _begin(recipe, words, origin)
    recipe = replace(recipe, model=checkpoint.network.config).check()
    check_parallel(recipe.model, group, recipe.train.parallel)
    if group.first:
        pretraining_folder(out).begin(recipe.to_dict(), free=CHANGEABLE_SETTINGS)
        _encode(recipe, origin.readers(recipe.data), words, out)
        write_text(out / SOURCES, whole_names(origin.sources))
    group.barrier()
    stores = [open_stores(place) for place in _places(recipe, out)]
    feeds, valid = make_feeds(recipe, stores, words, packed=group.device.type == "cuda")
    entropy = _frequency_loss(stores)
    if group.first:
        _describe(recipe, stores, feeds, checkpoint.network, entropy)
    if group.first and not valid:
        logger.info("The validation text is shorter than one sample: there will be no validation.")
    prompt = prompt_of(recipe, stores, words)
    return TrainingRun(recipe, checkpoint, feeds, valid, out, group, entropy, prompt)


def check_request(recipe: Recipe, group: ProcessGroup) -> None:
    """Rejects, before the text is encoded, what would otherwise fail only afterwards."""
    c = recipe.train
    check_trackers(c.trackers)
    require_that(
        group.world == 1 or c.parallel == "ddp" or c.optimizer != "muon",
        "Muon needs whole matrices: use train.parallel=ddp, or train.optimizer=adamw.",
    )
    require_that(
        not recipe.model.feature_count or recipe.data.features,
        "{name} is trained on features: give their file with --set data.features=FILE.npy.",
        name=recipe.name,
    )
    require_that(group.world == 1 or not c.own_teacher, "train.own_teacher is for one process.")
    require_that(
        c.batch % group.parts == 0,
        "train.batch={batch} does not divide over {world} processes: use a multiple.",
        batch=c.batch,
        world=group.parts,
    )


# ------------------------------------------------------------------ tokenizer


def _prepare_tokenizer(recipe: Recipe, out: Path, origin: RunSources) -> None:
    """The run's tokenizer: the existing one, a given one, the start model's, or a trained one."""
    given = origin.tokenizer or origin.start
    wanted = Tokenizer.load(given) if given else None
    if (out / "tokenizer.json").is_file():
        _check_same(Tokenizer.load(out), wanted, recipe, out)
    elif wanted is not None:
        wanted.save(out)
    else:
        (origin.learnt or learn_tokenizer(recipe, origin.readers(recipe.data))).save(out)


def _check_same(existing: Tokenizer, wanted: Tokenizer | None, recipe: Recipe, out: Path) -> None:
    if wanted is not None and wanted.fingerprint() != existing.fingerprint():
        raise pretraining_folder(out).refusal(
            ["with another tokenizer than --tokenizer or --start"]
        )
    fresh = not (out / "recipe.json").is_file() and wanted is None
    require_that(
        not fresh or existing.kind == recipe.tokenizer.kind,
        "{out} holds a {kind} tokenizer, which this recipe does not train: choose another folder, "
        "or use it with --tokenizer.",
        out=out,
        kind=existing.kind,
    )


def learn_tokenizer(recipe: Recipe, readers: list[DocumentReader]) -> Tokenizer:
    """The tokenizer of a recipe, learnt from the part of the text that the run reads."""
    c = recipe.tokenizer
    logger.info("Training a {kind} tokenizer of up to {vocab:,} tokens …", **vars(c))

    def read() -> Iterator[tuple[str, bool]]:
        whole = ((document.text, False) for document in require_documents(readers))
        texts = (text for text, _ in draw(whole, recipe.data.fraction))
        return ((text, False) for text in first_texts(texts, TOKENIZER_CHARACTERS))

    share = CHARACTERS_PER_TOKEN * c.vocab / max(1, sum(len(text) for text, _ in read()))
    texts = (text for text, _ in draw(read(), share))
    return train_tokenizer(texts, **vars(c), special=SPECIAL.get(recipe.samples, "none"))


# ------------------------------------------------------------------ network


def _begin(recipe: Recipe, words: Tokenizer, origin: RunSources) -> Checkpoint:
    """Initialises the weights by the recipe's rule, or loads those of the start model."""
    heads = objective(recipe.objective).heads
    if origin.start is None:
        network = Network(recipe.model, dict.fromkeys(heads, 0))
        return Checkpoint(initialise(network, recipe.train.seed), words)
    checkpoint = read_checkpoint(origin.start)
    _check_start(checkpoint, words, origin.start, heads)
    network = checkpoint.network
    if "generator" in heads:  # it begins anew: a model's folder has no part of it
        m = recipe.model
        config = replace(
            network.config, generator_share=m.generator_share, generator_depth=m.generator_depth
        )
        classes = dict.fromkeys(heads, 0) | network.classes
        whole = Network(config, classes, pooler=network.pooler is not None)
        initialise(whole, recipe.train.seed).load_state_dict(network.state_dict(), strict=False)
        network = whole
    _freeze_others(network, heads)
    return Checkpoint(network, words, source_config=checkpoint.source_config)


def _check_start(
    checkpoint: Checkpoint, words: Tokenizer, start: str | Path, heads: Sequence[str]
) -> None:
    begin_anew = {"generator", "detect"} if "mlm" in checkpoint.network.heads else set()
    there = begin_anew | set(checkpoint.network.heads)
    missing = next((head for head in heads if head not in there), "")
    require_that(
        not missing,
        "{start} has no {missing} head, which the objective trains.",
        start=start,
        missing=missing,
    )
    vocab = checkpoint.network.config.vocab
    own = checkpoint.tokenizer
    require_that(
        words.vocab_size <= vocab,
        "The tokenizer has {size:,} tokens, but {start} only {vocab:,}.",
        size=words.vocab_size,
        start=start,
        vocab=vocab,
    )
    same = own is None or own.fingerprint() == words.fingerprint()
    require_that(same, "{start} was trained with its own tokenizer: omit --tokenizer.", start=start)


def _freeze_others(network: Network, heads: Sequence[str]) -> None:
    """Freezes the heads that this objective does not train."""
    others: list[Any] = [head for name, head in network.heads.items() if name not in heads]
    if network.pooler is not None and not POOLED_HEADS & set(heads):
        others.append(network.pooler)
    for part in others:
        part.requires_grad_(requires_grad=False)
    for part in (network.trunk, *(network.heads[h] for h in heads)):  # they may share weights
        part.requires_grad_(requires_grad=True)


# ------------------------------------------------------------------ recipe.json


def _with_fitted_batch(recipe: Recipe, out: Path) -> Recipe:
    """The recipe with the batch size fitted in this folder, unless the user set one."""
    path = out / "recipe.json"
    c = recipe.train
    if c.fit_batch and path.is_file() and (before := read_recipe(path).train).fit_batch:
        c = replace(c, batch=before.batch, batch_start=before.batch_start)
    return replace(recipe, train=c)


# ------------------------------------------------------------------ token stores


def _places(recipe: Recipe, out: Path) -> list[Path]:
    """The folder of each store: one for all sources, or one each if they are weighted."""
    count = len(recipe.data.weights)
    return [out / "data" / str(i) for i in range(count)] if count > 1 else [out / "data"]


def _encode(recipe: Recipe, readers: list[DocumentReader], words: Tokenizer, out: Path) -> None:
    """Encodes every source; existing stores of the same text are reused."""
    require_that(
        not recipe.data.pairs or words.target is words,
        "This model's tokenizer has a SentencePiece model for each language, and training "
        "encodes both alike: it can translate, and not be trained further.",
    )
    split = split_pair if recipe.data.pairs else sentence_splitter(recipe.data.sentences)
    sentences, end = (None, words.specials.eos) if recipe.causal else (split, None)
    for reader, where in zip(readers, _places(recipe, out), strict=True):
        shares = dict(valid=recipe.data.valid, fraction=recipe.data.fraction)
        done = build_stores(reader, words, where, sentences=sentences, end=end, **shares)
        if done.how.startswith("rebuilt"):
            logger.info(
                "The token store in {where} was {how}: training from here on reads the new one.",
                where=where,
                how=done.how,
            )
        for sentence in _about(reader):
            logger.info(sentence)


def _about(reader: DocumentReader) -> list[str]:
    """Notes about the text: how documents were separated, and what was skipped."""
    if len(reader.rules) <= MAX_DESCRIBED_FILES:
        return reader.describe()
    sentences: list[str] = [
        msg("{where}: {wrong}.", where=plural(count, "file"), wrong=msg(DOCUMENT_RULES[rule]))
        for rule, count in Counter(reader.rules.values()).items()
    ]
    if problems := list(reader.problems.values()):
        lines = plural(sum(problem.count for problem in problems), "bad line")
        first = problems[0].first[0]
        sentences.append(msg("{bad_lines} skipped, first {first}.", bad_lines=lines, first=first))
    return sentences


def _frequency_loss(stores: list[Stores]) -> float:
    """The entropy of the tokens in nats: the loss of a model that ignores the context."""
    counts = np.bincount(np.concatenate([s.train.tokens[:MAX_COUNTED] for s in stores]))
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def _describe(
    recipe: Recipe, stores: list[Stores], feeds: list[PhaseFeed], network: Network, entropy: float
) -> None:
    tokens = sum(len(s.train.tokens) for s in stores)
    budget = Budget.of(recipe, samples_per_epoch(recipe, feeds))
    size = msg("{parameters:,} weights", parameters=count_parameters(network))
    size += ", " + msg("{tokens:,} training tokens", tokens=tokens)
    steps = plural(budget.steps, "step") if budget.steps else plural(recipe.train.minutes, "minute")
    logger.info(
        "{recipe}: {size}, {steps}, {batch} × {lengths} tokens at most per step"
        if recipe.data.packed
        else "{recipe}: {size}, {steps}, {batch} × {lengths} tokens per step",
        recipe=recipe.name,
        size=size,
        steps=steps,
        batch=recipe.train.batch,
        lengths=joined(msg(" then "), (str(length) for length, _ in recipe.phases)),
    )
    if recipe.objective in ("lm", "mlm"):
        logger.info(
            "Losses to compare with: {blind:.2f} if all tokens were equally likely, "
            "{entropy:.2f} if only their frequencies were known.",
            blind=math.log(network.config.vocab),
            entropy=entropy,
        )
