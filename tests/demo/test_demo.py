"""The demo with budgets of seconds: every part runs, and the page shows what they found."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

import malmoi
from conftest import environment
from malmoi.demo.demo import Story, run_demo, sharpest, verdict, write_demo_page
from malmoi.demo.texts import BUILT_IN, ORDERS, PIECES, SPEECHES, DemoConfig, plain_sentences
from malmoi.messages import language
from malmoi.text.documents import read_documents
from malmoi.text.sources import sotu_messages
from malmoi.training.recipe import read_recipe

TINY = DemoConfig(
    gpt_seconds=1,
    bert_seconds=1,
    settings={"model.width": 32, "model.depth": 2, "model.context": 64, "train.batch": 8},
    updates=2,
    seeds=1,
    labelled=64,
    judged=32,
)
pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")


@pytest.fixture(scope="module", autouse=True)
def few_messages() -> Iterator[None]:
    """Every thirtieth message, as if there were no others."""
    messages = list(sotu_messages())[::30]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("malmoi.demo.texts.sotu_messages", lambda: iter(messages))
        yield


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    return run_demo(tmp_path_factory.mktemp("demo"), TINY, SPEECHES)


def test_every_part_leaves_its_folder(story: Story) -> None:
    gpt, bert, order = (malmoi.load(story.out / name) for name in ("gpt", "bert", "order"))
    assert isinstance(gpt.generate("The", max_new_tokens=3, seed=0), str)
    assert bert.fill("The [MASK].", top=1)
    assert order.predict("we must act now").label in ORDERS["en"]
    assert (story.out / "order-untrained" / "report.html").is_file()


def test_the_story_is_whole(story: Story) -> None:
    assert len(story.scores) == 5
    assert [len(runs) for runs in story.runs.values()] == [1, 1]
    assert all(0 <= score <= 1 for score in story.scores.values())
    assert len(story.samples) == 4
    assert len(story.pictures) == 2
    rows = (story.out / "order.dev.tsv").read_text("utf-8").splitlines()[1:]
    held = [text for text, label in (row.split("\t") for row in rows) if label == "sentence"]
    learnt = {
        " ".join(words)
        for path in (story.out / "text").iterdir()
        for words in plain_sentences(path.read_text("utf-8"))
    }
    assert learnt
    assert not learnt.intersection(held)  # what is judged was never trained on


class Tags(HTMLParser):
    """Which tags are open at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br", "rect", "line", "polyline"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            while self.open.pop() != tag:
                pass


def test_the_page_needs_nothing_else(story: Story) -> None:
    page = (story.out / "report.html").read_text("utf-8")
    for heading in (
        "The GPT: what comes next?",
        "The BERT: what is missing?",
        "Fine-tuned",
        "Inside",
        "What to try next",
    ):
        assert heading in page
    assert page.count("<svg") > 2
    assert not re.search(r'(src|href)="?https?:', page)
    # where a number stands; a model of a second may write the word
    assert not re.search(r'(\bis |\bof |[">(,])nan\b', page.lower())
    tags = Tags()
    tags.feed(page)
    assert tags.open == []


def test_the_page_escapes_what_models_say(story: Story) -> None:
    before, story.samples = story.samples, [("<b>", "<script>alert(1)</script>")]
    write_demo_page(story)
    assert "<script>" not in (story.out / "report.html").read_text("utf-8")
    story.samples = before
    write_demo_page(story)


def test_the_models_are_what_pretrain_makes(story: Story) -> None:
    recipes = [read_recipe(story.out / name / "recipe.json") for name in ("gpt", "bert")]
    assert [recipe.objective for recipe in recipes] == ["lm", "mlm"]
    assert [recipe.name for recipe in recipes] == ["gpt", "bert"]
    # six minutes in all: the rest is reading, fine-tuning and looking
    assert DemoConfig().gpt_seconds + DemoConfig().bert_seconds < 260


def test_the_most_focused_head_is_drawn_large() -> None:
    attention = np.array([[[[0.5, 0.5], [0.5, 0.5]], [[1.0, 0.0], [0.0, 1.0]]]])
    assert sharpest(attention) == (0, 1)


def test_the_gain_of_pre_training_is_printed(story: Story) -> None:
    counting = {"counting words (naive Bayes)": 0.5}
    facts = {**story.facts, "others": 0.62}

    def told(raw: list[float], tuned: list[float]) -> str:
        runs = {"raw": raw, "tuned": tuned}
        return verdict(replace(story, runs=runs, scores=counting, facts=facts))

    assert told([0.5, 0.6], [0.7, 0.8]) == "Pre-training added +20 points."
    for runs in (([0.5, 0.6], [0.59, 0.9]), ([0.3, 0.35], [0.4, 0.45])):
        assert "no clear difference" in told(*runs)
        assert "million tokens, while other programs used 62% of this machine" in told(*runs)
    assert story.facts["verdict"] in (story.out / "report.html").read_text("utf-8")


def test_the_built_in_text_follows_the_language() -> None:
    assert BUILT_IN[language({"LANG": "ko_KR.UTF-8"})] is PIECES
    assert BUILT_IN[language({"MALMOI_LANG": "ko"})] is PIECES
    assert BUILT_IN[language({})] is SPEECHES


def test_the_korean_text_is_long_and_does_not_repeat_itself() -> None:
    documents = PIECES.documents()
    sentences = [
        sentence.strip('" ')
        for document in documents
        for sentence in re.split(r"(?<=[.?!])[\"”\s]+", document.text)
        if len(sentence) > 15
    ]
    assert sum(len(document.text.encode()) for document in documents) > 1_000_000
    assert len(set(sentences)) == len(sentences)
    words = {word for document in documents for word in re.findall("[가-힣]+", document.text)}
    assert len(words) > 30_000
    assert [d.text for d in read_documents("builtin:korean")] == [d.text for d in documents]


@pytest.mark.parametrize("name", BUILT_IN)
def test_only_the_order_of_the_words_tells_a_sentence_from_a_shuffled_one(name: str) -> None:
    documents = BUILT_IN[name].documents()
    shares = Counter(label for document in documents for _, label in document.rows)
    assert min(shares.values()) > 0.45 * shares.total()
    for document in documents[:200]:
        whole = " ".join(re.sub(r"[^\w\s]", "", document.text).lower().split())
        words = set(whole.split())
        for text, label in document.rows:
            assert set(text.split()) <= words
            assert label != ORDERS[name][0] or text in whole


@pytest.mark.heavy
def test_the_korean_demo_has_a_korean_page(tmp_path: Path) -> None:
    documents = PIECES.documents()[::8]
    with environment(MALMOI_LANG="ko"):
        found = run_demo(tmp_path, TINY, replace(PIECES, documents=lambda: documents))
    assert malmoi.load(tmp_path / "order").predict("국을 끓인다").label in ORDERS["ko"]
    page = (tmp_path / "report.html").read_text("utf-8")
    assert '<html lang="ko">' in page
    shown = " ".join(
        re.sub(r"<(style|pre|svg).*?</\1>|<[^>]*>", " ", page, flags=re.DOTALL).split()
    )
    for prompt, text in found.samples:
        shown = shown.replace(prompt + " " + " ".join(text.split()), "")
    assert not re.findall(r"[a-z]{4,} [a-z]{2,} [a-z]{2,}", shown)  # no English sentence is left
