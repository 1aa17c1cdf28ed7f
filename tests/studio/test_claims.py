"""What the lessons claim: the numbers are those of plain transformers and torch code."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import transformers as hf

from live_server import Live
from malmoi.inference import Model, load
from malmoi.pair import BERT, GPT, shipped
from malmoi.studio import attention_view, claims
from malmoi.studio.attention_view import order_rows
from malmoi.studio.claims import (
    CLAIMS,
    NO_TEXT,
    SHOWN,
    Subject,
    computed_claim,
    judge_reviews,
    lesson_texts,
    reviews,
    rounded,
    sentences,
)
from malmoi.studio.serve import PAGE
from malmoi.text.sources import sotu_messages

LANGUAGES = ("en", "ko")
ALL_TEXTS = claims.TEXTS
FEW = 4  # of the forty sentences, twenty passages and reviews of each kind
ANSWERS = {  # of the pair that comes with the package, so that a change of it is noticed
    "parameters": "embedding",
    "future": "bert",
    "temperature": "distances",
    "source": "all",
    "cost": "two",
    "sizes": "large",
    "cache": "larger",
}


@pytest.fixture(scope="module", autouse=True)
def few_texts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Some of the lessons' texts, as if there were no others."""
    few = {
        language: {
            "pairs": texts["pairs"][:FEW],
            "passages": texts["passages"][:FEW],
            "reviews": {kind: some[:FEW] for kind, some in texts["reviews"].items()},
            "wordings": texts["wordings"],
        }
        for language, texts in lesson_texts().items()
    }
    file = tmp_path_factory.mktemp("texts") / "few.json"
    file.write_text(json.dumps(few), "utf-8")
    messages = list(sotu_messages())[::12]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(claims, "TEXTS", file)
        patch.setattr(attention_view, "BUILT_IN_ROWS", 40)
        patch.setattr("malmoi.demo.texts.sotu_messages", lambda: iter(messages))
        forget()
        yield
    forget()


def forget() -> None:
    lesson_texts.cache_clear()
    order_rows.cache_clear()
    computed_claim.cache_clear()


@pytest.fixture(scope="module")
def pair() -> dict[str, Model]:
    return {name: load(name, device="cpu") for name in (GPT, BERT)}


def folder(name: str) -> Path:
    found = shipped(name)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def plain_bert() -> tuple[Any, Any]:
    where = folder(BERT)
    return hf.BertForPreTraining.from_pretrained(where).eval(), hf.AutoTokenizer.from_pretrained(
        where
    )


@pytest.fixture(scope="module")
def plain_gpt() -> tuple[Any, Any]:
    where = folder(GPT)
    model = hf.GPT2LMHeadModel.from_pretrained(where, attn_implementation="eager").eval()
    return model, hf.AutoTokenizer.from_pretrained(where)


def lesson(name: str) -> Any:
    return json.loads((PAGE / f"lessons/{name}.json").read_text("utf-8"))


