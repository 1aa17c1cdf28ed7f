"""The demo's report.html: what was trained, how it learnt, what it says, what to try next."""

import html
from collections.abc import Iterator
from typing import Any

from malmoi.demo.pictures import attention_grid, bars, chips, heat_map, sharpest
from malmoi.demo.story import ATTENTION_SENTENCE, ERAS, GENERATION_PROMPTS, Story
from malmoi.finetuning.report import confusion_table
from malmoi.metrics import confusion
from malmoi.report.chart import chart
from malmoi.report.console import format_duration
from malmoi.report.page import html_page
from malmoi.system.files import write_text
from malmoi.training.log import read_metrics

DEMO_STYLE = """<style>
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:.8rem;margin:1.4rem 0 .5rem}
.cards div{border:1px solid var(--line);border-radius:12px;padding:.8rem 1rem}
.cards b{display:block;font-size:1.6rem;font-weight:600;font-variant-numeric:tabular-nums;line-height:1.25}
.cards span,.note{color:var(--soft);font-size:.9rem}
section{margin-top:2.8rem}section>h2{margin-bottom:.3rem}
h3{font-size:1rem;font-weight:600;margin:1.5rem 0 .3rem}
.chips{line-height:2.1;margin:.4rem 0}.chips span{border:1px solid var(--line);border-radius:6px;padding:.12rem .4rem;
margin-right:.3rem;font:13px ui-monospace,monospace;white-space:pre}
blockquote{margin:.9rem 0;padding:.1rem 0 .1rem 1rem;border-left:3px solid var(--line)}blockquote b{color:var(--a)}
.bars{margin:.6rem 0 1.2rem}.bars .row{display:grid;grid-template-columns:minmax(8rem,17rem) 1fr 4rem;gap:.8rem;
align-items:center;padding:.16rem 0}.bars b{font-weight:500;font-variant-numeric:tabular-nums;text-align:right}
.bar{height:.7rem;border-radius:6px;background:color-mix(in srgb,var(--ink) 7%,transparent);overflow:hidden}
.bar i{display:block;height:100%;border-radius:6px;background:color-mix(in srgb,var(--soft) 60%,transparent)}
.bar.best i{background:var(--a)}
.heads{display:flex;gap:.7rem;align-items:center;margin:.5rem 0}.heads span{width:4rem;color:var(--soft);
font-size:.9rem}.heads figure{margin:0;flex:1;max-width:96px}
.tag{display:inline-block;border-radius:6px;padding:.05rem .5rem;font-size:.85rem;
background:color-mix(in srgb,var(--a) 14%,transparent)}
.tag.wrong{background:color-mix(in srgb,var(--b) 18%,transparent)}
</style>"""  # noqa: E501
SHOWN_EXAMPLES = 6


def write_demo_page(story: Story) -> None:
    body = DEMO_STYLE + "".join(
        part(story) for part in (_cards, _text, _gpt, _bert, _era, _attention, _next)
    )
    took = (
        f"Trained here, from nothing, in {format_duration(story.seconds['all'])} minutes: a "
        f"GPT, a BERT and a classifier."
    )
    write_text(
        story.out / "report.html",
        html_page("Two language models from 12 MB of speeches", took, body),
    )


def _section(title: str, *parts: str) -> str:
    return f"<section><h2>{html.escape(title)}</h2>{''.join(parts)}</section>"


def _note(text: str) -> str:
    return f'<p class="note">{html.escape(text)}</p>'


def _last(story: Story, name: str) -> dict[str, Any]:
    """The last validation of a pre-training run."""
    rows = [row for row in read_metrics(story.out / name / "metrics.jsonl") if "valid_loss" in row]
    return rows[-1] if rows else {}


def _cards(story: Story) -> str:
    gpt = _last(story, "gpt")
    bert = _last(story, "bert")
    era = list(story.scores.values())
    cards = [
        (f"{gpt.get('perplexity', float('nan')):.0f}", "the GPT's perplexity on unseen speeches"),
        (
            f"{bert.get('mlm_accuracy', float('nan')):.0%}",
            "of masked tokens the BERT guesses exactly",
        ),
        (f"{era[-1]:.0%}", "of unseen paragraphs put into the right era"),
        (
            f"{100 * (era[-1] - era[1]):+.0f}".replace("-", "−"),
            "points over the same network without pre-training",
        ),
    ]
    return f'<div class="cards">{"".join(f"<div><b>{n}</b><span>{w}</span></div>" for n, w in cards)}</div>'  # noqa: E501


def _text(story: Story) -> str:
    f = story.facts
    words = (
        f"{f['messages']} State of the Union messages from 1790 on, {f['characters'] / 1e6:.1f} "
        "million characters. "
        f"{f['held out']} of them were held out: nothing below was learnt from those. "
        "Each model has its own vocabulary, learnt from the text; this is how they cut a sentence."
    )
    cuts = "".join(
        f"<h3>{html.escape(_KINDS[kind])}</h3>{chips(tokens)}" for kind, tokens in story.cut.items()
    )
    return _section("The text, and two ways to cut it", _note(words), cuts)


