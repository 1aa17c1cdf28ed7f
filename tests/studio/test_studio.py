"""The studio in a real browser: the numbers on the page are the model's, and anyone can use it."""

import json
import math
import os
import re
import shutil
import subprocess
from base64 import b64decode
from collections.abc import Iterator
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode
from xml.etree import ElementTree

import httpx
import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from live_server import TEXTS, Live, bert_with, gpt_folder
from malmoi.checkpoint import Checkpoint
from malmoi.inference import Model, MultiLabelPrediction, load
from malmoi.inference.generation.options import Sampling
from malmoi.inference.generation.sampling import apply_rules
from malmoi.inference.pseudo_likelihood import sentence_logprobs
from malmoi.interpret.forward_pass import attention, by_words, word_groups
from malmoi.model import Activations, Layout, Network, count_parameters, initialise, parse_pattern
from malmoi.model.families import transformer
from malmoi.studio import runs as curves
from malmoi.studio.attention_view import principal
from malmoi.studio.few_shot import few_shot_view
from malmoi.studio.routes import known_languages
from malmoi.studio.sentence_path import parameter_parts, sentence_path
from malmoi.studio.serve import PAGE as STUDIO
from malmoi.text.documents import read_documents
from malmoi.tokenizer import Tokenizer, train_tokenizer
from malmoi.training.data.encode import build_stores

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
in_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
expect = playwright.expect
expect.set_options(timeout=60_000)  # cores may be busy: slow is not wrong

VIEWS = (
    "home",
    "hour",
    "next",
    "generate",
    "fill",
    "chat",
    "finetuned",
    "attention",
    "patterns",
    "lens",
    "ablate",
    "probe",
    "replay",
    "trace",
    "translation",
    "tokens",
    "shots",
    "train",
    "embeddings",
    "beside",
)
# where the numbers do not matter
QUICK: dict[str, dict[str, Any]] = {
    "generate": {"length": 6},
    "patterns": {"at": 7},
    "shots": {"k": 1},
    "chat": {"message": "the state", "length": 16},
}
STARTED = {"generate": "#write", "chat": "#send", "probe": "#probe"}  # work that waits for a click
TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
SENTENCE = "어제 카페 갔었어 거기 사람 많더라"
CHECKS = (Path(__file__).parents[1] / "studio_checks.js").read_text("utf-8")
# npm install axe-core, in the project's folder or where AXE says
AXE = (
    Path(os.environ.get("AXE", Path(__file__).parents[2] / "node_modules")) / "axe-core/axe.min.js"
)
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    folder = tmp_path_factory.mktemp("studio")
    pieces = train_tokenizer([*TEXTS, SENTENCE], kind="wordpiece", vocab=160)
    return {
        "gpt": load(trained(gpt_folder(folder / "gpt", n_positions=256)), device="cpu"),
        "small": small_chat(folder / "small"),
        "bert": bert_with(pieces, mlm=0),
        "moods": bert_with(
            pieces, ("화남", "기쁨", "슬픔"), "multi_label_classification", classify=3
        ),
        "translator": translator(),
    }


def trained(folder: Path) -> Path:
    """A model's folder with the text that it could have been trained on."""
    (folder / "text.txt").write_text("\n\n".join([*TEXTS, SENTENCE]), "utf-8")
    words = Tokenizer.load(folder)
    reader = read_documents([str(folder / "text.txt")])
    build_stores(reader, words, folder / "data", end=words.specials.eos)
    return folder


def small_chat(folder: Path) -> Model:
    """A small GPT with a chat template."""
    file = gpt_folder(folder, n_embd=32, n_layer=2) / "tokenizer_config.json"
    settings = json.loads(file.read_text("utf-8"))
    file.write_text(json.dumps(settings | {"chat_template": TEMPLATE}), "utf-8")
    return load(trained(folder), device="cpu")


def translator() -> Model:
    words = train_tokenizer([*TEXTS, SENTENCE], kind="byte-bpe", vocab=280, special="pad")
    config = transformer(
        vocab=words.vocab_size, context=64, width=16, heads=2, depth=2, encoder_depth=1
    )
    network = initialise(Network(config, {"lm": 0}), seed=0).eval()
    return Model(Checkpoint(network, words))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for name, drop in (("one", 0.01), ("two", 0.02)):
        rows = [
            {"step": n, "tokens": 512 * n, "seconds": n / 2, "loss": 5 - drop * n, "lr": 1e-3}
            for n in range(1, 41)
        ]
        rows.append(
            {
                "step": 40,
                "tokens": 20480,
                "seconds": 20.0,
                "valid_loss": 4.5,
                "sample": f"{name} said this",
            }
        )
        (folder / name).mkdir()
        (folder / name / "metrics.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows), "utf-8"
        )
        objective = {"one": "lm", "two": "mlm + nsp"}[name]
        (folder / name / "recipe.json").write_text(json.dumps({"objective": objective}), "utf-8")
    judged = [{"step": 5 * n, "rows": "dev", "accuracy": 0.5 + n / 10} for n in (1, 2, 3)]
    (folder / "task").mkdir()
    (folder / "task" / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in [{"step": 1, "loss": 0.7}, *judged]), "utf-8"
    )
    return folder


@pytest.fixture(scope="module")
def live(models: dict[str, Model], runs: Path) -> Iterator[Live]:
    for step in (20, 40):
        models["small"].save(runs / "one" / "snapshots" / f"{step:06d}")
    with Live(models, slots=4, runs=runs) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        one = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield one
        one.close()


class Visitor:
    """A page of the studio, which must say nothing wrong on the console."""

    def __init__(self, browser: Any, url: str, **settings: Any) -> None:
        settings = {"locale": "en-GB", "viewport": {"width": 1200, "height": 900}, **settings}
        self.context = browser.new_context(**settings)
        self.page, self.url = self.context.new_page(), url
        self.page.set_default_timeout(60_000)
        self.problems: list[str] = []
        self.page.on("console", self.heard)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))

    def heard(self, said: Any) -> None:
        if said.type in ("error", "warning"):
            self.problems.append(said.text)

    def visit(self, view: str, **values: object) -> Any:
        """Opens a view by its address and waits until it has done its work."""
        self.page.goto("about:blank")
        self.page.goto(f"{self.url}/#/{view}?{urlencode(values, quote_via=quote)}")
        if view not in STARTED:
            self.done()
        return self.page

    def turn(self, view: str, **values: object) -> Any:
        """Turns to a view without loading the page anew, and waits until it has done its work."""
        address = f"#/{view}?{urlencode(values, quote_via=quote)}"
        # what the last view said must not be taken for this one's
        self.page.evaluate(
            "address => { if (location.hash !== address) { location.hash = address; "
            "document.getElementById('status').textContent = ''; } }",
            address,
        )
        here = self.page.locator(f"nav a[data-view={view}]")
        expect(here).to_have_attribute("aria-current", "page")
        if view in STARTED:
            self.page.click(STARTED[view])
        self.done()
        return self.page

    def done(self) -> None:
        expect(self.page.locator("#status")).to_have_text(re.compile(r"Done in|걸렸습니다"))

    def bars(self, within: str = "#view") -> list[tuple[str, str]]:
        rows = self.page.locator(f"{within} .bars li").all()
        return [(row.locator(".name").inner_text(), row.locator("b").inner_text()) for row in rows]


@pytest.fixture
def visitor(browser: Any, live: Live) -> Iterator[Visitor]:
    one = Visitor(browser, live.url)
    yield one
    one.context.close()
    assert one.problems == []


def percent(p: float) -> str:
    """A share as the page writes it."""
    return (
        "100%"
        if p >= 0.9995
        else f"{100 * p:.1f}%"
        if p >= 0.1
        else f"{100 * p:.2f}%"
        if p >= 1e-4
        else "<0.01%"
    )


def fixed(x: float) -> str:
    return f"{x:.3f}".replace("-", "−")