def middle(ids: list[int]) -> int:
    """The middle of the tokens between [CLS] and the one before [SEP]."""
    inside = range(1, len(ids) - 2)
    return inside[len(inside) // 2]


@torch.no_grad()
def logits(model: Any, ids: list[int], at: int) -> torch.Tensor:
    return model(torch.tensor([ids])).prediction_logits[0, at].log_softmax(-1)


def test_a_hidden_neighbour_is_measured_as_transformers_does(
    pair: dict[str, Model], plain_bert: tuple[Any, Any]
) -> None:
    model, words = plain_bert
    unsure: dict[str, list[float]] = {"before": [], "after": [], "nothing": []}
    right = []
    for text in sentences("en"):
        ids = words(text).input_ids
        at = middle(ids)
        hidden = {"before": {at}, "after": {at, at + 1}, "nothing": set(range(1, len(ids) - 1))}
        for name, some in hidden.items():
            given = [words.mask_token_id if i in some else one for i, one in enumerate(ids)]
            found = logits(model, given, at)
            unsure[name].append(float(-(found.exp() * found).sum()))
            if name == "before":
                right.append(int(found.argmax()) == ids[at])
    claim = computed_claim("neighbour", Subject(pair[BERT], "en"))
    for name, values in unsure.items():
        assert claim.values[name] == pytest.approx(np.mean(values), abs=1e-3)
    assert claim.values["right"] == pytest.approx(np.mean(right))
    assert claim.values["share"] == np.mean(np.array(unsure["after"]) > unsure["before"])


def test_masked_replaced_and_kept_tokens_are_predicted_as_transformers_does(
    pair: dict[str, Model], plain_bert: tuple[Any, Any]
) -> None:
    model, words = plain_bert
    rows = [words(text).input_ids for text in sentences("ko")]
    wanted = [ids[middle(ids)] for ids in rows]
    intruders = wanted[1:] + wanted[:1]
    put = {"masked": [words.mask_token_id] * len(rows), "swapped": intruders, "kept": wanted}
    claim = computed_claim("kept", Subject(pair[BERT], "ko"))
    for name, some in put.items():
        right = []
        for ids, one, word in zip(rows, some, wanted, strict=True):
            at = middle(ids)
            given = [*ids[:at], one, *ids[at + 1 :]]
            right.append(int(logits(model, given, at).argmax()) == word)
        assert claim.values[name] == pytest.approx(np.mean(right))


def test_next_sentences_are_told_as_transformers_does(
    pair: dict[str, Model], plain_bert: tuple[Any, Any]
) -> None:
    model, words = plain_bert
    pairs = lesson_texts()["en"]["passages"]
    nexts = [second for _, second in pairs]
    right = {"next": [], "other": [], "blind": []}
    for i, (first, second) in enumerate(pairs):
        for name, after in (("next", second), ("other", nexts[(i + 1) % len(nexts)])):
            given = words(first, after, return_tensors="pt")
            with torch.no_grad():
                follows = model(**given).seq_relationship_logits[0].argmax() == 0
                given["token_type_ids"].zero_()
                blind = model(**given).seq_relationship_logits[0].argmax() == 0
            right[name].append(bool(follows) == (name == "next"))
            right["blind"].append(bool(blind) == (name == "next"))
    claim = computed_claim("nsp", Subject(pair[BERT], "en"))
    for name, some in right.items():
        assert claim.values[name] == pytest.approx(np.mean(some))
    both = [*right["next"], *right["other"]]
    assert claim.values["right"] == pytest.approx(np.mean(both))


def test_reviews_are_judged_as_transformers_does(
    pair: dict[str, Model], plain_gpt: tuple[Any, Any]
) -> None:
    model, words = plain_gpt
    prompt, answers = lesson_texts()["en"]["wordings"][0]
    items = reviews("en")

    @torch.no_grad()
    def logprob(before: str, answer: str) -> float:
        first = words(before).input_ids
        ids = torch.tensor([[*first, *words(answer).input_ids]])
        found = model(ids).logits[0].log_softmax(-1)
        places = range(len(first) - 1, ids.size(1) - 1)
        return float(sum(found[i, ids[0, i + 1]] for i in places))

    for count in (0, SHOWN):
        shown = "".join(
            prompt.format(text=text) + answers[label] + "\n\n" for text, label in items[:count]
        )
        asked = [*(text for text, _ in items[SHOWN:]), NO_TEXT]
        expected = np.array(
            [[logprob(shown + prompt.format(text=text), one) for one in answers] for text in asked]
        )
        found = judge_reviews(Subject(pair[GPT], "en"), 0, count)
        assert found.scores == pytest.approx(expected[:-1], abs=2e-3)
        assert found.prior == pytest.approx(expected[-1], abs=2e-3)
    fair = found.right(calibrated=True)
    guesses = (expected[:-1] - expected[-1]).argmax(1)
    assert fair.tolist() == [
        float(a == b) for a, (_, b) in zip(guesses, items[SHOWN:], strict=True)
    ]


def test_parameters_and_cache_are_those_of_the_stored_tensors(
    pair: dict[str, Model], plain_gpt: tuple[Any, Any]
) -> None:
    model, _ = plain_gpt
    claim = computed_claim("parameters", Subject(pair[GPT], "en"))
    total = sum(one.numel() for one in model.parameters())
    parts = {"embedding": (".wte.", ".wpe."), "attention": (".attn.",), "mlp": (".mlp.",)}
    for part, names in parts.items():
        count = sum(
            one.numel()
            for name, one in model.named_parameters()
            if any(some in name for some in names)
        )
        assert claim.values[part] == pytest.approx(count / total)
    values = computed_claim("cache", Subject(pair[GPT], "en")).values
    with torch.no_grad():
        kept = model(torch.tensor([[1, 2, 3]]), use_cache=True).past_key_values
    size = sum(2 * layer.keys.numel() * layer.keys.element_size() for layer in kept.layers)
    assert values["token"] == size / 3
    assert values["weights"] == 4 * total
    assert values["long"] == size / 3 * 131_072


def test_tokens_a_word_are_those_of_the_plain_tokenizer(
    pair: dict[str, Model], plain_gpt: tuple[Any, Any]
) -> None:
    _, words = plain_gpt
    claim = computed_claim("tokens", Subject(pair[GPT], "en"))
    for language in LANGUAGES:
        texts = sentences(language)
        count = sum(len(words(text).input_ids) for text in texts)
        assert claim.values[language] == count / len(" ".join(texts).split())


@torch.no_grad()
def test_a_changed_last_word_moves_the_first_vector_as_in_transformers(
    pair: dict[str, Model], plain_gpt: tuple[Any, Any], plain_bert: tuple[Any, Any]
) -> None:
    texts = [text.split() for text in sentences("en")]
    lasts = [words[-1] for words in texts]
    moved_on = zip(texts, [*lasts[1:], lasts[0]], strict=True)
    changed = [[*words[:-1], last] for words, last in moved_on]
    claim = computed_claim("future", Subject(pair[GPT], "en", pair[BERT]))
    for name, (model, words), first in (("gpt", plain_gpt, 0), ("bert", plain_bert, 1)):
        moved = []
        for text, other in zip(texts, changed, strict=True):
            before, after = (
                model.base_model(**words(" ".join(some), return_tensors="pt"))[0][0, first]
                for some in (text, other)
            )
            moved.append(float((after - before).norm() / before.norm()))
        assert claim.values[name] == pytest.approx(np.mean(moved), abs=1e-4)


@torch.no_grad()
def test_attention_to_the_first_token_is_that_of_transformers(
    pair: dict[str, Model], plain_gpt: tuple[Any, Any]
) -> None:
    model, words = plain_gpt
    first = []
    for text in sentences("en"):
        layers = model(**words(text, return_tensors="pt"), output_attentions=True).attentions
        first.append(torch.cat(layers)[:, :, 2:, 0].mean(-1).numpy())
    claim = computed_claim("sink", Subject(pair[GPT], "en"))
    assert claim.values["first"] == pytest.approx(np.mean(first), abs=1e-4)
    assert claim.values["heads"] == (np.mean(first, 0) > 0.5).mean()
    assert claim.values["later"] == 0


@torch.no_grad()
def test_temperature_and_loss_are_those_of_transformers(
    pair: dict[str, Model], plain_gpt: tuple[Any, Any]
) -> None:
    model, words = plain_gpt
    found = computed_claim("temperature", Subject(pair[GPT], "ko")).values
    entropy = []
    best = []
    for text in sentences("ko"):
        given = words(" ".join(text.split()[:4]), return_tensors="pt")
        chances = (model(**given).logits[0, -1] / 2).softmax(-1)
        entropy.append(float(-(chances * chances.log2()).sum()))
        best.append(float(chances.max()))
    assert found["hotentropy"] == pytest.approx(np.mean(entropy), abs=1e-3)
    assert found["hot"] == pytest.approx(np.mean(best), abs=1e-4)
    nats = []
    for text in sentences("ko"):
        ids = torch.tensor([[words.eos_token_id, *words(text).input_ids]])
        logprobs = model(ids).logits[0, :-1].log_softmax(-1)
        nats += [-float(row[i]) for row, i in zip(logprobs, ids[0, 1:], strict=True)]
    found = computed_claim("loss", Subject(pair[GPT], "ko")).values
    assert found["loss"] == pytest.approx(np.mean(nats), abs=1e-3)


def test_pairs_of_a_band_are_counted_one_by_one(pair: dict[str, Model]) -> None:
    def pairs(length: int, band: int) -> int:
        return sum(min(query + 1, band) for query in range(length))

    found = computed_claim("cost", Subject(pair[GPT], "en")).values
    assert found["band"] == pairs(4096, 256) / pairs(2048, 256)
    assert found["full"] == pairs(4096, 4096) / pairs(2048, 2048)
    assert found["share"] == pairs(2048, 256) / pairs(2048, 2048)


def test_rounded_matrices_have_few_levels_a_row(pair: dict[str, Model]) -> None:
    network = pair[GPT].network
    small = rounded(network, 4)
    for weight, other in zip(network.parameters(), small.parameters(), strict=True):
        if weight.ndim == 2:
            step = weight.abs().amax(1, keepdim=True).clamp(min=1e-8) / 7
            assert torch.allclose(other, (weight / step).round() * step, atol=1e-6)
            assert len(other[0].unique()) <= 15
        else:
            assert torch.equal(weight, other)


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_lesson_has_a_sentence_for_what_is_found(
    pair: dict[str, Model], language: str
) -> None:
    check_lessons(pair, language, ANSWERS)


@pytest.mark.heavy
@pytest.mark.parametrize("language", LANGUAGES)
def test_all_texts_of_the_lessons_give_the_answers(
    pair: dict[str, Model], language: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "TEXTS", ALL_TEXTS)
    forget()
    check_lessons(pair, language, ANSWERS | {"neighbour": "less"})
    forget()


def check_lessons(pair: dict[str, Model], language: str, answers: dict[str, str]) -> None:
    words = lesson(language)
    for one in lesson("hour"):
        name = GPT if one.get("kind", "causal") == "causal" else BERT
        other = pair[BERT] if one.get("compare") == "masked" else None
        claim = computed_claim(one["claim"], Subject(pair[name], language, other))  # type: ignore[arg-type]
        said = words[one["id"]]
        assert claim.answer in said["options"], one["id"]
        assert answers.get(one["claim"], claim.answer) == claim.answer
        for sentence in said["found"].values():
            assert set(re.findall(r"\{([a-z]+)", sentence)) <= set(claim.values), one["id"]
        assert set(claim.bars) <= set(said.get("bars", claim.bars)), one["id"]


def test_lessons_are_the_same_in_both_languages() -> None:
    english, korean = (lesson(name) for name in LANGUAGES)
    records = lesson("hour")
    assert list(english) == list(korean) == [one["id"] for one in records]
    assert sum(one["minutes"] for one in records) == 60
    assert {one["claim"] for one in records} == set(CLAIMS)
    for id, one in english.items():
        for part in ("options", "found", "bars"):
            assert list(one.get(part, ())) == list(korean[id].get(part, ())), id
        for outcome, sentence in one["found"].items():
            names = [
                set(re.findall(r"\{([a-z]+)", words))
                for words in (sentence, korean[id]["found"][outcome])
            ]
            assert names[0] == names[1], (id, outcome)


def test_a_claim_of_a_model_that_cannot_carry_it_is_refused(pair: dict[str, Model]) -> None:
    with Live(pair) as server:
        body = {"claim": "nsp", "model": GPT}
        answer = httpx.post(f"{server.url}/studio/claims", json=body, timeout=60)
        assert answer.status_code == 400
        assert "nsp" in answer.json()["error"]["message"]
        answer = httpx.post(f"{server.url}/studio/claims", json={"claim": "nspp"}, timeout=60)
        assert "nsp" in answer.json()["error"]["message"]
        body = {"claim": "future", "model": GPT, "other": BERT, "language": "ko"}
        answer = httpx.post(f"{server.url}/studio/claims", json=body, timeout=60).json()
        assert answer["answer"] == "bert"
        assert answer["values"]["gpt"] < 1e-5 < answer["values"]["bert"]
