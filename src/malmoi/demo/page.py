"""The demo's report.html: what was trained, its curves, its output, and what to try next."""

import html
import math
from collections.abc import Iterator, Sequence
from datetime import datetime
from statistics import fmean
from typing import Any

from malmoi.demo.story import Story
from malmoi.messages import msg, translate
from malmoi.report.chart import ChartPoints, Line, page_chart
from malmoi.report.console import format_duration
from malmoi.report.page import bars, html_page, html_table, machine_name, page_note, section, words
from malmoi.report.task_page import confusion_table
from malmoi.system.files import write_text
from malmoi.system.run_folder import read_metrics
from malmoi.training.recipe import Recipe, read_recipe

Matrix = Sequence[Sequence[float]]  # [queries][keys]
DEMO_STYLE = """<style>
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:.8rem;margin:1.4rem 0 .5rem}
.cards div{border:1px solid var(--line);border-radius:12px;padding:.8rem 1rem}
.cards b{display:block;font-size:1.6rem;font-weight:600;font-variant-numeric:tabular-nums;line-height:1.25}
.cards span{color:var(--soft);font-size:.9rem}
.chips{display:flex;flex-wrap:wrap;gap:.3rem;margin:.4rem 0}.chips span{border:1px solid var(--line);
border-radius:6px;padding:.12rem .4rem;font:13px ui-monospace,monospace;white-space:pre}
blockquote{margin:.9rem 0;padding:.1rem 0 .1rem 1rem;border-left:3px solid var(--line)}blockquote b{color:var(--a)}
.heads{display:flex;gap:.7rem;align-items:center;margin:.5rem 0}.heads span{width:4rem;color:var(--soft);
font-size:.9rem}.heads figure{margin:0;flex:1;max-width:96px}
.tag{display:inline-block;border-radius:6px;padding:.05rem .5rem;font-size:.85rem;
background:color-mix(in srgb,var(--a) 14%,transparent)}
.tag.wrong{background:color-mix(in srgb,var(--b) 18%,transparent)}
</style>"""  # noqa: E501
SHOWN_EXAMPLES = 6


def write_demo_page(story: Story) -> None:
    body = DEMO_STYLE + "".join(
        part(story) for part in (_cards, _text, _gpt, _bert, _task, _attention, _made, _next)
    )
    took = msg(
        "Trained on this machine, from scratch, in {all} minutes: a GPT, a BERT and a classifier.",
        all=format_duration(story.seconds["all"]),
    )
    write_text(story.out / "report.html", html_page(story.text.title, took, body))


def _last(story: Story, name: str) -> dict[str, Any]:
    """The last validation row of a pre-training run."""
    rows = [row for row in read_metrics(story.out / name / "metrics.jsonl") if "valid_loss" in row]
    return rows[-1] if rows else {}


def _cards(story: Story) -> str:
    gpt = _last(story, "gpt")
    bert = _last(story, "bert")
    raw, tuned = map(fmean, story.runs.values())
    cards = [
        (f"{gpt.get('perplexity', float('nan')):.0f}", "the GPT's perplexity on unseen text"),
        (
            f"{bert.get('mlm_accuracy', float('nan')):.0%}",
            "of masked tokens predicted exactly by the BERT",
        ),
        (f"{tuned:.0%}", "of unseen passages classified correctly"),
        (
            f"{100 * (tuned - raw):+.0f}".replace("-", "−"),
            "points over the same network without pre-training",
        ),
    ]
    shown = "".join(f"<div><b>{n}</b><span>{words(w)}</span></div>" for n, w in cards)
    return f'<div class="cards">{shown}</div>'


def _text(story: Story) -> str:
    f = story.facts
    paragraph = (
        story.text.about,
        msg(
            "{documents:,} documents, {characters:,} characters.",
            documents=f["documents"],
            characters=f["characters"],
        ),
        msg(
            "{held_out:,} of them were held out: no model below was trained on those.",
            held_out=f["held out"],
        ),
        "Each model has its own vocabulary, learnt from the text; this is how they tokenize a "
        "sentence.",
    )
    cuts = "".join(
        f"<h3>{words(_KINDS[kind])}</h3>{chips(tokens)}" for kind, tokens in story.cut.items()
    )
    return section("The text, and two ways to tokenize it", page_note(*paragraph), cuts)


_KINDS = {"byte-bpe": "byte-level BPE (GPT-2)", "wordpiece": "WordPiece (BERT)"}


def _curve(story: Story, name: str, losses: dict[str, str]) -> str:
    rows = read_metrics(story.out / name / "metrics.jsonl")
    series = {
        translate(label): [(r["seconds"], r[key]) for r in rows if key in r and "lr" in r]
        for key, label in losses.items()
    }
    lines: dict[str, ChartPoints | Line] = {
        label: line for label, line in series.items() if len(line) > 1
    }
    return page_chart(lines, translate("seconds"), translate("loss"), 240)


