"""Language modelling: last words, likelihoods of texts and pairs, translations, summaries."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from malmoi.evaluation.task import Example, Task
from malmoi.text.lines import refuse_bad_lines, whole_text
from malmoi.text.open_file import uncompressed_name
from malmoi.text.rows import BadRow, DataRow, any_rows, has_rows, text_lines

TITLE = re.compile(r"= [^=].*[^=] =")  # title of a WikiText article; section titles have more signs


def line_rows(path: Path) -> Iterator[DataRow]:
    """Every line of a text file that is not blank."""
    for number, line in text_lines(path):
        if line.strip():
            yield DataRow({"text": line.strip()}, f"{path}:{number}")


def lambada_rows(path: Path) -> Iterator[DataRow]:
    """Reads JSON lines, or the authors' format: one passage per line."""
    table = has_rows(path) and uncompressed_name(path).suffix != ".txt"
    return iter(any_rows(path)) if table else line_rows(path)


def lambada(row: DataRow) -> Example:
    """A passage without its last word; the label is that word (Paperno et al. 2016)."""
    if "context" in row.values:
        return Example(row.text("context").rstrip(), label=row.text("continuation").strip())
    before, _, last = row.text("text").rstrip().rpartition(" ")
    if not before:
        raise BadRow(row.place, "a passage needs two words at least")
    return Example(before.rstrip(), label=last)


# ------------------------------------------------------------------ likelihood


def articles(path: Path) -> Iterator[DataRow]:
    """Yields WikiText's articles, tokenized as in the file: perplexity is per word."""
    lines: list[str] = []
    begun = 1
    for number, line in text_lines(path):
        if TITLE.fullmatch(line.strip()) and any(one.strip() for one in lines):
            yield DataRow({"text": "\n".join(lines) + "\n"}, f"{path}:{begun}")
            lines = []
            begun = number
        lines.append(line)
    if lines:
        yield DataRow({"text": "\n".join(lines) + "\n"}, f"{path}:{begun}")


def whole_file(path: Path) -> Iterator[DataRow]:
    """Yields a file as one text."""
    text = whole_text(path, refuse_bad_lines(path))
    ends = text.endswith("\n") or not text
    yield DataRow({"text": text if ends else f"{text}\n"}, f"{path}:1")


def detokenized(clean: Callable[[str], str]) -> Callable[[DataRow], Example]:
    """Makes examples of the detokenized text, with the original as `pair` for its word count."""
    return lambda row: Example(clean(row.text("text")), row.text("text"))


# GPT-2 §3.1 reverses the data sets' tokenization by rules it does not publish. WikiText's here are
# exactly those of lm-evaluation-harness, so that results are comparable.
WIKITEXT_RULES = (
    (r"s '", r"s'"),
    *((rf" @\{sign}@ ", sign) for sign in "-,."),
    *((rf" \{sign} ", f"{sign} ") for sign in ":;.!?,"),
    (r"\(\s*([^\)]*?)\s*\)", r"(\1)"),
    (r"\[\s*([^\]]*?)\s*\]", r"[\1]"),
    (r"{\s*([^}]*?)\s*}", r"{\1}"),
    (r"\"\s*([^\"]*?)\s*\"", r'"\1"'),
    (r"'\s*([^']*?)\s*'", r"'\1'"),
    (r"= = = =", "===="),
    (r"= = =", "==="),
    (r"= =", "=="),
    (r" ° ", "°"),
    (r" \n", "\n"),
    (r"\n ", "\n"),
    (r" N ", " 1 "),
    (r" 's", "'s"),
)
# PTB writes numbers and the percent sign as N: "to N N from N N" was "to 8.45 % from 8.47 %". All
# rules are invertible, as in GPT-2 §3.1.
PTB_RULES = (
    (r"(?m)^ | $", ""),
    (r" n't(?!\S)", "n't"),
    (r" '(?!\d)", "'"),
    (r"(?<!\S)can not(?!\S)", "cannot"),
    (r"(?<!\S)(?<!\$ )N N(?!\S| N(?!\S))", "1%"),
    (r"(?<!\S)N(?!\S)", "1"),
    (r"([$#]) (?=[\d<])", r"\1"),
    (r"\\([*/])", r"\1"),
)


def rewritten(rules: tuple[tuple[str, str], ...], text: str) -> str:
    """Reverses tokenization as far as rules can."""
    for found, put in rules:
        text = re.sub(found, put, text)
    return text


# ------------------------------------------------------------------ generation


def text_pair(sources: tuple[str, ...], targets: tuple[str, ...], row: DataRow) -> Example:
    """A text and its reference output, from the first of these columns that exist."""
    text = row.text(next((name for name in sources if name in row.values), sources[0]))
    right = row.label(*targets)
    return Example(text.strip(), label=None if right is None else (right,))


LAMBADA = Task("lambada", "cloze", lambada_rows, lambada, about="the last word of a passage")
WIKITEXT = Task(
    "wikitext",
    "text",
    articles,
    detokenized(partial(rewritten, WIKITEXT_RULES)),
    about="how likely is Wikipedia, word by word?",
)
PTB = Task(
    "ptb",
    "text",
    whole_file,
    detokenized(partial(rewritten, PTB_RULES)),
    about="how likely is the Wall Street Journal of 1989?",
)
PLAIN_TEXT = Task(
    "plain-text", "text", whole_file, detokenized(str), "how likely is any text, word by word?"
)
TRANSLATION = Task(
    "translation",
    "writing",
    any_rows,
    partial(text_pair, ("source", "text"), ("target", "label")),
    about="translate a sentence into another language",
    metrics=("bleu",),
    prompt="{text} =",  # GPT-2 §3.7
    separator="\n",
    max_answer_tokens=64,
)
SUMMARY = Task(
    "summary",
    "writing",
    any_rows,
    partial(text_pair, ("article", "document", "text"), ("highlights", "summary", "label")),
    about="summarize a text in a few sentences",
    metrics=("rouge_l",),
    prompt="{text}\nTL;DR:",  # GPT-2 §3.6
    max_answer_tokens=100,
)


# ------------------------------------------------------------------ minimal pairs


def blimp(row: DataRow) -> Example:
    """A row of BLiMP (Warstadt et al. 2020), with the authors' column names or shorter ones."""
    published = "sentence_good" in row.values
    good = row.text("sentence_good" if published else "good")
    bad = row.text("sentence_bad" if published else "bad")
    group = row.text("linguistics_term" if published else "phenomenon")
    return Example(good, label=0, choices=(good, bad), group=group)


def kontrast(row: DataRow) -> Example:
    """Sentences A and B, and which of them speakers accept."""
    right = row.label("gold_label")
    if right not in ("A", "B"):
        raise BadRow(row.place, "gold_label is A or B, not {right!r}", right=right)
    choices = (row.text("sentence_A"), row.text("sentence_B"))
    label = "AB".index(right)
    return Example(choices[label], label=label, choices=choices)


BLIMP = Task(
    "blimp",
    "pairs",
    any_rows,
    blimp,
    about="which of two sentences is English? 67 paradigms of grammar",
)
KONTRAST = Task(
    "kontrast", "pairs", any_rows, kontrast, "which of two sentences is natural Korean?"
)
TASKS = (LAMBADA, WIKITEXT, PTB, PLAIN_TEXT, TRANSLATION, SUMMARY, BLIMP, KONTRAST)