@torch.inference_mode()
def chances(model: Model, tokens: list[int]) -> torch.Tensor:
    """p over the vocabulary after each token [T, V]."""
    return model.network(torch.tensor([tokens]), heads=("lm",))["lm"][0].float().softmax(-1)


# ------------------------------------------------------------------ the views


@in_browser
def test_generated_tokens_have_the_models_probabilities_and_can_be_replaced(
    visitor: Visitor, models: dict[str, Model], live: Live
) -> None:
    page = visitor.visit("generate", text="나는 오늘", length=12, seed=3, compare="small")
    page.click("#write")
    expect(page.locator("section[aria-label=gpt] .token")).to_have_count(12)
    expect(page.locator("section[aria-label=small] .token")).to_have_count(12)
    visitor.done()
    model = models["gpt"]
    options = {"max_new_tokens": 12, "temperature": 0.8, "top_p": 0.95, "seed": 3}
    written = (
        live.engine("gpt").submit(live.engine("gpt").job("나는 오늘", **options)).result().tokens
    )
    before = model.tokenizer.encode("나는 오늘").tokens
    after = chances(model, [*before, *written])[len(before) - 1 : -1]
    shown = page.locator("section[aria-label=gpt] .token").evaluate_all(
        "nodes => nodes.map(n => +n.dataset.p)"
    )
    assert shown == pytest.approx(
        [float(row[token]) for row, token in zip(after, written, strict=True)], rel=1e-4
    )

    page.locator("section[aria-label=gpt] .token").nth(4).click()
    rows = visitor.bars("section[aria-label=gpt]")
    likeliest = after[4].topk(8)
    assert [value for _, value in rows][:8] == [percent(p) for p in likeliest.values.tolist()]
    page.locator("section[aria-label=gpt] .bars button").nth(1).click()
    expect(page.locator("section[aria-label=gpt] .bars")).to_have_count(0)
    expect(page.locator("section[aria-label=gpt] .token")).to_have_count(12)
    first = float(page.locator("section[aria-label=gpt] .token").first.get_attribute("data-p"))
    branch = [*before, *written[:4], int(likeliest.indices[1])]
    assert any(abs(first - float(p)) < 1e-4 * first for p in chances(model, branch)[-1])


@in_browser
def test_line_breaks_and_spaces_are_visible_and_a_full_context_is_reported(
    visitor: Visitor,
) -> None:
    page = visitor.visit("generate", text="1.", length=20)
    names = ["a", "\n", " ", "b\u200d"]
    choices = [
        {
            "text": name,
            "logprobs": {
                "tokens": [name],
                "token_logprobs": [-1.0],
                "top_logprobs": [{name: -1.0}],
            },
        }
        for name in names
    ]
    choices.append({"text": "", "finish_reason": "length"})
    body = "".join(f"data: {json.dumps({'choices': [one]})}\n\n" for one in choices)
    page.route("**/v1/completions", lambda route: route.fulfill(body=body + "data: [DONE]\n\n"))
    page.click("#write")
    visitor.done()
    shown = page.locator(".token")
    assert shown.all_inner_texts() == ["a", "↵", "␣", "b\u200d"]
    tops = [box["y"] for box in (one.bounding_box() for one in shown.all()) if box]
    assert tops[0] == tops[1] < tops[2]  # the line breaks where it was broken
    expect(page.locator("#view")).to_contain_text("4 tokens; the model's context of 256 tokens is")
    shown.nth(2).press("Enter")
    expect(page.locator("h3")).to_have_text("In place of “␣”")
    assert visitor.bars() == [("␣", "36.8%"), ("all others", "63.2%")]


@in_browser
def test_the_next_tokens_distribution_is_the_samplers_and_needs_no_server(
    visitor: Visitor, models: dict[str, Model]
) -> None:
    text = "the state of"
    page = visitor.visit("next", text=text, temperature=0.6, topk=5, topp=0.7)
    logits = torch.tensor(models["gpt"].logits(text)[-1])

    def expected(**settings: Any) -> list[str]:
        chances = apply_rules(Sampling(**settings), logits[None])[0].softmax(-1)
        best = chances[logits.argsort(descending=True, stable=True)]
        shares = [*best[:16].tolist(), float(best[16:].sum())]
        return [percent(p) if p else "0%" for p in shares]

    values = page.locator(".live b")
    assert values.all_inner_texts() == expected(temperature=0.6, top_k=5, top_p=0.7)
    assert page.locator(".live .cut").count() == sum(
        value == "0%" for value in values.all_inner_texts()[:16]
    )
    page.route("**/studio/**", lambda route: route.abort())  # the sliders ask nobody
    for name, value in (("Temperature", "1.5"), ("Top k", "0"), ("Top p", "1")):
        page.get_by_role("slider", name=name).fill(value)
    assert values.all_inner_texts() == expected(temperature=1.5)
    page.evaluate("Math.random = () => 0.9999999")
    page.locator("#die").click()
    expect(page.locator("#view")).to_contain_text("A token further down was drawn.")
    page.evaluate("Math.random = () => 0")
    page.locator("#die").click()
    expect(page.locator(".live li.fell")).to_have_count(1)
    page.unroute("**/studio/**")
    page.get_by_role("button", name="Write it").click()
    expect(page.locator("textarea")).not_to_have_value(text)
    visitor.done()


@in_browser
def test_every_label_has_the_models_probability(visitor: Visitor, models: dict[str, Model]) -> None:
    page = visitor.visit("finetuned", text=SENTENCE)
    said = models["moods"].predict(SENTENCE)
    assert isinstance(said, MultiLabelPrediction)
    ordered = sorted(said.scores.items(), key=lambda item: -item[1])
    assert visitor.bars("#view .card:has(h2:text-is('moods'))") == [
        (name, percent(share)) for name, share in ordered
    ]
    assert page.locator("#view h3").first.inner_text() == (", ".join(said.labels) or "No label")
    assert page.locator(".pair .card").first.locator(".right .name").count() == len(said.labels)


@in_browser
def test_framed_spans_and_answers_are_the_models(browser: Any) -> None:
    pieces = train_tokenizer(TEXTS, kind="wordpiece", vocab=160)
    tagger = bert_with(pieces, ("O", "B-PER", "I-PER"), tag=3)
    reader = bert_with(pieces, span=0)
    text = "the union is strong"
    with Live({"tagger": tagger, "reader": reader}) as live:
        visitor = Visitor(browser, live.url)
        page = visitor.visit("finetuned", model="tagger", text=text)
        framed = page.locator("#view mark").all_text_contents()
        assert framed == [f"{span.text}{span.label}" for span in tagger.predict(text)] != []
        page = visitor.visit("finetuned", model="reader", text=text, question="the state")
        answer = reader.predict(("the state", text)).text
        shown = page.locator("#view .pair .card").first.inner_text()
        assert (answer or "It finds no answer") in shown
        visitor.context.close()
        assert visitor.problems == []


@in_browser
def test_a_conversation_is_the_models(visitor: Visitor, models: dict[str, Model]) -> None:
    page = visitor.visit("chat", temperature=0, length=16)
    said: list[dict[str, str]] = []
    for message in ("the state", "of the union"):
        page.get_by_label("Message").fill(message)
        page.keyboard.press("Enter")
        visitor.done()
        said.append({"role": "user", "content": message})
        reply = "".join(models["small"].chat_stream(said, temperature=0, max_new_tokens=16))
        expect(page.locator(".chat .assistant p").last).to_have_text(reply)
        said.append({"role": "assistant", "content": reply})
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator(".chat > div")).to_have_count(0)


@in_browser
def test_gaps_are_filled_as_the_model_fills_them(
    visitor: Visitor, models: dict[str, Model]
) -> None:
    page = visitor.visit("fill", text="나는 [MASK] 학교에 [MASK].", top=4)
    expected = [
        (one.token, percent(one.probability))
        for some in models["bert"].fill_masks("나는 [MASK] 학교에 [MASK].", 4)
        for one in some
    ]
    assert visitor.bars() == expected
    page.locator(".bars button").first.click()
    expect(page.locator(".bars")).to_have_count(1)  # one gap is left
    assert (
        page.locator("textarea").input_value()
        == models["bert"].fill_masks("나는 [MASK] 학교에 [MASK].", 1)[0][0].text
    )