def _gpt(story: Story) -> str:
    last = _last(story, "gpt")
    sentences = (
        "It was trained to predict the next token.",
        msg(
            "On text it has never seen, its perplexity is {perplexity:.0f}; that of the "
            "tokens' frequencies is {perplexity2:.0f}, an untrained model's is {vocab:,}.",
            perplexity=last.get("perplexity", 0),
            perplexity2=_frequency_perplexity(story),
            vocab=_recipe(story, "gpt").tokenizer.vocab,
        ),
        msg(
            "Asked whether the beginning of an unseen passage or a shuffled copy is more "
            "likely, it is right {order:.0%} of the time.",
            order=story.facts["order"],
        ),
    )
    samples = "".join(
        f"<blockquote><b>{html.escape(prompt)}</b>{html.escape(text)}</blockquote>"
        for prompt, text in story.samples
    )
    return section(
        "The GPT: what comes next?",
        page_note(*sentences),
        _curve(story, "gpt", {"loss": "training"}),
        samples,
    )


def _frequency_perplexity(story: Story) -> float:
    """The perplexity of a model that knows only how frequent tokens are."""
    return math.exp(-sum(share * math.log(share) for share in story.frequencies["byte-bpe"]))


def _bert(story: Story) -> str:
    last = _last(story, "bert")
    sentences = (
        "It sees both sides of a masked token.",
        msg(
            "{mask_rate:.0%} of the tokens were masked, and it learnt to predict them "
            "(accuracy {accuracy:.0%}; the most frequent token is {wordpiece:.0%} of the "
            "text).",
            mask_rate=_recipe(story, "bert").data.mask_rate,
            accuracy=last.get("mlm_accuracy", 0),
            wordpiece=story.frequencies["wordpiece"][0],
        ),
    )
    curve = _curve(story, "bert", {"loss": "masked tokens"})
    fills = "".join(f"<h3>{html.escape(text)}</h3>{bars(found)}" for text, found in story.fills)
    return section("The BERT: what is missing?", page_note(*sentences), curve, fills)


def _task(story: Story) -> str:
    sentences = (
        story.text.task_about,
        msg(
            "A new layer on the BERT, and {labelled:,} labelled passages; evaluated on "
            "{said:,} passages of the held-out documents.",
            labelled=story.plan.labelled,
            said=len(story.said),
        ),
        "The second row is the same network, trained in the same way from random weights.",
        story.facts["verdict"],
    )
    names = story.text.labels
    gold = [row["label"] for row in story.said]
    predictions = [row["prediction"] for row in story.said]
    matrix = confusion_table(names, gold, predictions)
    return section(
        story.text.question,
        page_note(*sentences),
        bars([(_name(story, name), score) for name, score in story.scores.items()]),
        "".join(_surprise(story)),
        matrix,
        "".join(_examples(story)),
    )


def _name(story: Story, name: str) -> str:
    """A row's name, with the range of its seeds."""
    runs = story.runs.get(name)
    shown = f" ({min(runs):.0%}–{max(runs):.0%})" if runs else ""
    return translate(name) + shown


def _surprise(story: Story) -> Iterator[str]:
    if story.surprise is not None:
        shuffled, original = map(html.escape, story.surprise)
        yield f"<h3>{words('It noticed that these words are out of order')}</h3>"
        yield f"<blockquote>{shuffled}<br><span class='tag'>{original}</span></blockquote>"


def _examples(story: Story) -> Iterator[str]:
    yield f"<h3>{words('Some of them')}</h3>"
    for row in story.said[:SHOWN_EXAMPLES]:
        right = row["label"] == row["prediction"]
        mark = "" if right else f" ({words('label')}: {html.escape(row['label'])})"
        kind = "tag" if right else "tag wrong"
        text = html.escape(row["text"][:220] + ("…" if len(row["text"]) > 220 else ""))
        yield (
            f"<blockquote>{text}<br><span "
            f'class="{kind}">{html.escape(row["prediction"])}{mark}</span></blockquote>'
        )


def _attention(story: Story) -> str:
    if not story.attention:
        return ""
    layer, head = sharpest(story.attention)
    sentences = (
        msg(
            "“{attended}”: each row is a token; dark squares are the tokens it attends to.",
            attended=story.text.attended,
        ),
        msg(
            "Head {head} of layer {layer} is the most focused; below are all of them.",
            head=head + 1,
            layer=layer + 1,
        ),
    )
    large = heat_map(story.attention[layer][head], story.tokens)
    return section(
        "Inside: what the BERT attends to",
        page_note(*sentences),
        large,
        attention_grid(story.attention),
    )


