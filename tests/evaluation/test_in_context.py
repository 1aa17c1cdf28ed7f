"""Prompts instead of training: what is shown, how answers are compared, and the same numbers as
lm-eval and HF.
"""

import json
import math
import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from hypothesis import given, settings, strategies as st

import malmoi
from malmoi.cli import run_command
from malmoi.errors import MalmoiError, UsageError
from malmoi.evaluation.examples import generate_examples, load_examples
from malmoi.evaluation.in_context.graders import cross_thresholded, measure_with_error
from malmoi.evaluation.in_context.run import (
    InContextConfig,
    InContextResult,
    QuestionBuilder,
    draw_examples,
    evaluate_in_context,
    is_same_question,
    lazy_permutation,
    parse_shots,
)
from malmoi.evaluation.kinds import task_prompt
from malmoi.evaluation.prompts import answer_cue, templated, templates
from malmoi.evaluation.tasks import TASKS, Example, named_task
from malmoi.inference import Model, load
from malmoi.inference.pseudo_likelihood import SplitText, pseudo_scores
from malmoi.inference.zero_shot import first_sentences
from malmoi.metrics.texts import bleu, chrf, match, rouge_l, span_exact
from malmoi.tokenizer import train_tokenizer

TEXTS = [
    "the man turned on the tap so water flowed out",
    "we must act now , said Alice in Seoul",
    "좋은 영화다 나쁜 글",
]
torch.set_num_threads(1)


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(TEXTS[0].split(), k=count))


