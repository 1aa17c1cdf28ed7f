"""Writing: prompts and answers from the file to the folder; packed, predicted, chatted with."""

import gzip
import itertools
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import malmoi
from malmoi import finetune
from malmoi.checkpoint import Checkpoint, write_checkpoint
from malmoi.cli import run_command
from malmoi.errors import MalmoiError, UsageError
from malmoi.evaluation.examples import load_examples
from malmoi.evaluation.features import FeatureView
from malmoi.evaluation.guess import guess_task
from malmoi.evaluation.kinds import encode_examples
from malmoi.finetuning.trainer import collate
from malmoi.inference.predict import Predictor
from malmoi.model import Network, initialise, preset
from malmoi.tokenizer import train_tokenizer
from malmoi.tokenizer.chat_template import with_template
from malmoi.training.losses import IGNORE_LABEL, ForwardPass
from malmoi.training.losses.task import answer_loss
from tiny_models import tiny_gpt

COLOURS = {"red": "rot", "blue": "blau", "green": "grün", "grey": "grau"}
THINGS = {"car": "Auto", "book": "Buch"}
PAIRS = [(f"a {c} {t}", f"ein {COLOURS[c]}es {THINGS[t]}") for c in sorted(COLOURS) for t in THINGS]
QUICK: dict[str, Any] = dict(epochs=1, lr=1e-2, batch=8, precision="fp32", warmup=0.1)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return path


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = [text for pair in PAIRS for text in pair] + ["User: Assistant:\n"] * 3
    sizes = dict(context=64, width=32, depth=1, heads=2, init_std=0.1)
    still = dict(dropout=0.0, attention_dropout=0.0)
    return tiny_gpt(tmp_path_factory.mktemp("gpt"), texts, 330, **sizes, **still)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [{"prompt": prompt, "answer": answer} for prompt, answer in PAIRS]
    folder = tmp_path_factory.mktemp("rows")
    write_rows(folder / "many.jsonl", 60 * rows)  # few epochs, so few evaluations
    return write_rows(folder / "pairs.jsonl", rows)