@in_browser
def test_words_are_found_in_the_training_text(visitor: Visitor, models: dict[str, Model]) -> None:
    text = "the state of the union is zzz 🙂 갔다"
    page = visitor.visit("trace", model="gpt", text=text)
    found = models["gpt"].trace(text)
    titles = page.locator("#view .card h2")
    assert titles.all_inner_texts() == [f"“{match.text}”" for match in found.matches]
    assert found.matches[0].text in page.locator("#view mark").all_inner_texts()
    facts = page.locator("#view dl").inner_text()
    assert percent(found.novelty[4]) in facts
    area = page.locator("#field-text")
    select = "area => { area.setSelectionRange(4, 9); area.dispatchEvent(new Event('select')); }"
    area.evaluate(select)
    expect(page.locator("#field-part")).to_have_value("state")
    marked = models["gpt"].trace(text, words="state")
    expect(titles).to_have_count(len(marked.matches))


@in_browser
def test_attention_is_the_models_by_tokens_and_by_words(
    visitor: Visitor, models: dict[str, Model], tmp_path: Path
) -> None:
    text = "the union is strong 카페"
    page = visitor.visit("attention", text=text, layer=2, head=3)
    trail = Activations(attention=[])
    models["gpt"].network.trunk(
        torch.tensor([models["gpt"].tokenizer.encode(text).tokens]), activations=trail
    )
    weights = (trail.attention or [])[1][0, 2]
    page.locator("summary").click()
    shown = [row.locator("td").all_inner_texts() for row in page.locator("details tbody tr").all()]
    assert np.allclose(np.array(shown, float), weights.detach(), atol=6e-4)  # the page rounds

    page.locator('[role=radio][aria-checked="true"]').press("ArrowRight")
    expect(page.locator('[role=radio][aria-checked="true"]')).to_have_attribute(
        "aria-label", "Layer 2, head 4"
    )
    assert "head=4" in page.url
    page.get_by_label("Whole words").check()
    expect(page.locator("details thead th")).to_have_count(1 + 5)
    visitor.done()
    rows = [row.locator("td").all_inner_texts() for row in page.locator("details tbody tr").all()]
    assert [sum(map(float, row)) for row in rows] == pytest.approx([1.0] * 5, abs=0.003)
    for kind, begins in (("SVG", b"<svg"), ("PNG", b"\x89PNG")):
        with page.expect_download() as saved:
            page.get_by_role("button", name=f"Save {kind}").click()
        saved.value.save_as(tmp_path / kind)
        assert (tmp_path / kind).read_bytes().startswith(begins)
    assert "var(" not in (tmp_path / "SVG").read_text("utf-8")  # it needs no style sheet
    assert len(ElementTree.parse(tmp_path / "SVG").findall(".//{*}text")) == 3 * 5


@in_browser
@pytest.mark.parametrize(
    "pattern", ["full", "causal & fixed:8,2", "causal & local:6 ; causal & column:6"]
)
def test_a_pattern_is_drawn_from_its_predicate_with_its_cost(
    visitor: Visitor, pattern: str
) -> None:
    page = visitor.visit("patterns", pattern=pattern, drawn=24, at=8, heads=4)
    groups = pattern.count(";") + 1
    small = parse_pattern(pattern, groups).mask(Layout(1, 24, 24)).expand(1, groups, 24, 24)[0]
    paths = page.locator("#view svg.mask path").evaluate_all(
        "nodes => nodes.map(n => n.getAttribute('d'))"
    )
    assert [path.count("M") for path in paths] == small.sum((1, 2)).tolist()
    large = (
        parse_pattern(pattern, 4)
        .mask(Layout(1, 256, 256))
        .expand(1, 4 if groups > 1 else 1, 256, 256)
        .float()
    )
    pairs = float(large.sum()) / large.size(1)
    shown = page.locator(".facts dd").all_inner_texts()
    assert shown[:2] == [f"{round(pairs):,}", percent(pairs / 256**2)]


@in_browser
def test_a_misspelt_pattern_gives_a_hint(visitor: Visitor) -> None:
    page = visitor.visit("patterns", at=7)
    page.get_by_label("Pattern", exact=True).fill("causl & local:4")
    expect(page.locator("#status")).to_have_text(
        "There is no attention pattern 'causl'. Did you mean 'causal'?"
    )
    visitor.problems.clear()  # the browser itself notes that the server answered 400


# what a visitor does wrong: a view, its values, the Korean words, and the server's own beside them
# where it has no Korean ones
MEANT = {
    "too long": ("generate", {"text": "state union " * 90}, "이어 쓸 자리가 없습니다", ""),
    "too long to look at": ("lens", {"text": "하늘 " * 300}, "컨텍스트(256토큰)보다 깁니다", ""),
    "no mask": ("fill", {"text": "…"}, "채울 빈칸이 없습니다", ""),
    "cannot be read as tokens": ("beside", {"text": " "}, "문장이 없습니다", ""),
    "half a seed": (
        "generate",
        {"text": "the", "seed": 1.5},
        "‘seed’ 값이 올바르지 않습니다",
        "a valid integer",
    ),
    "a misspelt pattern": ("patterns", {"pattern": "causl"}, "'causal'을 찾으셨나요?", ""),
}


@pytest.fixture
def korean(browser: Any, live: Live) -> Iterator[Visitor]:
    one = Visitor(browser, live.url, locale="ko-KR")
    yield one
    one.context.close()


def told(visitor: Visitor, words: str, detail: str) -> None:
    """The page says in Korean what is wrong, where it can be seen, and beside it what the server
    says.
    """
    status = visitor.page.locator("#status.wrong")
    expect(status).to_contain_text(words)
    if detail:
        expect(status.locator("small[lang=en]")).to_contain_text(detail)
    expect(status).to_be_in_viewport()
    assert visitor.page.evaluate(CHECKS) == []


@in_browser
@pytest.mark.parametrize("what", MEANT)
def test_errors_are_shown_in_the_language_of_the_page(korean: Visitor, what: str) -> None:
    view, values, words, detail = MEANT[what]
    korean.page.goto(f"{korean.url}/#/{view}?{urlencode(values, quote_via=quote)}")
    if view == "generate":
        korean.page.click("#write")
    told(korean, words, detail)


@in_browser
def test_a_busy_or_unreachable_server_is_reported(browser: Any, models: dict[str, Model]) -> None:
    with Live({"bert": models["bert"]}, queue=1) as server:
        visitor = Visitor(browser, server.url, locale="ko-KR")
        visitor.visit("fill")
        server.app.state.work["bert"].pending = 1
        visitor.page.locator("textarea").fill("the [MASK]")
        told(visitor, "기다리고 있습니다", "")
    visitor.page.locator("textarea").fill("the [MASK] is")
    told(visitor, "서버가 응답하지 않습니다", "Failed to fetch")
    visitor.context.close()