@pytest.fixture(scope="session")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, tokenizer = (
        tmp_path_factory.mktemp("gpt"),
        train_tokenizer(TEXTS * 4, kind="byte-bpe", vocab=320),
    )
    torch.manual_seed(0)
    ends = dict(bos_token_id=tokenizer.specials.eos, eos_token_id=tokenizer.specials.eos)
    shape: dict[str, Any] = dict(
        n_positions=128, n_embd=32, n_layer=2, n_head=2, initializer_range=0.3
    )
    hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=tokenizer.vocab_size, **shape, **ends)
    ).save_pretrained(folder)
    tokenizer.save(folder)
    return folder


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, tokenizer = (
        tmp_path_factory.mktemp("bert"),
        train_tokenizer(TEXTS * 4, kind="wordpiece", vocab=150),
    )
    torch.manual_seed(1)
    shape: dict[str, Any] = dict(num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    sizes = dict(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        max_position_embeddings=96,
        initializer_range=0.3,
    )
    hf.BertForMaskedLM(hf.BertConfig(**shape, **sizes)).save_pretrained(folder)
    tokenizer.save(folder)
    return folder


@pytest.fixture(scope="session")
def copa(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng, path = random.Random(0), tmp_path_factory.mktemp("data") / "copa.jsonl"
    rows = [
        {
            "query": words(rng, 4),
            "choices": [words(rng, 2), words(rng, 5)],
            "gold": rng.randrange(2),
        }
        for _ in range(24)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def result(model: Path, name: str, data: Path | None, **asking: Any) -> InContextResult:
    return next(
        iter(
            evaluate_in_context(
                load(model, device="cpu"), named_task(name), data, InContextConfig(**asking)
            )
        )
    )


# ------------------------------------------------------------------ which examples are shown


@given(st.integers(0, 50), st.integers())
def test_a_shuffle_that_is_drawn_bit_by_bit_is_a_permutation(size: int, seed: int) -> None:
    assert sorted(lazy_permutation(size, random.Random(seed))) == list(range(size))


TWINS = st.lists(st.sampled_from("abcde"), min_size=1, max_size=12)


@given(TWINS, st.integers(0, 5), st.data())
def test_an_item_is_never_shown_to_itself(texts: list[str], seed: int, data: st.DataObject) -> None:
    """Nor is a copy of it elsewhere; nothing is shown twice, and the seed decides."""
    pool = [Example(text, label=(text,), place=str(i)) for i, text in enumerate(texts)]
    number = data.draw(st.integers(0, len(pool) - 1))
    shown = list(draw_examples(pool, pool[number], seed, number))
    assert not any(is_same_question(one, pool[number]) for one in shown)
    assert (
        len({one.place for one in shown})
        == len(shown)
        == sum(text != texts[number] for text in texts)
    )
    assert shown == list(draw_examples(pool, pool[number], seed, number))


def test_the_number_of_examples() -> None:
    assert parse_shots("0, 4,max") == [0, 4, None]
    with pytest.raises(UsageError, match=r"must be 0, 1, 2… or max, not 'few'"):
        parse_shots("few")


@given(st.text(), st.text())
def test_a_prompt_holds_its_texts_unchanged(text: str, pair: str) -> None:
    """Braces in a text are no template."""
    prompt = task_prompt(named_task("rte"), Example(text, pair, "entailment"))
    assert prompt.query == f"{text}\nQuestion: {pair} True or False?\nAnswer:"
    assert prompt.shown == prompt.query + " True"


def test_as_many_examples_as_fit(gpt: Path, copa: Path) -> None:
    model = load(gpt, device="cpu")
    rows = load_examples(named_task("copa"), copa).rows
    asker = QuestionBuilder(named_task("copa"), model, rows, None)
    for number, item in enumerate(rows[:6]):
        question = asker.build(item, number)
        longest = max(question.prompt.choices, key=len)
        assert len(model.tokenizer.encode(question.before + longest).tokens) <= model.config.context
        # one more would not
        with pytest.raises(UsageError, match=r"cannot be shown: .* Use fewer"):
            QuestionBuilder(named_task("copa"), model, rows, question.shots + 1).build(item, number)
        assert question == QuestionBuilder(named_task("copa"), model, rows, question.shots).build(
            item, number
        )


def test_every_template_asks_its_task() -> None:
    for name, known in templates().items():
        for template in known:
            asked = templated(TASKS[name], template)
            assert "{text}" in asked.prompt
            assert set(asked.labels) <= set(asked.answers)
    assert answer_cue(named_task("klue-nli")) == "답:"
    with pytest.raises(UsageError, match=r"no template 'clozé'\. Did you mean 'cloze'"):
        templated(named_task("sst2"), "clozé")


def test_a_custom_template_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('prompt = "{text} So"\nanswers = { 0 = "bad", 1 = "good" }\n', "utf-8")
    assert (
        task_prompt(templated(named_task("sst2"), str(path)), Example("Oh.", label="1")).shown
        == "Oh. So good"
    )
    path.write_text('answers = { 0 = "bad" }\n', "utf-8")
    with pytest.raises(UsageError, match="has no answer for the label '1'"):
        templated(named_task("sst2"), str(path))


# ------------------------------------------------------------------ what is drawn


@given(st.integers(), st.sampled_from(["2d+", "3d-", "4d+", "5d-", "2dx"]))
@settings(max_examples=10, deadline=None)
def test_sums_are_right_and_within_their_digits(seed: int, name: str) -> None:
    rows = generate_examples(named_task(name), seed).rows
    assert len(rows) == 2000
    signs = {"plus": "+", "minus": "-", "times": "*"}
    for row in rows[:50]:
        a, word, b = re.fullmatch(r"What is (\d+) (\w+) (\d+)\?", row.text).groups()  # type: ignore[union-attr]
        assert max(int(a), int(b)) < 10 ** int(name[0])
        assert row.label == (str(eval(f"{a}{signs[word]}{b}")),)
    assert rows == generate_examples(named_task(name), seed).rows


def test_three_digits_have_parentheses_around_the_last_two() -> None:
    for row in generate_examples(named_task("1dc"), 3).rows[:100]:
        sum_ = re.fullmatch(r"What is (\d[+*-]\(\d[+*-]\d\))\?", row.text)
        assert sum_ is not None
        assert row.label == (str(eval(sum_[1])),)


def test_scrambled_words_keep_their_letters(tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    path.write_text("inevitably corruption opponent succession objects of the\n" * 3, "utf-8")
    mixed = {
        name: load_examples(named_task(name), path).rows
        for name in (
            "cycle-letters",
            "anagram-1",
            "anagram-2",
            "random-insertion",
            "reversed-words",
        )
    }
    for name, rows in mixed.items():
        assert {row.label[0] for row in rows} == {
            "inevitably",
            "corruption",
            "opponent",
            "succession",
            "objects",
        }
        for row in rows:
            kept = re.sub(r"[.!/ ]", "", row.text) if name == "random-insertion" else row.text
            assert sorted(kept) == sorted(row.label[0])
    assert all(
        row.text in row.label[0] * 2 and row.text != row.label[0] for row in mixed["cycle-letters"]
    )
    assert all(
        row.text[:2] + row.text[-2:] == row.label[0][:2] + row.label[0][-2:]
        for row in mixed["anagram-2"]
    )
    assert all(row.text[::2] == row.label[0] for row in mixed["random-insertion"])
    assert all(row.text[::-1] == row.label[0] for row in mixed["reversed-words"])


# ------------------------------------------------------------------ likelihoods


@torch.inference_mode()
def test_choices_are_compared_as_transformers_would(gpt: Path, copa: Path) -> None:
    theirs, ours = hf.GPT2LMHeadModel.from_pretrained(gpt).eval(), load(gpt, device="cpu")

    def logprob(before: str, after: str) -> tuple[float, int]:
        start, whole = (ours.tokenizer.encode(text).tokens for text in (before, before + after))
        logs = theirs(torch.tensor([whole])).logits[0].log_softmax(-1)
        return sum(float(logs[t - 1, whole[t]]) for t in range(len(start), len(whole))), len(
            whole
        ) - len(start)

    rows = load_examples(named_task("copa"), copa).rows
    right: dict[str, list[bool]] = {"total": [], "token": [], "byte": [], "unconditional": []}
    for row in rows:
        found = [
            (*logprob(row.text, f" {c}"), len(c), logprob("Answer:", f" {c}")[0])
            for c in row.choices
        ]
        values = {
            "total": [f[0] for f in found],
            "token": [f[0] / f[1] for f in found],
            "byte": [f[0] / f[2] for f in found],
            "unconditional": [f[0] - f[3] for f in found],
        }
        for name, some in values.items():
            right[name].append(int(np.argmax(some)) == row.label)
    facts = result(gpt, "copa", copa).facts
    for name, some in right.items():
        assert facts[f"accuracy_{name}"] == pytest.approx(np.mean(some))
        assert facts[f"accuracy_{name}_error"] == pytest.approx(
            np.std(some, ddof=1) / math.sqrt(len(some))
        )


@torch.inference_mode()
@pytest.mark.parametrize("together", [False, True])
def test_a_bert_scores_by_hiding_tokens(bert: Path, together: bool) -> None:
    theirs, ours = hf.BertForMaskedLM.from_pretrained(bert).eval(), load(bert, device="cpu")
    part = SplitText("the man turned", " on unstoppable taps", " so water flowed")
    (found,) = pseudo_scores(ours.network, ours.tokenizer, [part], together=together)
    encoding = ours.tokenizer.encode(part.before + part.middle + part.after)
    tokens, words = encoding.tokens, encoding.words
    first = len(ours.tokenizer.encode(part.before).tokens) - 1
    places = range(first, first + len(found.tokens))
    assert [ours.tokenizer.token(tokens[p]) for p in places] == list(found.tokens)
    expected = []
    for place in places:
        hidden = torch.tensor([tokens])
        rest = [p for p in places if p >= place and words[p] == words[place]]
        hidden[0, list(places) if together else rest] = ours.tokenizer.specials.mask
        expected.append(float(theirs(hidden).logits[0, place].log_softmax(-1)[tokens[place]]))
    assert found.token_logprobs == pytest.approx(expected, abs=1e-4)


def test_a_text_without_cls_is_scored_from_its_first_token(bert: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(bert, tmp_path / "bare"))
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | {"post_processor": None}))
    ours = load(folder, device="cpu")
    (found,) = pseudo_scores(ours.network, ours.tokenizer, [SplitText("", "the man turned")])
    tokens = ours.tokenizer.encode("the man turned").tokens
    assert list(found.tokens) == [ours.tokenizer.token(token) for token in tokens]


def test_winograd_is_judged_by_the_common_ending(gpt: Path, tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    sentence = {
        "context_options": ["the man hit the tap so the man", "the man hit the tap so the tap"],
        "continuation": "must act",
        "gold": 0,
    }
    path.write_text(json.dumps(sentence) + "\n", "utf-8")
    ours = load(gpt, device="cpu")
    better = max(
        (0, 1), key=lambda i: ours.score(sentence["context_options"][i], " must act").logprob
    )  # type: ignore[index]
    assert result(gpt, "winograd", path).facts["accuracy"] == float(better == 0)


def test_the_last_word_and_its_perplexity(gpt: Path, tmp_path: Path) -> None:
    path = tmp_path / "l.jsonl"
    rows = [("the man turned on the", "tap"), ("we must act", "now")]
    path.write_text(
        "".join(json.dumps({"context": a, "continuation": b}) + "\n" for a, b in rows), "utf-8"
    )
    ours = load(gpt, device="cpu")
    scores = [ours.score(a, f" {b}") for a, b in rows]
    facts = result(gpt, "lambada", path).facts
    assert facts["perplexity"] == pytest.approx(math.exp(-np.mean([s.logprob for s in scores])))
    assert facts["accuracy"] == np.mean([s.greedy for s in scores])


def test_the_perplexity_of_a_text_counts_the_words_of_its_file(gpt: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text(" the man did n't act \n we must act now \n" * 2, "utf-8")
    text = "the man didn't act\nwe must act now\nthe man didn't act\nwe must act now\n"
    scored = load(gpt, device="cpu").score("", text)  # from the token that opens a text, as here
    facts = result(gpt, "ptb", path).facts
    # "n't" and a line's end are words
    assert math.log(facts["perplexity"]) == pytest.approx(-scored.logprob / 22)
    assert math.log(facts["token_perplexity"]) == pytest.approx(
        -scored.logprob / len(scored.tokens)
    )
    assert facts["bits_per_byte"] == pytest.approx(
        -scored.logprob / math.log(2) / len(text.encode())
    )


def test_likelihood_alone_tells_good_sentences_from_bad(gpt: Path, tmp_path: Path) -> None:
    """GPT-1 §5: the mean log-probability of a sentence's tokens against a threshold."""
    scores = np.array([-3.0, -1.0] * 20) + np.linspace(0, 0.5, 40)
    assert (cross_thresholded(scores, np.array([False, True] * 20)) == [False, True] * 20).all()
    path = tmp_path / "cola.tsv"
    rows = [f"x\t{i % 2}\t\t{words(random.Random(i), 3 + i % 5)}" for i in range(30)]
    path.write_text("\n".join(rows), "utf-8")
    found = result(gpt, "cola-likelihood", path)
    assert set(found.verdict.measures) == {"matthews", "accuracy"}
    model = load(gpt, device="cpu")
    texts = [question.example.text for question in found.questions]
    means = [float(np.mean(model.score("", text).token_logprobs)) for text in texts]
    gold = np.array([question.example.label == "1" for question in found.questions])
    said = ["1" if high else "0" for high in cross_thresholded(np.array(means), gold)]
    assert found.verdict.predictions == said


@pytest.mark.parametrize("name", ["gpt", "bert"])
def test_an_answer_longer_than_the_context_is_cut_from_the_left(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """One such item of many: the others count, and it is scored as the harness would do."""
    folder = request.getfixturevalue(name)
    rng = random.Random(0)
    rows = [{"query": words(rng, 5), "choices": [words(rng, 3), words(rng, 4)], "gold": 0}] * 5
    long = words(rng, 400)
    rows.append({"query": words(rng, 300), "choices": [words(rng, 2), long], "gold": 1})
    data = tmp_path / "piqa.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    found = result(folder, "piqa", data)
    assert found.facts["examples"] == 6
    assert found.facts["truncated"] == 1
    assert any("1 of 6 items have an answer that is longer" in note for note in found.notes)
    if name == "gpt":
        network = hf.GPT2LMHeadModel.from_pretrained(folder).eval()
        model = malmoi.load(folder)
        tokens = model.tokenizer.ids([f" {long}"])[0][-129:]
        with torch.no_grad():
            logits = network(torch.tensor([tokens[:-1]])).logits[0].log_softmax(-1)
        expected = logits.gather(1, torch.tensor(tokens[1:])[:, None]).sum()
        score = model.score("the man", f" {long}", cut=True)
        assert score.logprob == pytest.approx(float(expected), rel=1e-4)
        with pytest.raises(UsageError, match="more than a context of"):
            model.score("the man", f" {long}")


def test_numbers_and_labels_in_context(gpt: Path, bert: Path, tmp_path: Path) -> None:
    """Every kind of a fine-tuning task is asked, by a GPT and, where it chooses, by a BERT."""
    sts, ner = tmp_path / "sts.tsv", tmp_path / "ner.txt"
    sts.write_text(
        "sentence1\tsentence2\tscore\n" + "".join(f"a {i}\tb {i}\t{i % 6}\n" for i in range(8)),
        "utf-8",
    )
    ner.write_text("Alice NNP I-NP I-PER\nacts VBZ I-VP O\n\nSeoul NNP I-NP I-LOC\n", "utf-8")
    for model in (gpt, bert):
        found = result(model, "stsb", sts, shots=1)
        assert all(0 <= value <= 5 for value in found.verdict.predictions)
        assert set(found.verdict.measures) == {"spearman", "pearson"}
    found = result(gpt, "conll2003", ner, shots=1)
    assert [len(tags) for tags in found.verdict.predictions] == [2, 1]
    with pytest.raises(
        UsageError, match="answered by generating text, which needs a language model"
    ):
        result(bert, "conll2003", ner)


def test_a_written_answer_is_what_greedy_decoding_says(gpt: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    ours = load(gpt, device="cpu")
    said = ours.generate("the tap =", temperature=0, max_new_tokens=64, stop="\n").strip()
    path.write_text(json.dumps({"source": "the tap", "target": said}) + "\n", "utf-8")
    assert result(gpt, "translation", path).facts["bleu"] == pytest.approx(100)


def test_a_sign_counts_in_a_sum_but_not_in_a_span() -> None:
    assert match([["-19"]], ["19"]) == 0
    assert span_exact([["-19"]], ["19"]) == 1


@given(st.lists(st.booleans(), min_size=2, max_size=40))
def test_the_error_of_a_share(right: list[bool]) -> None:
    found = measure_with_error("accuracy", [True] * len(right), right)
    assert found.mean == pytest.approx(np.mean(right))
    assert found.standard_error == pytest.approx(np.std(right, ddof=1) / math.sqrt(len(right)))


# ------------------------------------------------------------------ oracles


def test_bleu_and_rouge_match_reference_implementations() -> None:
    sacrebleu, rouge = (
        pytest.importorskip("sacrebleu"),
        pytest.importorskip("rouge_score.rouge_scorer"),
    )
    rng, scorer = random.Random(0), rouge.RougeScorer(["rougeL"])
    vocabulary = [
        "the",
        "a",
        "cat,",
        "sat",
        "on-mat.",
        "3,5",
        "(dog)",
        "u.s.",
        "ran's",
        "&",
        "1990-91",
        "$5",
        "now",
    ]
    for _ in range(50):
        golds = [" ".join(rng.choices(vocabulary, k=rng.randint(1, 12))) for _ in range(5)]
        said = [
            " ".join(w if rng.random() < 0.8 else rng.choice(vocabulary) for w in g.split())
            for g in golds
        ]
        assert bleu([[g] for g in golds], said) == pytest.approx(
            sacrebleu.corpus_bleu(said, [golds]).score
        )
        expected = np.mean(
            [scorer.score(g, s)["rougeL"].fmeasure for g, s in zip(golds, said, strict=True)]
        )
        assert rouge_l([[g] for g in golds], said) == pytest.approx(expected)
        assert chrf([[g] for g in golds], said) == pytest.approx(
            sacrebleu.corpus_chrf(said, [golds]).score
        )


def test_texts_are_put_together_and_counted_as_in_the_papers(shared: Path) -> None:
    """Merity et al. 2017 count 245,569 tokens in WikiText-2's test, Mikolov's PTB has 82,430; a
    line's end is one.
    """
    folder = shared / "data" / "lm"
    for name, file, words_ in (
        ("wikitext", "wikitext-2.test.txt.xz", 245_569),
        ("ptb", "ptb.test.txt.xz", 82_430),
    ):
        rows = load_examples(named_task(name), folder / file).rows
        assert sum(len(str(row.pair).split()) + str(row.pair).count("\n") for row in rows) == words_
    process = pytest.importorskip("lm_eval.tasks.wikitext.preprocess_wikitext")
    for row in load_examples(named_task("wikitext"), folder / "wikitext-2.test.txt.xz").rows[:10]:
        assert row.text == process.wikitext_detokenizer({"page": row.pair})


@pytest.mark.filterwarnings("ignore")  # of the harness and what it imports
@pytest.mark.parametrize(
    ("name", "shots"),
    [
        ("piqa", 0),
        *(
            pytest.param(*more, marks=pytest.mark.heavy)
            for more in (("copa", 0), ("copa", 2), ("lambada", 0), ("winograd", 1))
        ),
    ],
)
def test_lm_eval_finds_the_same_in_us_as_in_transformers(
    gpt: Path, copa: Path, name: str, shots: int, tmp_path: Path
) -> None:
    pytest.importorskip("lm_eval")
    from malmoi.evaluation.in_context.lm_eval_tasks import run_lm_eval, write_task

    path = _data(name, copa, tmp_path)
    yaml = write_task(named_task(name), path, InContextConfig(), tmp_path)
    ours = run_lm_eval(load(gpt, device="cpu"), yaml, shots, InContextConfig())
    theirs = run_lm_eval(
        ("hf", {"pretrained": str(gpt), "device": "cpu", "dtype": "float32"}),
        yaml,
        shots,
        InContextConfig(),
    )
    assert ours == {key: pytest.approx(value, rel=1e-4) for key, value in theirs.items()}
    if not shots:  # the examples that we draw are not those that lm-eval draws
        own = result(gpt, name, path).facts
        pairs = {
            "acc": "accuracy",
            "acc_stderr": "accuracy_error",
            "perplexity": "perplexity",
            "acc_norm": "accuracy_byte",
        }
        assert {key: own[pairs[key]] for key in ours if key in pairs} == {
            key: pytest.approx(value, rel=1e-4) for key, value in ours.items() if key in pairs
        }


def _data(name: str, copa: Path, folder: Path) -> Path:
    rows = [json.loads(line) for line in copa.read_text("utf-8").splitlines()]
    made = {
        "copa": lambda row: row,
        "piqa": lambda row: {**row, "query": f"Question: {row['query']}\n"},
        "lambada": lambda row: {"context": row["query"], "continuation": row["choices"][0]},
        "winograd": lambda row: {"context_options": [f"{row['query']} {c}" for c in row["choices"]],
                                 "continuation": "must act", "gold": row["gold"]},
    }[name]  # fmt: skip
    path = folder / f"{name}-rows.jsonl"
    path.write_text("".join(json.dumps(made(row)) + "\n" for row in rows), "utf-8")
    return path


# ------------------------------------------------------------------ what cannot be asked


def test_errors_are_sentences(gpt: Path, bert: Path, copa: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"query": "a", "choices": ["", "b"], "gold": 1}\n', "utf-8")
    cases: list[tuple[str, Any, dict[str, Any], str]] = [
        (
            "copa",
            copa,
            {"shots": 20},
            r"20 examples cannot be shown: .*copa\.jsonl:1 takes \d+ tokens.*context is 128",
        ),
        ("copa", copa, {"shots": 30}, "30 examples requested, but there are only 23 to draw from"),
        ("prompts", bad, {}, r"bad\.jsonl:1: choice 1 \(''\) has no tokens"),
        ("ptb", copa, {"shots": 1}, "reads whole texts and takes no examples"),
        (
            "copa",
            copa,
            {"score": "totl"},
            "no method 'totl' to compare choices. Did you mean 'total'",
        ),
        ("copa", copa, {"limit": 0}, "limit must be 1 or more"),
        ("copa", tmp_path, {"shots": 1}, "has no file 'train"),
        ("lambada", None, {}, "needs a file of rows"),
    ]
    for name, data, asking, sentence in cases:
        with pytest.raises(MalmoiError, match=sentence):
            result(gpt, name, data, **asking)
    with pytest.raises(UsageError, match="needs a language model"):
        result(bert, "2d+", None, limit=2)
    with pytest.raises(UsageError, match="at least one character"):
        load(gpt, device="cpu").generate("a", stop="")
    with pytest.raises(UsageError, match="is not learnt by fine-tuning; evaluate a language model"):
        malmoi.finetune(bert, "lambada", _data("lambada", copa, tmp_path), tmp_path / "out")


def test_unfinished_answers_are_reported(gpt: Path) -> None:
    found = result(gpt, "2d+", None, limit=3)
    endless = [
        len(load(gpt, device="cpu").tokenizer.ids([text])[0]) >= 10
        for text in found.verdict.predictions
    ]
    assert any("had not ended after 10 tokens" in note for note in found.notes) == any(endless)


# ------------------------------------------------------------------ the promised face


def test_evaluate_from_python(gpt: Path, bert: Path, copa: Path, tmp_path: Path) -> None:
    facts = malmoi.evaluate(gpt, task="copa", shots=2, data=copa, device="cpu")
    assert (facts["shots"], facts["examples"]) == (2, 24)
    several = malmoi.evaluate(
        str(bert), "copa", copa, shots="0,1", limit=6, out=tmp_path, device="cpu"
    )
    assert [one["shots"] for one in several] == [0, 1]
    assert "accuracy_cloze_total" in several[0]
    assert (tmp_path / "curve.svg").read_text("utf-8").startswith('<svg xmlns="http')
    assert json.loads((tmp_path / "curve.json").read_text("utf-8"))[1]["shots"] == 1
    with pytest.raises(UsageError, match=r"no option 'shot'\. Did you mean 'shots'"):
        malmoi.evaluate(gpt, "copa", copa, shot=1, device="cpu")


def test_evaluate_from_the_shell(
    gpt: Path, copa: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words_ = ["evaluate", "copa", "--model", str(gpt), "--data", str(copa), "--device", "cpu"]
    assert run_command([*words_, "--shots", "1", "--show", "2", "--train", str(copa)]) == 0
    out, _ = capsys.readouterr()
    assert out.count(", 1 example\n") == 2
    assert re.search(r"accuracy\t0?\.?\d+ ± 0\.\d+", out)
    assert (
        run_command(
            [*words_, "--shots", "0,1", "--limit", "4", "--json", "--show", "1", "--seed", "7"]
        )
        == 0
    )
    out, err = capsys.readouterr()
    first, second = (json.loads(line) for line in out.splitlines())
    assert (first["shots"], second["shots"], second["examples"]) == (0, 1, 4)
    assert second["shown"][0]["prompt"].endswith(first["shown"][0]["prompt"])
    assert "drawn from the other rows" in err
    assert run_command([*words_, "--shots", "0,1,2", "--limit", "4", "--seed", "7"]) == 0
    head, *table = (line.split("\t") for line in capsys.readouterr().out.splitlines())
    assert (head[:3], head[-1]) == (["shots", "accuracy", "accuracy_total"], "examples")
    assert [(row[0], row[-1], len(row)) for row in table] == [
        (k, "4", len(head)) for k in ("0", "1", "2")
    ]
    assert float(table[0][1].split(" ± ")[0]) == first["accuracy"]
    assert run_command([*words_, "--shots", "99"]) == 2
    assert "to draw from" in capsys.readouterr().err
    assert (
        run_command(["evaluate", "2d-", "--model", str(gpt), "--limit", "3", "--device", "cpu"])
        == 0
    )
    assert "match\t0 ± 0" in capsys.readouterr().out


def test_zero_shot_classify_answer_and_summarise(gpt: Path, bert: Path) -> None:
    ours, masked = load(gpt, device="cpu"), load(bert, device="cpu")
    form = "{text} So it is"
    found = ours.classify("the {man}", ["out", "now"], prompt=form)
    texts = ("the {man}", "N/A", "", "[MASK]")  # the last three say nothing (Zhao et al. 2021)
    logs = np.array(
        [
            [ours.score(f"{t} So it is", f" {word}").logprob for word in ("out", "now")]
            for t in texts
        ]
    )
    chances = np.exp(logs) / np.exp(logs).sum(1, keepdims=True)
    calibrated = chances[0] / chances[1:].mean(0)
    assert list(found.scores.values()) == pytest.approx(calibrated / calibrated.sum(), abs=1e-4)
    assert found.label == ("out", "now")[int(calibrated.argmax())]
    assert sum(
        masked.classify("좋은 영화다", {"1": "좋은", "0": "나쁜"}).scores.values()
    ) == pytest.approx(1)
    greedy: dict[str, Any] = dict(temperature=0, stop="\n")
    prompt = "the man\nQuestion: who?\nAnswer:"
    assert (
        ours.answer("who?", "the man") == ours.generate(prompt, max_new_tokens=32, **greedy).strip()
    )
    prompt = "Translate to French:\nnow = la\ntap ="
    expected = ours.generate(prompt, max_new_tokens=64, **greedy).strip()
    assert ours.translate("tap", "French", examples=[("now", "la")]) == expected
    assert isinstance(ours.summarise("the man turned on the tap. " * 40, max_new_tokens=20), str)
    short = "the man turned on the tap."
    written = ours.generate(  # GPT-2 §3.6
        f"{short}\nTL;DR:", temperature=1, top_k=2, seed=3, max_new_tokens=20, stop="\n\n"
    )
    assert ours.summarise(short, max_new_tokens=20, seed=3) == first_sentences(written, 3)
    with pytest.raises(UsageError, match="at least two different labels"):
        ours.classify("a", ["one"])
    with pytest.raises(UsageError, match="cannot generate"):
        masked.answer("who?")
    assert isinstance(ours, Model)