@pytest.fixture(scope="module")
def tuned(gpt: Path, pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tuned") / "out"
    done = finetune(gpt, "writing", pairs.with_name("many.jsonl"), out, pairs, **QUICK)
    assert done.metrics["match"] == 1, done.metrics
    assert done.metrics["answer_loss"] < 0.2 < done.metrics["answer_loss_untuned"]
    assert done.metrics["chrf"] > 99
    assert done.metrics["bleu_copying"] == 0
    return out


def test_a_recurrent_model_reads_each_conversation_in_a_row_of_its_own(tmp_path: Path) -> None:
    words = train_tokenizer(["a b c d e"] * 3, kind="byte-bpe", vocab=300)
    config = preset("lstm", vocab=words.vocab_size, context=128, width=16, depth=1)
    write_checkpoint(
        Checkpoint(initialise(Network(config, {"lm": 0}), 0), words), tmp_path / "lstm"
    )
    rows = [{"prompt": prompt, "answer": "b"} for prompt in ("a", "a", "a b c d e " * 5)]
    done = finetune(
        tmp_path / "lstm", "writing", rows, tmp_path / "out", rows, steps=1, batch=3, device="cpu"
    )
    assert done.steps == 1


def test_few_rows_are_written_often_enough_to_be_learnt(
    gpt: Path, pairs: Path, tmp_path: Path
) -> None:
    finetune(gpt, "writing", pairs, tmp_path / "few", pairs, steps=1)
    finetune(gpt, "writing", pairs, tmp_path / "own", pairs, steps=1, epochs=2, batch=3)
    for name, chosen in (("few", (15, 8)), ("own", (2, 3))):
        used = json.loads((tmp_path / name / "finetune.json").read_text("utf-8"))
        assert (used["epochs"], used["batch"]) == chosen


def chat_reader(gpt: Path) -> Predictor:
    """The model with the template it would get."""
    found = malmoi.load(gpt).checkpoint
    assert found.tokenizer is not None
    ends = (found.tokenizer.specials.eos or 0,)
    return Predictor(found.network, with_template(found.tokenizer), ends=ends)


def test_only_answers_are_learnt_and_every_turn_of_a_conversation(
    gpt: Path, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a red car"},
        {"role": "assistant", "content": "ein rotes Auto"},
        {"role": "user", "content": "a blue book"},
        {"role": "assistant", "content": "ein blaues Buch"},
    ]
    path = write_rows(tmp_path / "chat.jsonl", [{"messages": messages}])
    reading = chat_reader(gpt)
    task = guess_task("writing", path)[0]
    items = encode_examples(task, load_examples(task, path).rows, FeatureView.of(reading, ()))
    tokens = items[0].rows[0].tokens
    learnt = [label for label in items[0].label if label != IGNORE_LABEL]
    end = reading.tokenizer.token(reading.ends[0])
    assert reading.tokenizer.decode(learnt) == " ein rotes Auto ein blaues Buch"
    assert learnt.count(reading.ends[0]) == 2
    assert items[0].label[-1] == IGNORE_LABEL
    assert tokens[-1] == reading.ends[0]
    folder = tmp_path / "tokenizer"
    reading.tokenizer.save(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ids = theirs.apply_chat_template(messages, return_dict=False)
    assert theirs.decode(ids) == (
        "be brief\n\nUser: a red car\nAssistant: ein rotes Auto"
        f"{end}\nUser: a blue book\nAssistant: ein blaues Buch{end}\n"
    )
    assert ids[: len(tokens)] == tokens.tolist()


def test_packed_rows_do_not_see_each_other(gpt: Path, pairs: Path) -> None:
    reading = chat_reader(gpt)
    task = guess_task("write", pairs)[0]
    items = encode_examples(task, load_examples(task, pairs).rows, FeatureView.of(reading, ()))
    items[0] = type(items[0])(tuple(_longer(row) for row in items[0].rows), items[0].label * 2)
    network = reading.network.eval()

    def loss(some: list[Any]) -> tuple[float, int]:
        batch = collate(some, network.config)
        done = ForwardPass.of(network, batch)
        return float(answer_loss().terms[0].total(done)), len(batch["tokens"])

    with torch.no_grad():
        together, rows = loss(items)
        alone = [loss([item])[0] for item in items]
    assert rows < len(items)
    assert together == pytest.approx(sum(alone), rel=1e-5)


def _longer(row: Any) -> Any:
    tokens = np.tile(row.tokens, 2)
    return type(row)(tokens, np.zeros_like(tokens))


def test_a_folder_predicts_chats_and_opens_in_transformers(tuned: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = malmoi.load(tuned)
    assert {"predict", "chat"} <= set(model.abilities)
    assert model.predict("a red car").text == "ein rotes Auto"  # type: ignore[union-attr]
    assert model.predict([{"prompt": "a grey book"}])[0].text == "ein graues Buch"
    assert model.chat("a red car", temperature=0) == "ein rotes Auto"
    tokenizer = transformers.AutoTokenizer.from_pretrained(tuned)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tuned)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "a blue book"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    said = theirs.generate(**asked, max_new_tokens=16, do_sample=False)[0]
    words = tokenizer.decode(said[asked["input_ids"].shape[1] :], skip_special_tokens=True)
    assert words.strip() == "ein blaues Buch"


def test_files_of_prompts_are_answered_and_evaluated(
    tuned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "new.csv"
    rows.write_text("prompt,answer\na red car,ein rotes Auto\na grey book,ein Buch\n", "utf-8")
    out = tmp_path / "said.jsonl"
    code = run_command(["predict", "-m", str(tuned), "--data", str(rows), "-o", str(out)])
    assert code == 0
    said = [json.loads(line)["prediction"] for line in out.read_text("utf-8").splitlines()]
    assert said == ["ein rotes Auto", "ein graues Buch"]
    capsys.readouterr()
    assert run_command(["evaluate", "-m", str(tuned), str(rows), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["match"], found["examples"]) == (0.5, 2)
    assert 0 < found["chrf"] < 100


def test_an_adapter_learns_to_write(gpt: Path, pairs: Path, tmp_path: Path) -> None:
    done = finetune(gpt, "write", pairs, tmp_path / "out", pairs, adapter="lora", steps=6, batch=12)
    assert done.metrics["answer_loss"] < done.metrics["answer_loss_untuned"]
    again = malmoi.load(tmp_path / "out")
    assert again.tokenizer.chat_template
    assert again.predict("a red car") == done.model.predict("a red car")


def test_usual_columns_are_known(tmp_path: Path) -> None:
    said = "ein Auto"
    turns = [{"from": "human", "value": "a car"}, {"from": "gpt", "value": said}]
    rows: list[tuple[dict[str, Any], str, str | None]] = [
        ({"instruction": "in German", "input": "a car", "output": said}, "in German", "a car"),
        ({"question": "a car", "answer": said}, "a car", None),
        ({"source": "a car", "target": said}, "a car", None),
        ({"document": "a car", "summary": said}, "a car", None),
        ({"conversations": turns}, "a car", None),
    ]
    for row, text, pair in rows:
        path = write_rows(tmp_path / "rows.jsonl", [row])
        found = load_examples(guess_task(None, path)[0], path).rows[0]
        assert (found.text, found.pair, found.label) == (text, pair, (said,))


def test_long_rows_are_counted(gpt: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    long = "a red car " * 40
    rows = [
        {"prompt": "a red car", "answer": "ein rotes Auto"},
        {"prompt": long, "answer": "ein rotes Auto"},
        {"prompt": "a red car", "answer": long},
    ]
    path = write_rows(tmp_path / "long.jsonl", rows)
    with caplog.at_level(logging.WARNING):
        done = finetune(gpt, "writing", path, tmp_path / "out", path, steps=1, batch=3)
    said = caplog.text
    assert "1 of 3 prompts do not fit with their answers into 64 tokens" in said
    assert "1 of 3 answers do not fit into 64 tokens and are truncated at the end" in said
    assert done.model.predict(long) is not None  # a prompt that fills the context is cut too
    for more in range(3):  # each character is three tokens, of which one or two do not fit
        assert done.model.predict("뷁" * 40 + "a" * more) is not None
    turns = [{"role": role, "content": "a red car"} for role in ("user", "assistant")]
    chats = [{"messages": turns}, {"messages": [{"role": "user", "content": long}, *turns[1:] * 2]}]
    path = write_rows(tmp_path / "chats.jsonl", chats)
    with caplog.at_level(logging.INFO):
        done = finetune(gpt, "writing", path, tmp_path / "chat", path, steps=1, batch=2)
    assert "1 of 2 rows are skipped, the first at" in caplog.text
    assert "Training on 1 row; evaluation on 2 rows" in caplog.text
    assert done.protocol.trained_on == 1


def test_unlearnable_rows_give_a_clear_error(gpt: Path, pairs: Path, tmp_path: Path) -> None:
    unanswered = write_rows(tmp_path / "none.jsonl", [{"prompt": "a", "answer": ""}] * 2)
    with pytest.raises(MalmoiError, match=r"none.jsonl:1: the answer in 'answer' is missing"):
        finetune(gpt, "writing", unanswered, tmp_path / "out")
    silent = [{"messages": [{"role": "user", "content": "a"}]}] * 2
    with pytest.raises(MalmoiError, match="has no label"):
        finetune(gpt, "writing", write_rows(tmp_path / "silent.jsonl", silent), tmp_path / "out")
    with pytest.raises(UsageError, match="writing adds no layer"):
        finetune(gpt, "writing", pairs, tmp_path / "out", freeze=True)
    with pytest.raises(MalmoiError, match="No answer fits with its prompt into 4 tokens"):
        finetune(gpt, "writing", pairs, tmp_path / "out", length=4)
    assert not (tmp_path / "out").exists()


@pytest.mark.heavy
def test_captions_are_translated_better_than_by_copying(shared: Path, tmp_path: Path) -> None:
    """Short English captions into German, from random weights in about a minute of a CPU."""
    english, german = (
        gzip.decompress((shared / f"data/mt/multi30k.train.{name}.gz").read_bytes()).decode()
        for name in ("en", "de")
    )
    pairs = zip(english.split("\n"), german.split("\n"), strict=True)
    pairs_by_length = sorted(pairs, key=lambda pair: len(pair[0]))
    short = [pair for pair in pairs_by_length if len(pair[0]) > 8][:3000]
    words = train_tokenizer([text for pair in short for text in pair], kind="byte-bpe", vocab=1500)
    config = preset(
        "gpt2-small", vocab=words.vocab_size, context=64, width=96, depth=2, heads=4, init_std=0.05,
        dropout=0.1, attention_dropout=0.0,
    )  # fmt: skip
    write_checkpoint(Checkpoint(initialise(Network(config, {"lm": 0}), 0), words), tmp_path / "gpt")
    rows = [{"prompt": en, "answer": de} for en, de in short]
    judged = rows[::30]
    learnt = [row for i, row in enumerate(rows) if i % 30]
    done = finetune(
        tmp_path / "gpt", "writing", learnt, tmp_path / "out", judged, epochs=6, lr=4e-3, batch=32
    )
    assert done.metrics["bleu"] > 12  # 24 after eight epochs; copying: 0.2
    assert max(done.metrics["bleu_copying"], done.metrics["bleu_untuned"]) < 1
    assert done.metrics["chrf"] > 35


@pytest.mark.heavy
def test_a_few_conversations_make_a_chat_model(gpt: Path, tmp_path: Path) -> None:
    """Two turns, each answered by what was asked in it, through the template of the folder."""
    rows = []
    for (first, said), (second, answered) in itertools.product(PAIRS, PAIRS):
        turns = (("user", first), ("assistant", said), ("user", second), ("assistant", answered))
        rows.append({"messages": [{"role": role, "content": text} for role, text in turns]})
    done = finetune(gpt, None, rows, tmp_path / "out", rows[::8], epochs=40, lr=1e-2, batch=16)
    assert done.metrics["match"] > 0.9
    model = malmoi.load(tmp_path / "out")
    said = [{"role": "user", "content": "a red car"}]
    assert model.chat(said, temperature=0) == "ein rotes Auto"
    said += [
        {"role": "assistant", "content": "ein rotes Auto"},
        {"role": "user", "content": "a grey book"},
    ]
    assert model.chat(said, temperature=0) == "ein graues Buch"