_KINDS = {"byte-bpe": "byte-level BPE, as GPT-2 has it", "wordpiece": "WordPiece, as BERT has it"}


def _curve(story: Story, name: str, losses: dict[str, str]) -> str:
    rows = read_metrics(story.out / name / "metrics.jsonl")
    series = {
        label: [(r["seconds"], r[key]) for r in rows if key in r and "lr" in r]
        for key, label in losses.items()
    }
    return chart(
        {label: line for label, line in series.items() if len(line) > 1},
        "seconds",
        "loss",
        size=(820, 240),
    )


def _gpt(story: Story) -> str:
    last = _last(story, "gpt")
    words = (
        "It learnt one thing, to say which token comes next. "
        f"On speeches it never saw it hesitates between {last.get('perplexity', 0):.0f} tokens on "
        "average, where an "
        f"untrained one hesitates between {story.plan.vocab:,}. Asked whether the beginning of an "
        "unseen paragraph or "
        f"the same words shuffled is the likelier text, it is right {story.facts['order']:.0%} of "
        "the time."
    )
    said = "".join(
        f"<blockquote><b>{html.escape(prompt)}</b>{html.escape(text)}</blockquote>"
        for prompt, text in story.samples
    )
    return _section(
        "The GPT: what comes next?", _note(words), _curve(story, "gpt", {"loss": "training"}), said
    )


def _bert(story: Story) -> str:
    last = _last(story, "bert")
    words = (
        "It sees both sides of a gap. A quarter of the tokens were hidden, and it learnt to fill "
        "them "
        f"(right: {last.get('mlm_accuracy', 0):.0%}), and to tell whether the second of two "
        "passages follows the first "
        f"(right: {last.get('nsp_accuracy', 0):.0%}, by chance 50%)."
    )
    curve = _curve(story, "bert", {"mlm": "masked tokens", "nsp": "next sentence"})
    fills = "".join(f"<h3>{html.escape(text)}</h3>{_likely(found)}" for text, found in story.fills)
    return _section("The BERT: what is missing?", _note(words), curve, fills)


def _likely(found: list[tuple[str, float]]) -> str:
    """Candidates for a gap; the bars compare them with one another, the numbers say how sure it
    is.
    """
    return bars(found, whole=max(2 * found[0][1], 1e-9) if found[0][1] < 0.5 else 1.0)


def _era(story: Story) -> str:
    words = (
        f"A new layer on the BERT, and {story.plan.labelled:,} paragraphs that say when they were "
        "spoken. "
        f"Judged on {len(story.said):,} paragraphs of the held-out messages. The second row is the "
        "same network with "
        "the same training, but drawn at random instead of pre-trained."
    )
    words += f" {story.facts['verdict']}"
    names = [name for _, name in ERAS]
    gold = [row["label"] for row in story.said]
    said = [row["prediction"] for row in story.said]
    matrix = confusion_table(names, confusion(gold, said, names).tolist())
    return _section(
        "Fine-tuned: when was this said?",
        _note(words),
        bars(list(story.scores.items())),
        matrix,
        "".join(_examples(story)),
    )


def _examples(story: Story) -> Iterator[str]:
    yield "<h3>Some of them</h3>"
    for row in story.said[:SHOWN_EXAMPLES]:
        right = row["label"] == row["prediction"]
        mark = "" if right else f" (it was {html.escape(row['label'])})"
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
    words = (
        f"“{ATTENTION_SENTENCE}”: each row is a token, the strong squares are the tokens that it "
        "looks at. "
        f"Head {head + 1} of layer {layer + 1} is the most decided one; below are all of them."
    )
    large = heat_map(story.attention[layer][head], story.tokens)
    return _section(
        "Inside: what the BERT looks at", _note(words), large, attention_grid(story.attention)
    )


def _next(story: Story) -> str:
    out = html.escape(str(story.out))
    commands = (
        f'malmoi generate --model {out}/gpt --temperature 0.8 "{GENERATION_PROMPTS[0]}"\n'
        f'malmoi fill --model {out}/bert "The [MASK] of the people."\n'
        f'malmoi predict --model {out}/era "We will put a man on the moon."\n'
        f"malmoi serve --model {out}/gpt --model {out}/bert --model {out}/era --runs {out} --open\n"
        "malmoi pretrain bert-mini --data my_texts/ --out runs/mine --minutes 30\n"
        "malmoi finetune classification --model runs/mine --data rows.csv --text review --label "
        "stars --out runs/stars"
    )
    words = (
        "All of this lies in one folder. The first four use it; the fourth opens a page that shows "
        "both models at "
        "work, and these very curves. The last two start from your own text."
    )
    return _section("What to try next", _note(words), f"<pre>{commands}</pre>")
