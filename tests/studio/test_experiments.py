"""Break it, and the other experiments of the studio: every number is the model's own."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from live_server import TEXTS, Live, bert_with, gpt_folder
from malmoi import Intervention, MalmoiError
from malmoi.evaluation.evaluate import evaluate_model
from malmoi.inference import Model, load
from malmoi.interpret.probe import probe_model
from malmoi.studio import ablation
from malmoi.tokenizer import train_tokenizer

TEXT = "the state of the union"
OTHER = "the state is a small"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    pieces = train_tokenizer(TEXTS, kind="wordpiece", vocab=160)
    return {
        "gpt": load(gpt_folder(tmp_path_factory.mktemp("gpt"), n_layer=2), device="cpu"),
        "bert": bert_with(pieces, mlm=0),
        "mood": bert_with(pieces, ("bad", "good"), classify=2),
    }


@pytest.fixture(scope="module")
def live(models: dict[str, Model]) -> Iterator[Live]:
    with Live(models) as server:
        yield server


def asked(live: Live, path: str, status: int = 200, **body: Any) -> Any:
    answer = httpx.post(f"{live.url}/studio/{path}", json=body, timeout=60)
    assert answer.status_code == status, answer.text
    return answer.json()


def chances(some: list[dict[str, Any]]) -> list[float]:
    return [one["probability"] for one in some]


def test_the_answer_before_and_after_is_the_models(live: Live, models: dict[str, Model]) -> None:
    off = [{"site": "head", "layer": 0, "head": 1}, {"site": "mlp", "layer": 1}]
    found = asked(live, "ablation", model="gpt", text=TEXT, interventions=off, top=3)
    gpt = models["gpt"]
    before = gpt.run(TEXT, top=3)
    after = gpt.run(TEXT, [Intervention(**one) for one in off], top=3)
    assert chances(found["before"][0]) == pytest.approx(
        [one.probability for one in before.guesses[0]]
    )
    assert chances(found["after"][0]) == pytest.approx(
        [one.probability for one in after.guesses[0]]
    )
    first, second = (np.exp(x) / np.exp(x).sum() for x in (before.logits[0], after.logits[0]))
    assert found["moved"] == pytest.approx([float(np.abs(first - second).sum() / 2)], abs=1e-5)
    mask = [{"site": "mask", "pattern": "causal"}]
    found = asked(live, "ablation", model="bert", text="the [MASK] of", interventions=mask)
    expected = models["bert"].run("the [MASK] of", [Intervention("mask", pattern="causal")])
    assert chances(found["after"][0]) == pytest.approx(
        [one.probability for one in expected.guesses[0]]
    )


def test_the_maps_are_the_models(live: Live, models: dict[str, Model]) -> None:
    rows = [TEXT, OTHER]
    found = asked(live, "importance", model="gpt", rows=rows)
    expected = models["gpt"].head_importance(rows)
    assert np.allclose(found["heads"], expected.heads, atol=1e-6)
    labelled = asked(live, "importance", model="mood", rows=[f"{TEXT}\tgood"], method="gradient")
    assert np.shape(labelled["heads"]) == (2, 2)
    size = min(len(models["gpt"].tokens(text)) for text in rows)
    words = models["gpt"].tokenizer
    one, other = (words.decode(words.encode(text).tokens[:size]) for text in rows)
    found = asked(live, "patching", model="gpt", source=one, text=other)
    expected_map = models["gpt"].patching_map(one, other)
    assert np.allclose(found["recovered"], expected_map.recovered, atol=1e-4)


def test_words_are_coloured_by_their_attribution(live: Live, models: dict[str, Model]) -> None:
    for method in ("leave-one-out", "gradient"):
        found = asked(live, "attributions", model="mood", text=TEXT, method=method)
        expected = models["mood"].attributions(TEXT, method=method)
        assert found["target"] == expected.target
        assert [piece["score"] for piece in found["pieces"]] == pytest.approx(
            [piece.score for piece in expected.pieces], abs=1e-6
        )


def test_tested_rows_are_those_that_fine_tuning_wrote(tmp_path: Path) -> None:
    pieces = train_tokenizer(TEXTS, kind="wordpiece", vocab=160)
    bert_with(pieces, ("bad", "good"), classify=2).save(tmp_path)
    model = load(tmp_path, device="cpu")
    assert ablation.view_of_tested(model)["rows"] == []
    rows = [("good", "good", 0.9), ("good", "bad", 0.2), ("bad", "bad", 0.7)]
    lines = [
        {"text": TEXT, "label": label, "prediction": said, "probabilities": {label: chance}}
        for label, said, chance in rows
    ]
    file = tmp_path / "predictions.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    found = ablation.view_of_tested(model)
    assert found["labels"] == ["bad", "good"]
    assert found["confusion"] == [[1, 0], [1, 1]]
    assert [row["chance"] for row in found["rows"]] == [0.2, 0.7, 0.9]
    file.write_text('{"text": "a", "label": "good"}\n', "utf-8")
    with pytest.raises(MalmoiError, match="prediction"):
        ablation.view_of_tested(model)


def test_a_probe_reads_pasted_lines_of_either_kind(live: Live, models: dict[str, Model]) -> None:
    pairs = [("the state", "a"), ("small model", "b"), ("the union", "a"), ("a small", "b")] * 8
    found = asked(
        live, "probe", model="bert", lines="\n".join(f"{text}\t{label}" for text, label in pairs)
    )
    expected = probe_model(models["bert"], pairs)
    assert [one["accuracy"] for one in found["layers"]] == [one.accuracy for one in expected.layers]
    few = asked(live, "probe", 400, model="bert", lines="the state\ta\na small\tb")
    assert "too few" in few["error"]["message"]
    found = asked(live, "probe", model="bert", lines="", language="ko")
    assert (found["train"], found["test"]) == (320, 80)
    assert found["labels"] == ["뒤섞은 말", "문장"]
    word = "1\tstate\t_\tNOUN\t_\t_\t0\troot\t_\t_\n2\tis\t_\tVERB\t_\t_\t0\troot\t_\t_\n\n"
    found = asked(live, "probe", model="bert", lines=word * 6)
    assert found["labels"] == ["NOUN", "VERB"]


def test_a_snapshot_is_replayed_as_that_model(tmp_path: Path, models: dict[str, Model]) -> None:
    for step in (1, 4):
        models["gpt"].save(tmp_path / "run" / "snapshots" / f"{step:06d}")
    rows = [{"step": n, "tokens": 8 * n, "seconds": n, "loss": 5 - n} for n in (1, 2, 3, 4)]
    (tmp_path / "run" / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), "utf-8"
    )
    file = tmp_path / "kontrast.csv"
    judged = [("the state of", "the of state", "A"), ("is the union", "the union is", "B")]
    lines = [f"{i},{','.join(row)}" for i, row in enumerate(judged)]
    file.write_text("\n".join(["id,sentence_A,sentence_B,gold_label", *lines]), "utf-8")
    with Live({"bert": models["bert"]}, runs=tmp_path, pairs=(file,)) as server:
        (run,) = httpx.get(f"{server.url}/studio/snapshots").json()["runs"]
        assert (run["name"], run["steps"]) == ("run", [1, 4])
        assert run["places"] == [[8.0, 4.0], [32.0, 1.0]]
        found = asked(server, "replay", run="run", step=4, text=TEXT)
        gpt = models["gpt"]
        best = gpt.run(TEXT, top=5).guesses[0]
        assert chances(found["lens"]["layers"][-1][-1]) == pytest.approx(
            [one.probability for one in best], abs=1e-5
        )
        assert found["sample"] == gpt.generate(TEXT, max_new_tokens=24, temperature=0)
        weights = np.array(found["attention"]["weights"])
        assert np.allclose(weights, gpt.attention(TEXT)[0, 0], atol=1e-4)
        sets = httpx.get(f"{server.url}/studio/pairs").json()["sets"]
        assert [(one["name"], one["pairs"]) for one in sets] == [
            ("en", 64),
            ("ko", 64),
            ("kontrast.csv", 2),
        ]
        scored = asked(server, "pairs", run="run", step=4, pairs="ko")
        rows = [{"phenomenon": one["phenomenon"], **one} for one in scored["pairs"]]
        alone = evaluate_model(gpt, "blimp", rows)
        assert scored["accuracy"] == {
            name: alone[name] for name in {row["phenomenon"] for row in rows}
        }
        scored = asked(server, "pairs", run="run", step=1, pairs="kontrast.csv")
        assert scored["accuracy"] == {"": evaluate_model(gpt, "kontrast", file)["accuracy"]}
        assert scored["pairs"][1]["good"] == "the union is"
        assert (
            "Known: en, ko"
            in asked(server, "pairs", 400, run="run", step=1, pairs="x")["error"]["message"]
        )
        wrong = asked(server, "replay", 400, run="../run", step=4, text=TEXT)
        assert "no snapshot" in wrong["error"]["message"]


def test_unsupported_requests_give_a_clear_error(live: Live, tmp_path: Path) -> None:
    wrong = asked(live, "patching", 400, model="gpt", source=TEXT, text=TEXT + " is strong")
    assert wrong["error"]["code"] == "lengths_differ"
    wrong = asked(live, "importance", 400, model="mood", rows=[TEXT])
    assert "a tab and its label" in wrong["error"]["message"]
    layer = [{"site": "mlp", "layer": 9}]
    wrong = asked(live, "ablation", 400, model="gpt", text=TEXT, interventions=layer)
    assert "no layer 9" in wrong["error"]["message"]
