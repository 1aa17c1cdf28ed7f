"""From a folder of text to a trained model: tokenizer → token store → network → `Trainer.fit` → folder."""

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from malmoi.checkpoint import Checkpoint, read, write
from malmoi.checkpoint.atomic import write_text
from malmoi.corpus.read import Reader
from malmoi.corpus.read import read as read_sources
from malmoi.corpus.sentences import splitter
from malmoi.data import BertBatches, LMBatches, Masking, Mixture, Pairs, Progress, Store, Stores, Windows, build
from malmoi.errors import MalmoiError, UsageError, nearest
from malmoi.infer import Model
from malmoi.model import Network, initialise
from malmoi.objectives import objective
from malmoi.tokenizer import Tokenizer
from malmoi.tokenizer import train as train_tokenizer
from malmoi.train.feed import Feed
from malmoi.train.parallel import Group, join
from malmoi.train.recipe import Recipe
from malmoi.train.recipes import recipe as named_recipe
from malmoi.train.report import write_report
from malmoi.train.trainer import Budget, Trainer

TOKENIZER_TEXT = 200_000_000  # characters a vocabulary is learnt from
FREE = {"steps", "tokens", "minutes", "save_every", "keep", "valid_every", "valid_batches", "log_every", "sample_every"}
FREE |= {"prompt", "micro", "compile", "parallel", "tensorboard"}  # train settings that may change between resumes


def pretrain(
    recipe: str | Recipe,
    *,
    data: str | Sequence[str],
    out: str | Path,
    tokenizer: str | Path | None = None,
    start: str | Path | None = None,
    device: str | None = None,
    **overrides: Any,
) -> Model:
    """Trains a model from raw text into a Hugging Face folder; the same call on the same folder goes on.

    `tokenizer` takes a ready vocabulary, `start` a model to go on from. Overrides name a field of the recipe
    (`minutes=3`, `lr=1e-3`, or `**{"train.lr": 1e-3}`).
    """
    chosen = resolve(recipe, overrides)
    sources, out = [data] if isinstance(data, str) else list(data), Path(out)
    group = join(device)
    try:
        run = _prepare(chosen, sources, out, tokenizer, start, group)
        trainer = Trainer(run.recipe, run.network, run.feeds, run.valid, out, group, run.save, run.sample)
        trainer.fit()
        if group.first:
            write_report(out, run.recipe)
        return Model(run.checkpoint)
    finally:
        group.close()


def resolve(recipe: str | Recipe, overrides: Mapping[str, Any]) -> Recipe:
    """A recipe by name, with its overrides; a new budget takes the place of the recipe's own."""
    chosen = named_recipe(recipe) if isinstance(recipe, str) else recipe
    paths = {_path(chosen, name): value for name, value in overrides.items() if value is not None}
    if paths.keys() & {f"train.{n}" for n in ("steps", "tokens", "minutes")}:
        chosen = replace(chosen, train=replace(chosen.train, steps=0, tokens=0, minutes=0.0))
    return chosen.override(paths).check()


def _path(recipe: Recipe, name: str) -> str:
    if "." in name:
        return name
    parts = {part: getattr(recipe, part).to_dict() for part in ("train", "data", "model", "tokenizer")}
    for part, fields in parts.items():
        if name in fields:
            return f"{part}.{name}"
    if name in recipe.to_dict():
        return name
    raise UsageError(f"The recipe has no setting {name!r}.{nearest(name, {f for p in parts.values() for f in p})}")


# ------------------------------------------------------------------ preparation


@dataclass
class Run:
    """Everything a trainer needs, ready."""

    recipe: Recipe
    checkpoint: Checkpoint
    feeds: list[Feed]
    valid: Feed | None
    out: Path
    group: Group

    @property
    def network(self) -> Network:
        return self.checkpoint.network

    def save(self) -> None:
        """The checkpoint at the top of the run folder."""
        if self.recipe.train.parallel == "fsdp" and self.group.world > 1:
            self._save_gathered()
        elif self.group.first:
            write(self.checkpoint, self.out)

    def _save_gathered(self) -> None:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(self.network, options=options)
        if self.group.first:
            whole = Network(self.network.config, _heads(self.recipe))
            whole.load_state_dict(weights)
            write(replace(self.checkpoint, network=whole), self.out)

    def sample(self) -> str:
        """A few words of what the model says now."""
        model, prompt = Model(self.checkpoint), self.recipe.train.prompt
        with suppress(UsageError):  # a prompt that this vocabulary cannot spell
            if "lm" in self.network.heads:
                prompt = prompt or "The"
                return (prompt + model.generate(prompt, max_new_tokens=40, temperature=0.8, seed=0)).replace("\n", " ")
            mask = model.tokenizer.token(model.tokenizer.specials.mask or 0)
            text = prompt or f"The {mask} of the people."
            return text.replace(mask, f"[{' | '.join(f.token for f in model.fill(text, top=3))}]")
        return ""