@in_browser
def test_outdated_results_are_dimmed_until_updated(visitor: Visitor) -> None:
    page = visitor.visit("lens", text="the state of")
    view, status = page.locator("#view"), page.locator("#status")
    expect(view).not_to_have_class("stale")
    held: list[Any] = []
    page.route("**/studio/lens", lambda route: held.append(route))
    with page.expect_request("**/studio/lens"):
        page.locator("textarea").fill("the union is")
    page.mouse.wheel(0, 5000)
    expect(view).to_have_class("stale")
    expect(status).to_have_text("Working…")
    expect(status).to_be_in_viewport()
    held[0].continue_()
    page.unroute("**/studio/lens")
    visitor.done()
    expect(view).not_to_have_class("stale")


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no Node on this machine")
def test_a_page_cancels_outdated_work_and_polls_a_slow_model_less_often(tmp_path: Path) -> None:
    shutil.copytree(STUDIO / "js", tmp_path, dirs_exist_ok=True)
    shutil.copy((Path(__file__).parents[1] / "studio_page.js"), tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}', "utf-8")
    ran = subprocess.run(
        ["node", tmp_path / "studio_page.js"], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    # ms after a key, by how long the last answer took
    assert told["pauses"] == [300, 2000, 2000, 3000]
    assert told["givenUp"]
    assert told["runs"] == 5
    assert told["particles"] == ["사람을", "거기를", "서울로", "GPT를", "3으로", "1로"]
    done, busy = {"status": "done", "stale": False}, {"status": "busy", "stale": True}
    assert told["seen"] == [
        done,
        busy,
        done,
        busy,
        busy,
        done,
        busy,
        {"status": "failed", "stale": True},
    ]


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no Node on this machine")
def test_a_chart_of_one_point_shows_it_with_its_value(tmp_path: Path) -> None:
    shutil.copytree(STUDIO / "js", tmp_path, dirs_exist_ok=True)
    (tmp_path / "package.json").write_text('{"type": "module"}', "utf-8")
    shutil.copy((Path(__file__).parents[1] / "studio_chart.js"), tmp_path)
    ran = subprocess.run(
        ["node", tmp_path / "studio_chart.js"], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert 52 < told["dot"]["cx"] < 584
    assert 28 < told["dot"]["cy"] < 244
    assert {"17", "0.46"} <= set(told["texts"])
    ticks = [text for text in told["texts"] if text not in ("17", "0.46", "step", "")]
    assert len(ticks) == len(set(ticks)) > 2  # numbers that differ


def test_every_translated_error_is_sent_by_the_server() -> None:
    words = json.loads((STUDIO / "words/ko.json").read_text("utf-8"))
    code = "".join(path.read_text("utf-8") for path in STUDIO.parents[1].rglob("*.py"))
    assert [key for key in words if key.startswith("refused.") and f'"{key[8:]}"' not in code] == []


@in_browser
def test_the_last_layer_of_the_lens_is_the_models_prediction(
    visitor: Visitor, models: dict[str, Model]
) -> None:
    text = "the state of"
    page = visitor.visit("lens", text=text)
    best = torch.tensor(models["gpt"].logits(text)[-1]).softmax(-1).topk(8)
    assert [value for _, value in visitor.bars()] == [percent(p) for p in best.values.tolist()]
    assert page.locator("table.lens tbody tr").count() == models["gpt"].config.depth + 1
    tops = (
        page.locator("table.lens tbody tr")
        .first.locator("button")
        .evaluate_all("nodes => nodes.map(n => n.title)")
    )
    assert tops == [
        percent(float(row.max())) for row in torch.tensor(models["gpt"].logits(text)).softmax(-1)
    ]


@in_browser
def test_every_tokenizer_is_shown_once_with_its_own_tokens(
    visitor: Visitor, models: dict[str, Model], tmp_path: Path
) -> None:
    page = visitor.visit("tokens", text=SENTENCE)
    shown = ["gpt, small", "bert, moods", "translator"]
    assert page.locator("#view h2").all_inner_texts() == shown
    cards = page.locator("#view section").all()[1:]
    for name, card in zip(("gpt", "bert", "translator"), cards, strict=True):
        encoding = models[name].tokenizer.encode(SENTENCE)
        assert [
            int(one) for one in card.locator(".pieces small").all_inner_texts()
        ] == encoding.tokens
        assert card.locator("dd").first.inner_text() == str(encoding.specials.count(False))
        if name == "bert":  # the tokens themselves, not the text that they cover
            shown = card.locator(".pieces li > span").all_inner_texts()
            assert shown == [models["bert"].tokenizer.token(token) for token in encoding.tokens]
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save the view as SVG").click()
    saved.value.save_as(tmp_path / "tokens.svg")
    written = [node.text for node in ElementTree.parse(tmp_path / "tokens.svg").iter()]
    assert {"[CLS]", "gpt,", "Tokens"} <= set(written)


@in_browser
def test_the_lab_shows_the_prompt_and_the_models_scores(
    visitor: Visitor, models: dict[str, Model]
) -> None:
    page = visitor.visit("shots", task="2d-", k=2, item=3, seed=5)
    prompt = page.locator("pre").inner_text()
    assert prompt.count("Q: ") == 3
    rows = [row.locator("th, td").all_inner_texts() for row in page.locator("table tbody tr").all()]
    assert [row[1] for row in rows] == [
        fixed(models["gpt"].score(prompt, f" {row[0]}").logprob) for row in rows
    ]
    shares = np.exp([models["gpt"].score(prompt, f" {row[0]}").logprob for row in rows])
    assert [value for _, value in visitor.bars()] == [percent(p) for p in shares / shares.sum()]
    page.get_by_role("button", name="Plot every K").click()
    expect(page.locator("#view svg circle")).to_have_count(2)  # and guessing

    page.get_by_label("Task", exact=True).select_option("own")
    page.get_by_label("Your examples").fill('{"text": "a", "label": "x"}\nnot json')
    expect(page.locator("#status")).to_contain_text("line:2: not JSON")
    visitor.problems.clear()


@in_browser
def test_running_runs_are_read_again(visitor: Visitor, runs: Path) -> None:
    page = visitor.visit("train")
    graphs = page.locator("#view .pair section")
    titles = ["Loss: mlm + nsp", "Loss: lm", "Loss: Fine-tuning", "accuracy"]
    assert sorted(graphs.locator("h2").all_inner_texts()) == sorted(titles)
    assert page.locator("svg polyline").count() == 6
    ends = page.locator("svg text.end").all_text_contents()
    assert sorted(ends) == ["one", "task", "task", "two"]  # named at their ends
    hues = page.locator("svg text.end").evaluate_all("nodes => nodes.map(n => n.style.fill)")
    assert len(set(hues)) == 3
    scales = page.locator("svg.picture").evaluate_all(
        "nodes => nodes.map(n => n.clientWidth / n.viewBox.baseVal.width)"
    )
    assert scales == pytest.approx([1.0] * 4, abs=0.01)  # drawn for their cards
    assert "two said this" in page.locator("#view").inner_text()
    numbers = page.get_by_role("group", name="Runs to compare")
    numbers.focus()
    with (runs / "two" / "metrics.jsonl").open("a", encoding="utf-8") as file:
        row = {
            "step": 41,
            "tokens": 20992,
            "seconds": 21,
            "valid_loss": 3.25,
            "sample": "new words",
        }
        file.write(json.dumps(row) + "\n")
    expect(page.locator("#view")).to_contain_text("new words")
    expect(page.locator("table").first).to_contain_text("3.250")
    expect(numbers).to_be_focused()
    page.get_by_label("Horizontal axis").select_option("step")
    page.get_by_label("Scale").select_option("log")
    visitor.done()
    first = page.locator("#view section", has_text="Loss: lm").locator("svg").first
    marks = first.locator("text[text-anchor=middle]")
    assert marks.all_text_contents() == ["1", "2", "5", "10", "20"]  # no room for 40's neighbour
    gaps = [round(one["x"]) for one in (mark.bounding_box() for mark in marks.all()) if one]
    assert gaps[1] - gaps[0] == pytest.approx(gaps[4] - gaps[3], abs=5)  # twice is as far
    assert "axis=step&scale=log" in page.url
    for name, left in (("one", 4), ("task", 2), ("two", 0)):
        page.get_by_role("checkbox", name=name).uncheck()
        expect(page.locator("svg polyline")).to_have_count(left)
    assert "runs=none" in page.url


@in_browser
def test_grammar_is_scored_along_a_run(visitor: Visitor, models: dict[str, Model]) -> None:
    page = visitor.visit("replay", run="one", pairs="ko")
    page.get_by_label("Pairs").select_option("en")
    page.locator("#grade").click()  # before what the change asks for is done
    expect(page.locator("#view section:has(details) svg polyline")).to_have_count(8)
    visitor.done()
    expect(page.locator("#view")).not_to_have_class("stale")
    curves = page.locator("#view section:has(details) svg polyline")
    expect(curves).to_have_count(8)  # of two snapshots that are the same
    assert all(len(one.get_attribute("points").split()) == 2 for one in curves.all())
    right, wrong = "The dogs bark at night.", "The dogs barks at night."
    scores = sentence_logprobs(models["small"].network, models["small"].tokenizer, [right, wrong])
    row = page.locator("#view tbody tr", has_text=right).locator("td").last
    margin = f"{scores[0] - scores[1]:.2f}".replace("-", "−")
    assert row.text_content() == f"{'✓' if scores[0] > scores[1] else '✗'} {margin}"


@in_browser
def test_neighbours_are_counted_in_the_whole_space(
    visitor: Visitor, models: dict[str, Model]
) -> None:
    texts = ["the union", "the state of the union", "하늘이 맑다", "나는 오늘 학교에 갔다"]
    page = visitor.visit("embeddings", texts="\n".join(texts), model="bert")
    vectors = models["bert"].embed(texts)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    names = page.locator(".dot text").evaluate_all(
        "nodes => nodes.filter(n => getComputedStyle(n).visibility === 'visible')"
        ".map(n => n.getBoundingClientRect().toJSON())"
    )
    assert not any(overlap(one, other) for one, other in combinations(names, 2))
    page.locator(".dot").nth(2).press("Enter")
    cosines = {texts[i]: fixed(float(unit[2] @ unit[i])) for i in (0, 1, 3)}
    assert dict(visitor.bars()) == cosines
    assert list(dict(visitor.bars())) == sorted(
        cosines, key=lambda one: -float(cosines[one].replace("−", "-"))
    )


@in_browser
def test_a_gpt_sees_the_left_side_and_a_bert_both_sides(
    visitor: Visitor, models: dict[str, Model]
) -> None:
    page = visitor.visit("beside", text=SENTENCE, place=4)
    gpt, bert = page.locator("#view .pair > section").all()
    assert gpt.locator(".words .away").count() == 2  # the word itself and the two after it
    assert bert.locator(".words .away").count() == 0
    assert [one.locator("path").get_attribute("d").count("M") for one in (gpt, bert)] == [21, 36]
    words = SENTENCE.split()
    score = models["gpt"].score(" ".join(words[:3]), " 거기")
    assert f"log p = {fixed(score.logprob)}" in gpt.inner_text()
    hidden = " ".join([*words[:3], "[MASK]", *words[4:]])
    fills = models["bert"].fill(hidden, 5)
    assert bert.locator(".bars b").all_inner_texts() == [percent(one.probability) for one in fills]
    shares = bert.locator(".words small").all_inner_texts()
    # the rest goes to [CLS] and [SEP]
    assert sum(float(share.strip("%<")) for share in shares) < 100


@in_browser
def test_a_view_without_a_suitable_model_says_what_to_load(
    browser: Any, models: dict[str, Model]
) -> None:
    with Live({"bert": models["bert"]}) as server:
        visitor = Visitor(browser, server.url)
        page = visitor.page
        for view, word in (("generate", "GPT"), ("train", "--runs")):
            page.goto(f"{server.url}/#/{view}")
            expect(page.locator(".empty")).to_contain_text(word)
            expect(page.locator(".empty")).to_contain_text("malmoi serve --model")
        visitor.visit("beside")
        expect(page.locator(".empty")).to_contain_text("No GPT is loaded")
        visitor.context.close()
        assert visitor.problems == []


# ------------------------------------------------------------------ for everyone


@in_browser
def test_a_translation_shows_what_it_attended_to(
    visitor: Visitor, models: dict[str, Model]
) -> None:
    page = visitor.visit("translation", text=SENTENCE, layer=1)
    model = models["translator"]
    said = model.translate(SENTENCE)
    seen = model.cross_attention(SENTENCE, said, layer=0).weights
    assert page.locator("#view svg rect").count() == seen.size
    page.locator("#view summary").click()
    assert "does not know" not in page.locator("body").inner_text()  # of the end of text
    row = page.locator("#view tbody tr").first.locator("td").all_inner_texts()
    assert row[-seen.shape[1] :] == [fixed(weight) for weight in seen[0].round(4).tolist()]


@in_browser
@pytest.mark.parametrize(
    ("language", "scheme", "width"), [("en-GB", "light", 1200), ("ko-KR", "dark", 360)]
)
def test_every_view_can_be_read_and_reached(
    browser: Any, live: Live, language: str, scheme: str, width: int
) -> None:
    size = {"width": width, "height": 900}
    visitor = Visitor(browser, live.url, locale=language, color_scheme=scheme, viewport=size)
    visitor.visit(VIEWS[-1])
    beside = {"compare": "small"} if width < 760 else {}  # the same with one model
    for view in VIEWS:
        page = visitor.turn(view, **QUICK.get(view, {}), **beside)
        assert page.evaluate(CHECKS) == [], view
        expect(page.locator("#saves button")).to_have_count(2)
        expect(page.locator("#saves")).to_be_visible()
        assert page.evaluate("document.documentElement.lang") == language[:2]
        assert page.evaluate("document.documentElement.scrollWidth") <= width, view
        expect(page.locator(f"nav a[data-view={view}]")).to_be_in_viewport()
        if width > 760:  # the same on a phone
            assert unreached(page) == [], view
        words = page.locator("body").inner_text().replace("train.snapshots", "")  # a setting
        assert not re.search(rf"\b({'|'.join(VIEWS)})\.[a-z]+\b", words), (
            f"{view} shows a key, not its words"
        )
    visitor.context.close()
    assert visitor.problems == []


@pytest.mark.heavy  # every view four times, with all of axe's rules
@in_browser
@pytest.mark.skipif(not AXE.is_file(), reason="axe is not installed here: npm install axe-core")
@pytest.mark.parametrize(
    ("language", "scheme", "width"),
    [("en", "light", 1200), ("ko", "dark", 1200), ("en", "dark", 360), ("ko", "light", 360)],
)
def test_axe_finds_nothing(
    browser: Any, live: Live, language: str, scheme: str, width: int
) -> None:
    size = {"width": width, "height": 900}
    look = {"locale": language, "color_scheme": scheme, "viewport": size}
    visitor = Visitor(browser, live.url, **look, reduced_motion="reduce")
    page = visitor.visit("home")
    page.evaluate(AXE.read_text("utf-8"))
    found: list[str] = []
    for view in VIEWS:
        for extra in ({"lesson": "4"}, {"compare": "small"}):
            visitor.turn(view, **QUICK.get(view, {}), **extra)
            for summary in page.locator("#view summary").all():
                summary.click()
            found += [
                f"{view} {extra}: {rule['id']}: {node['html'][:300]}"
                for rule in page.evaluate("axe.run().then((said) => said.violations)")
                for node in rule["nodes"]
            ]
    visitor.context.close()
    assert not found, "\n".join(found)


def overlap(one: dict[str, float], other: dict[str, float]) -> bool:
    across = one["left"] < other["right"] and other["left"] < one["right"]
    return across and one["top"] < other["bottom"] and other["top"] < one["bottom"]


def unreached(page: Any) -> list[str]:
    """What can have the focus, but is not reached with Tab."""
    page.evaluate(
        "() => { document.activeElement.blur(); window.scrollTo(0, 0); window.seen = []; "
        "document.addEventListener('focusin', (event) => window.seen.push(event.target)); }"
    )
    wanted = (
        "[...document.querySelectorAll('a, button, input, select, textarea, summary, "
        '[tabindex="0"]\')]'
    )
    wanted += ".filter((node) => node.tabIndex >= 0 && !node.disabled && node.checkVisibility())"
    missed = f"{wanted}.filter((node) => !window.seen.includes(node)).map((node) => node.outerHTML)"
    for _ in range(2 * page.evaluate(f"{wanted}.length")):  # scrolled parts may have the focus too
        page.keyboard.press("Tab")
        if not page.evaluate(f"{missed}.length"):
            return []
    return list(page.evaluate(missed))


@in_browser
def test_language_and_theme_are_switched_and_kept(visitor: Visitor) -> None:
    page = visitor.visit("fill", text="나는 [MASK] 갔다")
    page.locator("#language").click()
    expect(page.locator("h1")).to_have_text("빈칸 채우기")
    assert page.locator("textarea").input_value() == "나는 [MASK] 갔다"
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.locator("#theme").click()
    after = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert before != after
    visitor.visit("tokens")
    expect(page.locator("h1")).to_have_text("토큰")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == after


@in_browser
def test_the_address_holds_the_state_and_back_goes_back(visitor: Visitor) -> None:
    page = visitor.visit("attention", text="the union", picture="matrix")
    assert page.locator("textarea").input_value() == "the union"
    expect(page.locator("#view svg.picture rect title").first).to_be_attached()
    page.locator("textarea").fill("the state")
    expect(page).to_have_url(re.compile("text=the\\+state"))
    page.locator("nav a[data-view=tokens]").click()
    expect(page.locator("h1")).to_have_text("Tokens")
    page.go_back()
    expect(page.locator("h1")).to_have_text("Attention")
    assert page.locator("textarea").input_value() == "the state"


@in_browser
def test_one_sentence_and_one_model_are_kept_through_all_views(visitor: Visitor) -> None:
    page = visitor.visit("attention", layer=2)
    page.get_by_label("Model").select_option("small")
    page.locator("textarea").fill("the union is")
    visitor.done()
    for view, model in (
        ("lens", "small"),
        ("fill", "bert"),
        ("tokens", None),
        ("attention", "small"),
    ):
        page.locator(f"nav a[data-view={view}]").click()
        expect(page.locator(f"nav a[data-view={view}]")).to_have_attribute("aria-current", "page")
        visitor.done()
        assert page.locator("textarea").input_value() == "the union is"
        if model:
            assert page.get_by_label("Model").input_value() == model, view
    assert "layer=2" in page.url  # a view's own settings are kept as well


@in_browser
def test_two_models_are_shown_side_by_side_in_every_view(
    visitor: Visitor, models: dict[str, Model]
) -> None:
    text = "the union is"
    page = visitor.visit("attention", text=text, model="gpt", compare="bert", layer=2, head=2)
    for name in ("gpt", "bert"):
        weights = attention(models[name], text).weights[1, 1]
        rows = page.locator(f"[data-model={name}] details tbody tr")
        shown = [row.locator("td").all_text_contents() for row in rows.all()]
        assert np.allclose(np.array(shown, float), weights, atol=6e-4)  # the page rounds
    page.locator("[data-model=bert] [role=radio]").first.click()  # one choice for both
    expect(
        page.locator('[role=radio][aria-checked="true"][aria-label="Layer 1, head 1"]')
    ).to_have_count(2)
    visitor.done()
    for view, sides in (("lens", 2), ("fill", 0), ("beside", 0), ("home", 2)):
        page.locator(f"nav a[data-view={view}]").click()
        expect(page.locator(f"nav a[data-view={view}]")).to_have_attribute("aria-current", "page")
        visitor.done()
        names = page.locator(".sides").first.locator(".whose").all_inner_texts() if sides else []
        assert names == ["gpt", "bert"][:sides], view
        assert page.locator(".side").count() > 0 if sides else page.locator(".side").count() == 0
    page.locator("[data-model=gpt] .chip").nth(1).click()
    chosen = page.locator('.chip[aria-pressed="true"] small').all_inner_texts()
    assert chosen == [
        str(models[name].tokenizer.encode(text).tokens[1]) for name in ("gpt", "bert")
    ]
    page.get_by_label("Model").select_option("bert")
    visitor.done()
    assert page.get_by_label("Compare with").input_value() == "gpt"  # they change places
    page.get_by_label("Compare with").select_option("")
    expect(page.locator(".side")).to_have_count(0)
    assert "compare" not in page.url
    visitor.done()


@in_browser
def test_a_link_means_the_same_to_everyone(browser: Any, live: Live, visitor: Visitor) -> None:
    page = visitor.visit("attention", model="bert")
    text = page.locator("textarea").input_value()
    korean = Visitor(browser, live.url, locale="ko-KR", color_scheme="dark")
    korean.page.goto(page.url)
    expect(korean.page.locator("h1")).to_have_text("Attention")
    assert korean.page.locator("textarea").input_value() == text
    assert korean.page.get_by_label("Model").input_value() == "bert"
    korean.context.close()

    visitor.visit("attention", model="gone", layer=99, compare="lost")
    notice = page.locator("#notice")
    expect(notice).to_contain_text("compares with the model “lost”")
    expect(notice).to_contain_text("the model “gone”, which is not loaded; this is gpt")
    expect(notice).to_contain_text("Layer cannot be 99 here; 3 is used")
    visitor.visit("generat")
    expect(notice).to_contain_text("There is no view “generat”")


@in_browser
def test_a_view_works_again_when_the_server_is_back(visitor: Visitor) -> None:
    page = visitor.visit("attention", text="the union")
    page.route("**/*", lambda route: route.abort())
    page.locator("nav a[data-view=lens]").click()
    expect(page.locator("h1")).to_have_text("Logit lens")
    expect(page.locator("#status")).to_contain_text("The server did not respond.")
    page.unroute("**/*")
    visitor.done()
    assert page.locator("table.lens").count() == 1
    visitor.problems.clear()  # the browser itself notes requests that failed


@in_browser
def test_samples_follow_the_models_language_and_unknown_words_are_reported(
    browser: Any, live: Live
) -> None:
    english = train_tokenizer(TEXTS[:1] * 4, kind="byte-bpe", vocab=300)
    assert known_languages(english) == ["en"]
    korean = Visitor(browser, live.url, locale="ko-KR")
    page = korean.visit("fill", text="하늘이 囍囍 [MASK]", model="bert")
    expect(page.locator("#notice")).to_contain_text("3어절 가운데 1어절을 모릅니다")
    korean.context.close()


@in_browser
def test_a_lesson_leads_through_the_views_and_words_are_explained(
    visitor: Visitor, models: dict[str, Model]
) -> None:
    page = visitor.visit("home", text="my own words")
    page.locator("#hour").click()
    lesson = page.locator("#lesson")
    expect(lesson).to_contain_text("Lesson 1 of 19")
    answer = lesson.locator(".verdict")
    expect(answer).not_to_be_visible()
    counts = parameter_parts(models["gpt"].network)
    counts.pop("other")
    most = max(counts, key=lambda name: counts[name])
    other = min(counts, key=lambda name: counts[name])
    lesson.locator(f"[data-option={other}]").click()
    expect(answer).to_contain_text("Not here.")
    lesson.locator(f"[data-option={most}]").click()
    expect(answer).to_have_text("Right.")
    expect(lesson.locator(".outcome")).to_contain_text("computed from gpt")
    for _ in range(2):
        lesson.get_by_role("button", name="Next lesson").click()
    expect(page.locator("h1")).to_have_text("BERT beside GPT")
    visitor.done()
    assert "lesson=3" in page.url
    assert "place=4" in page.url
    page.reload()
    expect(lesson).to_contain_text("Two masks")
    page.locator("#lead .glossed").first.press("Enter")
    expect(page.locator("#meaning")).to_contain_text("which tokens may see which")
    page.keyboard.press("Escape")
    lesson.get_by_role("button", name="Leave the hour").click()
    expect(lesson).not_to_be_visible()
    assert "lesson" not in page.url
    visitor.visit("next")
    page.get_by_role("button", name="What is this: Temperature?").click()
    expect(page.locator("#meaning")).to_contain_text("Divides the logits")


@in_browser
def test_answers_are_kept_and_collected_on_one_page(
    visitor: Visitor, models: dict[str, Model]
) -> None:
    page = visitor.visit("home", lesson=1, model="gpt")
    counts = parameter_parts(models["gpt"].network)
    most = max(("embedding", "attention", "mlp", "head"), key=lambda name: counts[name])
    page.locator(f"[data-option={most}]").click()
    expect(page.locator("#lesson .verdict")).to_have_text("Right.")
    page.reload()  # what was answered is shown again
    expect(page.locator("#lesson .verdict")).to_have_text("Right.")
    visitor.turn("hour")
    expect(page.locator("#view .card").first).to_contain_text("1 of 1 answers right; 19 lessons")
    first = page.locator(".hour > li").first
    expect(first).to_contain_text("✓")
    expect(first).to_contain_text("computed from gpt")
    page.get_by_role("button", name="Copy a link").click()
    expect(page).to_have_url(re.compile("answers=path_"))
    page.evaluate("localStorage.removeItem('malmoi.hour')")
    page.reload()  # others see them too
    expect(page.locator("#view .card").first).to_contain_text("1 of 1 answers right")
    page.get_by_label("For teachers").click()
    expect(page.locator("#view .card").first).to_contain_text("60 minutes")
    expect(first.locator("ul .good")).to_have_count(1)
    expect(page.locator(".hour > li").nth(7)).to_contain_text("not loaded")
    page.get_by_role("button", name="Start over").click()
    page.get_by_label("For teachers").uncheck()
    expect(page.locator("#view .card").first).to_contain_text("0 of 0")


@in_browser
def test_on_a_phone_the_slider_of_a_lesson_stays_in_view(browser: Any, live: Live) -> None:
    visitor = Visitor(browser, live.url, viewport={"width": 390, "height": 844})
    page = visitor.visit("beside", lesson=3, place=4)
    slider = page.locator("#view input[type=range]")
    box = slider.bounding_box()
    assert box is not None
    assert box["y"] < 844
    page.locator("#view svg.mask").last.scroll_into_view_if_needed()
    box = slider.bounding_box()
    assert box is not None
    assert 0 < box["y"] < 844
    visitor.context.close()
    assert visitor.problems == []


@pytest.mark.heavy  # every lesson, in both languages, wide and on a phone
@in_browser
@pytest.mark.parametrize(("language", "width"), [("en", 1200), ("ko", 360)])
def test_every_lesson_has_its_view(browser: Any, live: Live, language: str, width: int) -> None:
    scheme = "dark" if language == "ko" else "light"
    size = {"width": width, "height": 900}
    visitor = Visitor(browser, live.url, locale=language, viewport=size, color_scheme=scheme)
    page = visitor.page
    page.goto(f"{live.url}/")
    page.locator("#hour").click()
    lessons = json.loads((STUDIO / f"lessons/{language}.json").read_text("utf-8"))
    for number, (name, lesson) in enumerate(lessons.items(), start=1):
        expect(page.locator(".topic")).to_have_text(lesson["title"])
        if name != "finetuning":  # its view waits for a click
            visitor.done()
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        options = page.locator("#lesson .options button")
        assert options.count() or name == "nsp", name  # no model here was trained with it
        if options.count():
            options.first.click()
            expect(page.locator("#lesson .verdict, #lesson .wrong")).to_be_visible()
        assert page.evaluate(CHECKS) == [], name
        assert not re.search("cannot|쓸 수 없", page.locator("#notice").inner_text()), name
        if number < len(lessons):
            page.locator("#lesson button").last.click()
    visitor.context.close()
    assert visitor.problems == []


@in_browser
def test_a_server_with_a_key_asks_for_it(browser: Any, models: dict[str, Model]) -> None:
    with Live({"bert": models["bert"]}, api_key="open") as server:
        visitor = Visitor(browser, server.url)
        visitor.page.goto(f"{server.url}/#/fill")
        visitor.page.get_by_label("API key").fill("open")
        visitor.page.get_by_role("button", name="Use this key").click()
        visitor.done()
        assert len(visitor.bars()) == 5
        visitor.context.close()


@in_browser
def test_the_path_of_a_sentence_has_the_models_numbers_and_opens_its_views(
    visitor: Visitor, models: dict[str, Model]
) -> None:
    text = "the state of the union"
    page = visitor.visit("home", text=text, model="gpt", layer=2, head=3)
    model = models["gpt"]
    tokens = model.tokenizer.encode(text).tokens
    chips = page.locator(".chip")
    assert [int(one) for one in chips.locator("small").all_inner_texts()] == tokens
    chips.nth(1).click()
    seen = attention(model, text).weights[1, 2, 1]
    q, k, _ = head_vectors(model, text, layer=1, head=2)
    scores = [fixed(float(q[1] @ key) / 12**0.5)[:-1] for key in k[:2]]
    shown = page.locator(".looks td:nth-child(2)").all_inner_texts()
    assert [float(one.replace("−", "-")) for one in shown[:2]] == pytest.approx(
        [float(one.replace("−", "-")) for one in scores], abs=0.011
    )
    assert set(shown[2:]) == {"−∞"}
    shares = page.locator(".looks td:last-child").all_inner_texts()
    assert shares == [percent(float(p)) if p else "0%" for p in np.round(seen, 4)]
    assert page.locator(".looks .away").count() == len(tokens) - 2
    best = torch.tensor(model.logits(text)[1]).softmax(-1).topk(8).values.tolist()
    assert [value for _, value in visitor.bars(".step:nth-child(5)")] == [percent(p) for p in best]
    page.locator(".flow a").nth(3).click()
    expect(page.locator("h1")).to_have_text("Attention")
    assert page.locator("textarea").input_value() == text
    page.locator(".brand").click()
    expect(page.locator("h1")).to_have_text("The path of one sentence")
    visitor.done()


@in_browser
def test_the_path_of_a_bert_starts_at_a_mask(visitor: Visitor, models: dict[str, Model]) -> None:
    page = visitor.visit("home", text="the state of the union", model="bert")
    expect(page.locator(".sentence mark")).to_have_text("[MASK]")
    expect(page.locator(".chip[aria-pressed=true]")).to_contain_text("[MASK]")
    found = models["bert"].fill("the state [MASK] the union", top=8)
    assert [value for _, value in visitor.bars()] == [percent(one.probability) for one in found]
    page.get_by_role("button", name="union", exact=True).click()
    visitor.done()
    expect(page.locator(".sentence")).to_have_text("the state of the [MASK]")
    expect(page.locator(".step").nth(4)).to_contain_text("The hidden word is “union”.")


# ------------------------------------------------------------------ without a browser


@torch.inference_mode()
def head_vectors(model: Model, text: str, layer: int, head: int) -> list[torch.Tensor]:
    """q, k and v of one head [T, E], by the formulas of Vaswani et al. 2017."""
    tokens = torch.tensor([model.tokenizer.encode(text).tokens])
    watched = Activations()
    model.network.trunk(tokens, activations=watched)
    block = model.network.trunk.blocks[layer]
    x = block.attend_norm(watched.hidden[layer])
    width = model.config.width
    size = width // model.config.heads
    parts = (x @ block.attend.qkv.weight.T + block.attend.qkv.bias).split(width, dim=-1)
    return [part[0, :, head * size : (head + 1) * size] for part in parts]


def test_one_head_on_the_path_is_the_formulas(models: dict[str, Model]) -> None:
    model = models["gpt"]
    text = "the state of the union"
    seen = sentence_path(model, text=text, layer=1, head=2)
    q, k, v = head_vectors(model, text, layer=1, head=2)
    head = seen["head"]
    assert head["size"] == q.size(-1) == 12
    for name, vectors in (("q", q), ("k", k), ("v", v)):
        assert np.allclose(head[name], vectors, atol=1e-3), name
    scores = q @ k.T / math.sqrt(12)
    assert np.allclose(head["scores"], scores, atol=1e-3)
    causal = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf).softmax(-1)
    assert np.allclose(head["weights"], causal, atol=1e-4)
    assert np.allclose(head["mix"], causal @ v, atol=1e-3)
    block = model.network.trunk.blocks[1]
    assert not block._forward_hooks
    assert "mix" not in vars(block.attend)
    assert seen["cache_bytes"] == 2 * 3 * 48 * 4


def test_the_path_adds_up(models: dict[str, Model]) -> None:
    model = models["gpt"]
    for layer in range(model.config.depth):
        seen = sentence_path(model, text="the state of the union", layer=layer)
        parts = seen["block"]
        total = np.array(parts["before"]) + parts["attention"] + parts["mlp"]
        assert seen["plain"]
        assert np.allclose(total, parts["after"], atol=4e-3)
    embedded = np.array(seen["embedding"]["token"]) + seen["embedding"]["position"]
    assert np.allclose(embedded, seen["embedding"]["sum"], atol=2e-3)
    assert sum(seen["parameters"].values()) == count_parameters(model.network)
    bert = sentence_path(models["bert"], text="하늘이 [MASK]")
    assert list(bert["embedding"]) == ["token", "position", "segment", "sum"]
    assert not bert["plain"]
    long = sentence_path(model, text="the state " * 30)
    assert len(long["tokens"]) == 24
    assert long["first"] + 24 == len(model.tokenizer.encode("the state " * 30).tokens)


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("pattern", {"pattern": "(" * 300}),
    ("pattern", {"pattern": "local:99999999999999"}),
    ("pattern", {"pattern": ";".join(["full"] * 40)}),
    ("pattern", {"pattern": "document"}),
    ("beside", {"text": "", "gpt": "gpt"}),
    ("beside", {"text": SENTENCE}),
    ("embeddings", {"texts": ["a", "b"], "pool": "none"}),
    ("attention", {"text": "a " * 400}),
    ("shots", {"task": "own", "lines": "[1]"}),
    ("shots", {"task": "own", "lines": '{"text": "a", "label": "only one"}'}),
    ("shots", {"task": "2d+", "shots": 63}),
    ("shots", {"task": "2d+", "item": 64}),
    ("shots", {"task": "../secret"}),
    ("branch", {"written": ["no such token"]}),
]