def _next(story: Story) -> str:
    out = html.escape(str(story.out))
    text = story.text
    task = f"{out}/{text.task}"
    commands = (
        f'malmoi generate --model {out}/gpt --temperature 0.8 "{text.prompts[0]}"\n'
        f'malmoi fill --model {out}/bert "{text.masked[0]}"\n'
        f'malmoi predict --model {task} "{text.example}"\n'
        f"malmoi serve --model {out}/gpt --model {out}/bert --model {task} --runs {out} --open\n"
        "malmoi pretrain bert my_texts/ --minutes 30 -o runs/mine\n"
        "malmoi finetune rows.csv --model runs/mine"
    )
    about = "The first four use this folder; the last two start from your own text."
    return section("What to try next", page_note(about), f"<pre>{commands}</pre>")


def _recipe(story: Story, name: str) -> Recipe:
    return read_recipe(story.out / name / "recipe.json")


def _made(story: Story) -> str:
    """Provenance: model, data, date, settings and duration."""
    plan = story.plan
    recipes = {name: _recipe(story, name.lower()) for name in ("GPT", "BERT")}
    rows = [
        (translate("date"), f"{datetime.now():%Y-%m-%d %H:%M}"),
        (translate("machine"), machine_name()),
        (translate("text"), f"{story.text.source}, {story.facts['characters']:,}"),
        *(
            (
                name,
                f"{used.model.depth} × {used.model.width}, "
                f"batch {used.train.batch} × {used.model.context}, "
                f"{_last(story, name.lower()).get('step', 0):,} steps, "
                f"{60 * used.train.minutes:.0f} s",
            )
            for name, used in recipes.items()
        ),
        (translate("fine-tuning"), f"{plan.labelled:,} rows, {plan.updates} steps × {plan.seeds}"),
        (translate("time"), format_duration(story.seconds["all"])),
    ]
    return section("How this was made", html_table(("what", "value"), rows))


# ------------------------------------------------------------------ figures


def chips(tokens: Sequence[str]) -> str:
    """Renders tokens as small boxes."""
    return (
        f'<p class="chips">{"".join(f"<span>{html.escape(token)}</span>" for token in tokens)}</p>'
    )


def heat_map(weights: Matrix, tokens: Sequence[str] = (), cell: int = 26) -> str:
    """Renders one head's attention: rows are queries, columns are keys."""
    size = len(weights)
    left, top = (96, 84) if tokens else (0, 0)
    width = left + size * cell
    height = top + size * cell
    parts = [
        f'<rect x="{left + k * cell}" y="{top + q * cell}" width="{cell - 1}" height="{cell - 1}" '
        f'rx="{cell // 8}" '
        f'fill="var(--a)" fill-opacity="{max(0.04, min(1.0, weight)):.2f}"/>'
        for q, row in enumerate(weights)
        for k, weight in enumerate(row)
    ]
    for i, token in enumerate(tokens):
        middle = i * cell + cell / 2
        name = html.escape(token)
        parts.append(
            f'<text x="{left - 8}" y="{top + middle + 4:.0f}" text-anchor="end">{name}</text>'
        )
        at = f"{left + middle + 4:.0f},{top - 8}"
        parts.append(f'<text transform="translate({at}) rotate(-55)">{name}</text>')
    label = "attention of one head" + (f" over: {' '.join(tokens)}" if tokens else "")
    return (
        f'<svg viewBox="0 0 {width} {height}" style="max-width:{width}px" role="img" '
        f'aria-label="{html.escape(label)}">{"".join(parts)}</svg>'
    )


def attention_grid(layers: Sequence[Sequence[Matrix]]) -> str:
    """Renders every head of every layer in small: layers down, heads across."""
    rows = []
    for number, heads in enumerate(layers, start=1):
        layer = msg("layer {number}", number=number)
        cells = "".join(f"<figure>{heat_map(head, cell=6)}</figure>" for head in heads)
        rows.append(f'<div class="heads"><span>{words(layer)}</span>{cells}</div>')
    return "".join(rows)


def sharpest(layers: Sequence[Sequence[Matrix]]) -> tuple[int, int]:
    """The (layer, head), from 0, with the most peaked attention over the most varied targets."""

    def score(head: Matrix) -> float:
        decided = sum(max(row) for row in head) / len(head)
        targets = len({max(range(len(row)), key=row.__getitem__) for row in head})
        return decided * targets / len(head)

    places = [(i, j) for i, heads in enumerate(layers) for j in range(len(heads))]
    return max(places, key=lambda place: score(layers[place[0]][place[1]]))