def _prepare(
    recipe: Recipe,
    sources: list[str],
    out: Path,
    tokenizer: str | Path | None,
    start: str | Path | None,
    group: Group,
) -> Run:
    out.mkdir(parents=True, exist_ok=True)
    readers = _readers(recipe, sources)
    if group.first:
        _vocabulary(recipe, readers, out, tokenizer, start)
    group.barrier()
    words = Tokenizer.load(out)
    recipe = replace(recipe, model=replace(recipe.model, vocab=words.vocab_size)) if start is None else recipe
    checkpoint = _begin(recipe, words, start)
    recipe = replace(recipe, model=checkpoint.network.config)
    if group.first:
        _remember(recipe, out)
        _stores(recipe, readers, words, out)
    group.barrier()
    stores = _stores(recipe, readers, words, out)
    feeds, valid = make_feeds(recipe, stores, words, packed=group.device.type == "cuda")
    if group.first:
        _describe(recipe, stores, feeds, checkpoint.network)
    return Run(recipe, checkpoint, feeds, valid, out, group)


def _readers(recipe: Recipe, sources: list[str]) -> list[Reader]:
    """One reader for all sources, or one for each where they are mixed by weight."""
    weights, kinds = recipe.data.weights, dict(documents=recipe.data.documents, text=recipe.data.text)
    if not weights:
        return [read_sources(sources, **kinds)]
    if len(weights) != len(sources):
        raise UsageError(f"data.weights has {len(weights)} numbers for {len(sources)} sources; give one for each.")
    return [read_sources([source], **kinds) for source in sources]


def _vocabulary(
    recipe: Recipe, readers: list[Reader], out: Path, tokenizer: str | Path | None, start: str | Path | None
) -> None:
    """The run's own tokenizer: the one already there, a given one, the start's, or one learnt from the text."""
    if (out / "tokenizer.json").is_file():
        return
    if tokenizer or start:
        Tokenizer.load(Path(tokenizer or start or "")).save(out)
        return
    c = recipe.tokenizer
    print(f"Learning a {c.kind} vocabulary of {c.vocab:,} from the text…", file=sys.stderr)
    texts = (document.text for reader in readers for document in reader)
    learnt = train_tokenizer(_until(texts, TOKENIZER_TEXT), kind=c.kind, vocab=c.vocab, lowercase=c.lowercase)
    learnt.save(out)


def _until(texts: Any, limit: int) -> Any:
    for text in texts:
        if limit <= 0:
            return
        limit -= len(text)
        yield text


def _begin(recipe: Recipe, words: Tokenizer, start: str | Path | None) -> Checkpoint:
    """New weights by the recipe's rule, or the ones of a model to go on from."""
    if start is None:
        network = Network(recipe.model, _heads(recipe))
        return Checkpoint(initialise(network, recipe.train.seed), words)
    checkpoint = read(start)
    for head in _heads(recipe):
        if head not in checkpoint.network.heads:
            raise UsageError(f"{start} has no {head} head, which the objective {recipe.objective} trains.")
    if words.vocab_size > checkpoint.network.config.vocab:
        raise MalmoiError(
            f"The tokenizer has {words.vocab_size} tokens, {start} only {checkpoint.network.config.vocab}."
        )
    return Checkpoint(checkpoint.network, words)


def _heads(recipe: Recipe) -> dict[str, int]:
    return dict.fromkeys(objective(recipe.objective).heads, 0)


def _remember(recipe: Recipe, out: Path) -> None:
    """Writes recipe.json; a folder made by another recipe is refused, with what differs."""
    path = out / "recipe.json"
    if path.is_file():
        try:
            before = Recipe.from_json(path.read_text("utf-8"))
        except (ValueError, UsageError) as error:
            raise MalmoiError(f"{path} does not read: {error}") from error
        changed = _differences(before.to_dict(), recipe.to_dict())
        if changed:
            raise UsageError(
                f"{out} holds a run with other settings ({', '.join(changed[:4])}); "
                "give those again to go on with it, or name another folder."
            )
    write_text(path, recipe.to_json())


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key, value in new.items():
        if isinstance(value, dict):
            found += _differences(old.get(key, {}), value, f"{prefix}{key}.")
        elif old.get(key) != value and not (prefix == "train." and key in FREE) and key not in ("about", "name"):
            found.append(f"{prefix}{key} was {json.dumps(old.get(key))}")
    return found