def test_attention_is_sent_compressed_one_head_in_full(
    live: Live, models: dict[str, Model]
) -> None:
    body = {"model": "gpt", "text": "the state " * 40, "layer": 1, "head": 2}
    answer = httpx.post(f"{live.url}/studio/attention", json=body)
    assert answer.headers["content-encoding"] == "gzip"
    seen = answer.json()
    full = attention(models["gpt"], "the state " * 40).weights
    assert np.allclose(seen["weights"], full[1, 2], atol=1e-4)
    small = np.frombuffer(b64decode(seen["thumbnails"][2][3]), np.uint8)
    assert small.size == seen["small"] ** 2
    assert int(small[0]) == round(255 * float(full[2, 3, 0, 0]))


@pytest.mark.parametrize(("view", "body"), REFUSED)
def test_unsupported_views_give_a_clear_error(live: Live, view: str, body: dict[str, Any]) -> None:
    answer = httpx.post(f"{live.url}/studio/{view}", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].endswith((".", ". "))


@pytest.mark.parametrize(
    ("view", "body"),
    [
        ("beside", {"text": "\u0007 \u0007", "place": 1, "gpt": "gpt"}),
        ("beside", {"text": "[MASK] [MASK][MASK] x", "place": 2, "gpt": "gpt", "bert": "bert"}),
        ("embeddings", {"texts": ["", ""], "model": "bert"}),
        ("tokens", {"text": ""}),
        ("lens", {"text": ""}),
        ("attention", {"text": "", "words": True, "model": "bert"}),
    ],
)
def test_strange_texts_are_shown_too(live: Live, view: str, body: dict[str, Any]) -> None:
    answer = httpx.post(f"{live.url}/studio/{view}", json=body)
    assert answer.status_code == 200, answer.text


