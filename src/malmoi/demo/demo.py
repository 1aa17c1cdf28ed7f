"""The demo: tokenizers, a GPT, a BERT, a classifier and a report, in minutes on two cores.

One document in six is held out from all training.
"""

import json
import math
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from malmoi.demo.texts import SPEECHES, TASK, DemoConfig, DemoText
from malmoi.evaluation.kinds import custom_task
from malmoi.finetuning.finetune import FinetuneResult, run_finetuning
from malmoi.inference import Model, load
from malmoi.inference.embed import Float32Array
from malmoi.messages import logger, msg, translate
from malmoi.metrics.labels import confusion
from malmoi.pair import BERT
from malmoi.report.chart import page_chart
from malmoi.report.console import format_duration
from malmoi.report.page import machine_name, render
from malmoi.system.files import write_text
from malmoi.system.run_folder import read_metrics
from malmoi.system.threads import LoadMeter
from malmoi.text.documents import read_documents
from malmoi.tokenizer import Tokenizer, train_tokenizer
from malmoi.training.pretrain import discard_run, run_pretraining
from malmoi.training.recipe import read_recipe
from malmoi.training.sizing import vocabulary_size


@dataclass
class Story:
    """Everything the page shows."""

    plan: DemoConfig
    out: Path
    text: DemoText = SPEECHES
    seconds: dict[str, float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    cut: dict[str, list[str]] = field(default_factory=dict)  # a sentence by each vocabulary
    frequencies: dict[str, list[float]] = field(default_factory=dict)  # shares, by vocabulary
    samples: list[tuple[str, str]] = field(default_factory=list)
    fills: list[tuple[str, list[tuple[str, float]]]] = field(default_factory=list)
    scores: dict[str, float] = field(default_factory=dict)  # accuracy of the task, by model
    runs: dict[str, list[float]] = field(default_factory=dict)  # the same of each seed
    said: list[dict[str, Any]] = field(default_factory=list)
    focused: tuple[int, int] = (0, 0)  # layer and head of the first picture
    pictures: list[str] = field(default_factory=list)  # of attention: one head, all heads

    @property
    def accuracies(self) -> tuple[float, float]:
        """Without and with pre-training, on average over the seeds."""
        raw, tuned = map(fmean, self.runs.values())
        return raw, tuned

    @property
    def gain(self) -> str:
        """Points that pre-training added."""
        raw, tuned = self.accuracies
        return f"{100 * (tuned - raw):+.0f}".replace("-", "−")


def write_demo_page(story: Story) -> None:
    gold = [row["label"] for row in story.said]
    guesses = [row["prediction"] for row in story.said]
    shares = story.frequencies["byte-bpe"]
    page = render(
        "demo/page.jinja",
        story=story,
        title=story.text.title,
        took=format_duration(story.seconds["all"]),
        gpt=_run(story, "gpt", "training"),
        bert=_run(story, "bert", "masked tokens"),
        # of a model that knows only how frequent tokens are
        frequency_perplexity=math.exp(-sum(share * math.log(share) for share in shares)),
        scores=[(_name(story, name), score) for name, score in story.scores.items()],
        task=TASK,
        confusion=confusion(gold, guesses, story.text.labels).tolist(),
        date=f"{datetime.now():%Y-%m-%d %H:%M}",
        machine=machine_name(),
    )
    write_text(story.out / "report.html", page)


def _run(story: Story, name: str, loss: str) -> dict[str, Any]:
    """The recipe of a pre-training run, its last validation, and its loss by seconds."""
    rows = read_metrics(story.out / name / "metrics.jsonl")
    line = [(row["seconds"], row["loss"]) for row in rows if "loss" in row and "lr" in row]
    return {
        "recipe": read_recipe(story.out / name / "recipe.json"),
        "last": [row for row in rows if "valid_loss" in row][-1],
        "curve": page_chart({translate(loss): line}, translate("seconds"), translate("loss"), 240),
    }


def _name(story: Story, name: str) -> str:
    """A row's name, with the range of its seeds."""
    runs = story.runs.get(name)
    return translate(name) + (f" ({min(runs):.0%}–{max(runs):.0%})" if runs else "")


HELD_OUT_DOCUMENTS = 6  # one document in this many


def run_demo(
    out: str | Path | None = None,
    plan: DemoConfig | None = None,
    text: DemoText | None = None,
    *,
    overwrite: bool = False,
) -> Story:
    """Runs the demo in a folder, logs each step in plain sentences, and writes report.html.

    Models of an earlier demo are resumed, or with `overwrite` trained again.
    """
    text = text or SPEECHES
    story = Story(plan or DemoConfig(), Path(out or text.out), text)
    began = time.monotonic()
    meter = LoadMeter()
    story.out.mkdir(parents=True, exist_ok=True)
    if overwrite:
        discard_run(story.out / "gpt")
        discard_run(story.out / "bert")
    for part in (_text, _vocabularies, _gpt, _bert, _task, _look):
        start = time.monotonic()
        part(story)
        story.facts["others"] = meter.overall
        story.seconds[part.__name__.strip("_")] = time.monotonic() - start
    story.seconds["all"] = time.monotonic() - began
    write_demo_page(story)
    return story


def _say(sentence: str, /, **values: object) -> None:
    logger.info("\n● " + msg(sentence, **values))


# ------------------------------------------------------------------ text


def _text(story: Story) -> None:
    """Writes the training documents, and labelled passages of training and held-out documents."""
    folder = story.out / "text"
    folder.mkdir(exist_ok=True)
    found = story.text.documents()
    characters = sum(len(document.text) for document in found)
    about = msg(story.text.about)
    _say("Reading {characters:,} characters. {text}", characters=characters, text=about)
    parts: dict[str, list[tuple[str, str]]] = {"train": [], "dev": []}
    files: dict[str, list[str]] = {}
    for i, document in enumerate(found):
        held = i % HELD_OUT_DOCUMENTS == HELD_OUT_DOCUMENTS - 1
        parts["dev" if held else "train"].extend(document.rows)
        if not held:
            files.setdefault(document.file, []).append(document.text)
    for name, texts in files.items():
        size = story.text.joined
        joined = ("\n".join(texts[i : i + size]) for i in range(0, len(texts), size))
        (folder / name).write_text("\n\n".join(joined), "utf-8")
    chance = random.Random(story.plan.seed)
    for part, limit in (("train", story.plan.labelled), ("dev", story.plan.judged)):
        rows = chance.sample(parts[part], min(limit, len(parts[part])))
        lines = "".join(f"{text}\t{label}\n" for text, label in rows)
        write_text(_rows_file(story, part), f"text\t{TASK}\n{lines}")
    story.facts |= {
        "characters": characters,
        "bytes": sum(len(document.text.encode()) for document in found),
        "documents": len(found),
        "held out": len(found) // HELD_OUT_DOCUMENTS,
    }


def _rows_file(story: Story, part: str) -> Path:
    return story.out / f"{TASK}.{part}.tsv"


# ------------------------------------------------------------------ vocabularies and pre-training


def _vocabularies(story: Story) -> None:
    """Trains GPT's byte-level BPE and BERT's WordPiece on the text."""
    texts = [d.text for d in read_documents(story.out / "text", documents=story.text.rule)]
    size = vocabulary_size(story.facts["bytes"], texts)
    _say(
        "Training two tokenizers of {size:,} tokens: byte-level BPE for the GPT, WordPiece for "
        "the BERT.",
        size=size,
    )
    for kind in ("byte-bpe", "wordpiece"):
        words = train_tokenizer(texts, kind=kind, vocab=size)
        words.save(story.out / "tokenizers" / kind)
        story.frequencies[kind] = token_shares(words, texts)
        story.cut[kind] = _tokens(words, story.text.attended)
        logger.info(f"  {kind}: {' '.join(story.cut[kind])}")


def token_shares(words: Tokenizer, texts: list[str]) -> list[float]:
    """How frequent each token of the texts is, the most frequent one first."""
    counts = Counter(token for ids in words.ids(texts) for token in ids)
    return [number / counts.total() for _, number in counts.most_common()]


def _tokens(words: Tokenizer, text: str) -> list[str]:
    """The tokens of a text in readable form: bytes as the characters they are part of."""
    encoding = words.encode(text, specials=False)
    if words.kind != "byte-bpe":
        return [words.token(token) for token in encoding.tokens]
    return [text[start:end].replace(" ", "▁") for start, end in encoding.offsets]


def _pretrain(story: Story, name: str, kind: str, seconds: float) -> Model:
    """As `malmoi pretrain gpt|bert` does it: its rule chooses the size."""
    settings: dict[str, Any] = {**story.text.settings.get(name, {}), **story.plan.settings}
    return run_pretraining(
        name,
        data=str(story.out / "text"),
        out=story.out / name,
        tokenizer=story.out / "tokenizers" / kind,
        minutes=seconds / 60,
        seed=story.plan.seed,
        documents=story.text.rule,
        stretch=story.plan.stretch,
        **settings,
    )


def _gpt(story: Story) -> None:
    _say(
        "Pre-training a GPT for {seconds:.0f} seconds: it learns to predict the next token.",
        seconds=story.plan.gpt_seconds,
    )
    model = _pretrain(story, "gpt", "byte-bpe", story.plan.gpt_seconds)
    prompts = list(story.text.prompts)
    texts = model.generate(
        prompts,
        max_new_tokens=60,
        temperature=0.7,
        top_p=0.9,
        repetition_penalty=story.text.repetition_penalty,
        seed=1 + story.plan.seed,
    )
    story.samples = list(zip(prompts, texts, strict=True))
    for prompt, text in story.samples:
        logger.info(f"  {prompt}{text}")


def _bert(story: Story) -> None:
    _say(
        "Pre-training a BERT for {seconds:.0f} seconds: it learns to fill in masked words.",
        seconds=story.plan.bert_seconds,
    )
    model = _pretrain(story, "bert", "wordpiece", story.plan.bert_seconds)
    for text in story.text.masked:
        found = [(fill.token, fill.probability) for fill in model.fill(text, top=5)]
        story.fills.append((text, found))
        logger.info(f"  {text}  →  {', '.join(token for token, _ in found)}")


# ------------------------------------------------------------------ fine-tuning and attention


def _task(story: Story) -> None:
    """Fine-tunes the BERT to classify passages, with and without its pre-training."""
    _, *rows = _rows_file(story, "dev").read_text("utf-8").splitlines()
    judged = [row.split("\t")[1] for row in rows]
    most, number = Counter(judged).most_common(1)[0]
    _say("Fine-tuning the BERT. The task: tell a sentence from its words in random order.")
    tuned = _tune(story, TASK)
    _say("The same network again, without pre-training, for comparison.")
    raw = _tune(story, f"{TASK}-untrained", from_scratch=True)
    _say("And malmoi-bert, which comes with Malmoi: minutes on a GPU, more text, this one too.")
    shipped = _tune(story, f"{TASK}-{BERT}", BERT, seeds=1)
    report = json.loads((story.out / TASK / "report.json").read_text("utf-8"))
    story.runs = {
        "the same BERT without pre-training": _accuracies(raw),
        "the pre-trained BERT, fine-tuned": _accuracies(tuned),
    }
    story.scores = {
        msg("always “{most}”", most=most): number / len(judged),
        "counting words (naive Bayes)": report["word_baseline"],
        **{name: fmean(runs) for name, runs in story.runs.items()},
        "malmoi-bert, which comes with Malmoi, fine-tuned": fmean(_accuracies(shipped)),
    }
    story.facts["judged"] = len(judged)
    story.facts["verdict"] = verdict(story)
    _say(story.facts["verdict"])
    said = (story.out / TASK / "predictions.jsonl").read_text("utf-8").split("\n")[:-1]
    story.said = [json.loads(row) for row in said]


def verdict(story: Story) -> str:
    """States the gain from pre-training, clear or not, and what took the time."""
    raw, tuned = story.runs.values()
    if min(tuned) > max(raw) and fmean(tuned) >= story.scores["counting words (naive Bayes)"]:
        return msg("Pre-training added {points} points.", points=story.gain)
    tokens = read_metrics(story.out / "bert" / "metrics.jsonl")[-1]["tokens"]
    return msg(
        "Pre-training made no clear difference here ({points} points): in {seconds:.0f} "
        "seconds the BERT read {seen:.1f} million tokens, while other programs used {others:.0%} "
        "of this machine.",
        points=story.gain,
        seconds=story.seconds["bert"],
        seen=tokens / 1e6,
        others=story.facts["others"],
    )


def _accuracies(result: FinetuneResult) -> list[float]:
    return [run["accuracy"] for run in result.runs]


def _tune(story: Story, name: str, model: str = "", **how: Any) -> FinetuneResult:
    task = custom_task("classification", text="text", label=TASK)
    data, dev = (_rows_file(story, part) for part in ("train", "dev"))
    how = {
        "seeds": story.plan.seeds,
        "seed": story.plan.seed,
        "overwrite": True,
        **how,
        "batch": 16,
        "steps": story.plan.updates,
        **({} if model else {"lr": 1e-3}),
    }
    return run_finetuning(model or story.out / "bert", task, data, story.out / name, dev, **how)


def _look(story: Story) -> None:
    """Draws the BERT's attention on one sentence: its most focused head, then all of them."""
    model = load(story.out / "bert", device="cpu")
    text = story.text.attended
    story.focused = layer, head = sharpest(model.attention(text))
    focused = model.show("attention", text, layer=layer, head=head)
    story.pictures = [focused.svg, model.show("attention", text).svg]


def sharpest(attention: Float32Array) -> tuple[int, int]:
    """The (layer, head), from 0, with the most peaked attention over the most varied targets."""
    decided = attention.max(-1).mean(-1)
    varied = [[len(set(head.tolist())) for head in layer] for layer in attention.argmax(-1)]
    layer, head = np.unravel_index((decided * varied).argmax(), decided.shape)
    return int(layer), int(head)