def _stores(recipe: Recipe, readers: list[Reader], words: Tokenizer, out: Path) -> list[Stores]:
    """The token stores of every source; what is already encoded is reused."""
    pairs = recipe.objective != "lm"
    sentences = splitter(recipe.data.sentences) if pairs else None
    end = None if pairs else words.specials.eos
    stores = []
    for i, reader in enumerate(readers):
        where = out / "data" / str(i) if len(readers) > 1 else out / "data"
        done = build(
            reader, words, where, sentences=sentences, valid=recipe.data.valid, seed=0, end=end, progress=_encoding
        )
        for source, problem in reader.problems.items():
            print(f"{source}: {problem.count} bad lines left out, such as {problem.first[0]}", file=sys.stderr)
        stores.append(done)
    return stores


def _encoding(progress: Progress) -> None:
    speed = progress.bytes / 1e6 / max(progress.seconds, 1e-9)
    print(f"Encoded {progress.bytes / 1e6:,.0f} MB, {progress.tokens:,} tokens, {speed:.1f} MB/s", file=sys.stderr)


# ------------------------------------------------------------------ samples


def make_feeds(
    recipe: Recipe, stores: list[Stores], words: Tokenizer, *, packed: bool
) -> tuple[list[Feed], Feed | None]:
    """The samples of every phase, and of validation at the last phase's length (none where the text is too short)."""
    packed = recipe.data.packed if recipe.data.packed is not None else packed
    feeds = [_feed(recipe, [s.train for s in stores], words, length, packed) for length, _ in recipe.phases]
    try:
        valid = _feed(recipe, [s.valid for s in stores], words, recipe.phases[-1][0], False, [s.train for s in stores])
    except MalmoiError:
        print("The validation text is shorter than one sample: there will be no validation.", file=sys.stderr)
        valid = None
    return feeds, valid


def _feed(
    recipe: Recipe, stores: list[Store], words: Tokenizer, length: int, packed: bool, others: list[Store] | None = None
) -> Feed:
    seed = recipe.train.seed
    parts: list[Any] = []
    for store, other in zip(stores, others or [None] * len(stores), strict=True):  # type: ignore[list-item]
        if recipe.objective == "lm":
            parts.append(Windows(store, length, seed, documents=recipe.data.document_mask))
        else:
            following: Any = {"mlm+nsp": "nsp", "mlm+sop": "sop"}.get(recipe.objective)
            short = recipe.data.short
            parts.append(Pairs(store, length, seed, specials=words.specials, next=following, short=short, others=other))
    source = parts[0] if len(parts) == 1 else Mixture(parts, recipe.data.weights, seed)
    if recipe.objective == "lm":
        return Feed(lambda share: LMBatches(source, share), length, len(source))
    d, pad = recipe.data, words.specials.pad or 0
    masking = Masking.of(words, whole_word=d.whole_word, rate=d.mask_rate, mask=d.mask_token, random=d.mask_random)
    return Feed(lambda share: BertBatches(source, share, masking, pad, seed, packed), length, len(source))


def _describe(recipe: Recipe, stores: list[Stores], feeds: list[Feed], network: Network) -> None:
    from malmoi.model import parameters

    tokens = sum(len(s.train.tokens) for s in stores)
    budget = Budget.of(recipe)
    size = f"{parameters(network) / 1e6:.1f}M weights, {tokens:,} training tokens"
    steps = f"{budget.steps:,} steps" if budget.steps else f"{recipe.train.minutes:g} minutes"
    print(f"{recipe.name}: {size}, {steps} of {recipe.train.batch} × {recipe.phases[0][0]} tokens", file=sys.stderr)
    if budget.steps and len(stores) > 1:
        weights = recipe.data.weights
        samples = budget.steps * recipe.train.batch
        for i, (weight, epochs) in enumerate(zip(weights, _epochs(weights, feeds[0], stores, samples), strict=True)):
            print(f"  source {i + 1}: weight {weight / sum(weights):.2f}, {epochs:.2f} epochs", file=sys.stderr)


def _epochs(weights: Sequence[float], feed: Feed, stores: list[Stores], samples: int) -> list[float]:
    """How often each source is gone through (the last column of GPT-3's table 2.2)."""
    used = samples * feed.length
    return [used * w / sum(weights) / max(1, len(s.train.tokens)) for w, s in zip(weights, stores, strict=True)]