def test_a_run_that_went_wrong_is_drawn_as_far_as_it_went(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 2.0}\n{"step": 2, "loss": NaN}\n{"step": 3, "los'
    )
    (run,) = curves.list_runs(tmp_path)["runs"]
    assert (run["loss"], run["step"], run["name"]) == ([(1.0, 2.0)], 2, tmp_path.name)


def test_both_dictionaries_have_the_same_keys() -> None:
    english, korean = (
        json.loads((STUDIO / f"words/{name}.json").read_text("utf-8")) for name in ("en", "ko")
    )
    # the server speaks English
    assert list(english) == [key for key in korean if not key.startswith("refused.")]
    for key, words in english.items():
        assert set(re.findall(r"\{([a-z]+)", words)) == set(
            re.findall(r"\{([a-z]+)", korean[key])
        ), key
        assert words
    for key, words in korean.items():
        assert words
        for name in re.findall(r"\{([a-z]+):[가-힣]", words):  # a particle follows its word
            assert f"{{{name}}}" in words, key
    used = {
        key
        for path in STUDIO.rglob("*.js")
        for key in re.findall(r'\bt\("([^"]+)"', path.read_text("utf-8"))
    }
    assert used <= set(english)


def test_the_glossary_is_the_same_in_both_languages() -> None:
    def read(name: str) -> Any:
        return json.loads((STUDIO / name).read_text("utf-8"))

    known = set(VIEWS)
    assert all(set(one["views"]) <= known for one in read("lessons/hour.json"))
    words, korean_words = (read(f"words/glossary.{name}.json") for name in ("en", "ko"))
    assert list(words) == list(korean_words)
    fields = {field for one in words.values() for field in one["fields"]}
    assert {f"field.{name}" for name in fields} <= set(read("words/en.json"))


def test_the_page_is_small_and_has_no_external_resources() -> None:
    files = [path for path in STUDIO.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 420_000  # half of it are words
    for path in files:
        text = path.read_text("utf-8")
        assert set(re.findall(r"https?://[^\"'\s]+", text)) <= {"http://www.w3.org/2000/svg"}, path
        assert not re.search(r"<[^>]+\son[a-z]+=", text) or path.suffix == ".js", path
        assert "innerHTML" not in text, path


@given(st.integers(1, 3), st.integers(2, 5), st.data())
def test_attention_by_words_still_sums_to_one(layers: int, words: int, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=words, max_size=words))
    total = sum(sizes)
    weights = (
        torch.randn(layers, 2, total, total, generator=torch.Generator().manual_seed(total))
        .softmax(-1)
        .numpy()
    )
    starts = np.cumsum([0, *sizes])
    merged = by_words(weights, [list(range(a, b)) for a, b in pairwise(starts.tolist())])
    assert merged.shape == (layers, 2, words, words)
    assert np.allclose(merged.sum(-1), 1, atol=1e-5)


def test_words_are_the_tokenizers_words(models: dict[str, Model]) -> None:
    seen = attention(models["bert"], "하늘이 맑다", "나는 학교에")
    names = [[seen.tokens[i] for i in group] for group in word_groups(seen)]
    joined = ["".join(one.removeprefix("##") for one in group) for group in names]
    assert joined == ["[CLS]", "하늘이", "맑다", "[SEP]", "나는", "학교에", "[SEP]"]


def test_the_plane_is_scikit_learns() -> None:
    from sklearn.decomposition import PCA

    vectors = np.random.default_rng(0).normal(size=(12, 7))
    ours, shares = principal(vectors)
    theirs = PCA(2).fit(vectors)
    assert np.allclose(np.abs(ours), np.abs(theirs.transform(vectors)))
    assert np.allclose(shares, theirs.explained_variance_ratio_)
    assert principal(np.ones((3, 1)))[0].tolist() == [[0, 0]] * 3  # texts that are all alike


def test_the_few_shot_lab_supports_a_bert(models: dict[str, Model]) -> None:
    lines = (
        '{"text": "a", "choices": ["yes", "no"], "label": 1}\n{"text": "b", "choices": ["yes", '
        '"no"], "label": 0}'
    )
    shown = few_shot_view(models["bert"], "own", lines, shots=1, scoring="cloze_total")
    assert shown["prompt"] == "b yes\n\na"
    assert [one["right"] for one in shown["choices"]] == [False, True]
    assert math.isclose(sum(one["share"] for one in shown["choices"]), 1)
