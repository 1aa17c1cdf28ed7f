"""Tasks: every file format, your own columns, what is wrong in a file, features and batches."""

import json
import lzma
import re
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from malmoi.errors import MalmoiError, UsageError
from malmoi.evaluation.examples import files_in, label_names, load_examples
from malmoi.evaluation.features import FeatureView
from malmoi.evaluation.guess import guess_task
from malmoi.evaluation.kinds import custom_task, encode_examples, task_prompt
from malmoi.evaluation.prompts import parse_tags
from malmoi.evaluation.tasks import TASKS, Example, Task, named_task
from malmoi.evaluation.tasks.language_modelling import ARITHMETIC, PTB_RULES, rewritten
from malmoi.evaluation.tasks.spans import iob2
from malmoi.finetuning.trainer import collate, plan_batches
from malmoi.model import preset
from malmoi.tokenizer import Tokenizer, train_tokenizer
from malmoi.tokenizer.extend import add_frame_tokens, is_framed
from malmoi.tokenizer.windows import context_windows, first_tokens, word_pieces
from malmoi.training.losses import IGNORE_LABEL

TEXTS = [
    "the state of the union is strong",
    "we must act now , said Alice in Seoul",
    "no one can tell what comes next",
]
SICK = "pair_ID\tsentence_A\tsentence_B\trelatedness_score\tentailment_judgment\n6\ta\tb\t3.3\tNEUTRAL\n"  # noqa: E501
RACE = {
    "article": "Long.",
    "questions": ["It is _ .", "Who?"],
    "options": [["a", "b", "c", "d"], ["e", "f", "g", "h"]],
    "answers": ["B", "D"],
}


def squad_file(question: str, answers: list[dict[str, object]], **more: bool) -> str:
    asked = {"id": "1", "question": question, "answers": answers, **more}
    return json.dumps(
        {"data": [{"title": "t", "paragraphs": [{"context": "Rome is old.", "qas": [asked]}]}]}
    )


FILES = {  # a file of each task as it is distributed, and what its first row says
    "cola": ("gj04\t1\t\tA good one.\ngj04\t0\t*\tA one bad.\n", ("A good one.", None, "1")),
    "cola-likelihood": (
        "gj04\t1\t\tA good one.\ngj04\t0\t*\tA one bad.\n",
        ("A good one.", None, "1"),
    ),
    "sst2": ("sentence\tlabel\na fine film \t1\nno \t0\n", ("a fine film ", None, "1")),
    "mrpc": (
        '\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t7\t8\tHe "said.\tSaid he.\n',
        ('He "said.', "Said he.", "1"),
    ),
    "stsb": ("index\tsentence1\tsentence2\tscore\n0\ta\tb\t3.5\n", ("a", "b", 3.5)),
    "qqp": (
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n0\t1\t2\tWho?\tWhich?\t0\n",
        ("Who?", "Which?", "0"),
    ),
    "mnli": (
        "index\tsentence1\tsentence2\tlabel1\tgold_label\n0\ta\tb\tneutral\tneutral\n",
        ("a", "b", "neutral"),
    ),
    "mnli-mm": (
        "index\tsentence1\tsentence2\tgold_label\n0\ta\tb\tentailment\n",
        ("a", "b", "entailment"),
    ),
    "qnli": (
        "index\tquestion\tsentence\tlabel\n0\tWho?\tHe.\tnot_entailment\n",
        ("Who?", "He.", "not_entailment"),
    ),
    "rte": ("index\tsentence1\tsentence2\tlabel\n0\ta\tb\tentailment\n", ("a", "b", "entailment")),
    "wnli": ("index\tsentence1\tsentence2\tlabel\n0\ta\tb\t1\n", ("a", "b", "1")),
    "sick": (SICK, ("a", "b", "NEUTRAL")),
    "sick-r": (SICK, ("a", "b", 3.3)),
    "imdb": ("label\ttext\npos\tGreat.\n", ("Great.", None, "pos")),
    "nsmc": ("id\tdocument\tlabel\n1\t굳 ㅋ\t1\n", ("굳 ㅋ", None, "1")),
    "korsts": ("genre\tscore\tsentence1\tsentence2\nm\t5.000\t가\t나\n", ("가", "나", 5.0)),
    "klue-nli": (
        '[{"guid": "x", "premise": "가", "hypothesis": "나", "gold_label": "neutral"}]',
        ("가", "나", "neutral"),
    ),
    "swag": (
        ',video-id,sent1,sent2,ending0,ending1,ending2,ending3,label\n0,v,"A man, '
        'old",He,a,b,c,d,2\n',
        ("A man, old", "He", 2),
    ),
    "race": (json.dumps(RACE) + "\n", ("Long.", "It is _ .", 1)),
    "copa": (
        '{"premise": "It rained.", "question": "effect", "choice1": "Wet.", "choice2": "Dry.", '
        '"label": 0}\n',
        ("It rained so", None, 0),
    ),
    "squad": (
        squad_file("What?", [{"text": "Rome", "answer_start": 0}]),
        ("What?", "Rome is old.", (("Rome", 0),)),
    ),
    "korquad": (
        squad_file("무엇?", [{"text": "Rome", "answer_start": 0}]),
        ("무엇?", "Rome is old.", (("Rome", 0),)),
    ),
    "squad-retrieval": (squad_file("Which?", []), ("Which?", "Rome is old.", 0)),
    "snli": (
        '{"gold_label": "-", "sentence1": "x", "sentence2": "y", "pairID": "1"}\n'
        '{"gold_label": "neutral", "sentence1": "a", "sentence2": "b", "pairID": "2"}\n',
        ("a", "b", "neutral"),
    ),
    "scitail": ("Rocks melt.\tMagma forms.\tentails\n", ("Rocks melt.", "Magma forms.", "entails")),
    "story-cloze": (
        "InputStoryid,InputSentence1,InputSentence2,InputSentence3,InputSentence4,"
        "RandomFifthSentenceQuiz1,RandomFifthSentenceQuiz2,AnswerRightEnding\n"
        'x,"Ann, a cook, ate.",She slept.,She woke.,She sang.,She cried.,She smiled.,2\n',
        ("Ann, a cook, ate. She slept. She woke. She sang.", None, 1),
    ),
    "squad2": (squad_file("Why?", [], is_impossible=True), ("Why?", "Rome is old.", ())),
    "conll2003": (
        "-DOCSTART- -X- O O\n\nEU NNP I-NP I-ORG\nrejects VBZ I-VP O\n\nGerman JJ I-NP I-MISC\n",
        ("EU rejects", None, ("B-ORG", "O")),
    ),
    "klp2016": (
        "; 한석규가 간다.\n$<한석규:PS>가 간다.\n1\t한석규\tNNP\tB_PS\n1\t가\tJKS\tI\n2\t가\tVV\tO\n",  # noqa: E501
        ("한석규 가 가", None, ("B-PS", "I-PS", "O")),
    ),
    "piqa": (
        '{"goal": "Dry it.", "sol1": "Sun.", "sol2": "Rain.", "label": 0}\n',
        ("Dry it.", None, 0),
    ),
    "arc": (
        '{"question": {"stem": "Hot?", "choices": [{"text": "Ice", "label": "A"}, {"text": "Sun", '
        '"label": "B"}]},'
        ' "answerKey": "B"}\n',
        ("Hot?", None, 1),
    ),
    "hellaswag": (
        '{"ctx": "He runs", "endings": ["far.", "up."], "label": "1"}\n',
        ("He runs", None, 1),
    ),
    "winograd": (
        '{"context_options": ["The cup is in the bag so the cup", "The cup is in the bag so the '
        'bag"],'
        ' "continuation": "is full.", "gold": 1}\n',
        ("The cup is in the bag so the", "_ is full.", 1),
    ),
    "winogrande": (
        '{"sentence": "Sam beat Tom so _ won.", "option1": "Sam", "option2": "Tom", "answer": '
        '"1"}\n',
        ("Sam beat Tom so", "_ won.", 0),
    ),
    "cbt": (
        "1 Once there was a cat .\n2 It ran .\n21 The XXXXX sat .\tcat\t\tdog|cat|sun\n\n",
        ("Once there was a cat . It ran .", "The _ sat .", 1),
    ),
    "boolq": (
        '{"question": "is it so", "passage": "It is.", "answer": true}\n',
        ("It is.", "is it so", "1"),
    ),
    "prompts": ('{"query": "a", "choices": ["b", "c"], "gold": 1}\n', ("a", None, 1)),
    "lambada": ("he saw the old man and the sea\n", ("he saw the old man and the", None, "sea")),
    "wikitext": (
        ' \n = One = \n It was a man @-@ eater ; " so " he said . \n \n = Two = \n',
        (
            '\n= One =\nIt was a man-eater; "so" he said.\n\n',
            ' \n = One = \n It was a man @-@ eater ; " so " he said . \n \n',
            None,
        ),
    ),
    "ptb": (
        " it did n't pay $ N a year \n",
        ("it didn't pay $1 a year\n", " it did n't pay $ N a year \n", None),
    ),
    "plain-text": ("One.\n", ("One.\n", "One.\n", None)),
    "translation": ('{"source": "cat", "target": "chat"}\n', ("cat", None, ("chat",))),
    "summary": ('{"article": "Long.", "highlights": "Short."}\n', ("Long.", None, ("Short.",))),
    **{
        one.name: (
            '{"question": "What is 1 plus 2?", "answer": "3"}\n',
            ("What is 1 plus 2?", None, ("3",)),
        )
        for one in ARITHMETIC
    },
    "reversed-words": ("union\n", ("noinu", None, ("union",))),
    "cycle-letters": ("aaaaa\n", ("aaaaa", None, ("aaaaa",))),
    "anagram-1": ("abbba\n", ("abbba", None, ("abbba",))),
    "anagram-2": ("abcde\n", ("abcde", None, ("abcde",))),
    "random-insertion": ("union\n", ("u n i.o/n", None, ("union",))),
}
FILES |= {
    "blimp": (
        '{"good": "He runs.", "bad": "He run.", "phenomenon": "agreement"}\n',
        ("He runs.", None, 0),
    ),
    "kontrast": (
        '{"sentence_A": "나는 갔다.", "sentence_B": "나는 갔는다.", "gold_label": "A"}\n',
        ("나는 갔다.", None, 0),
    ),
}
SUFFIX = {"klue-nli": ".json", "swag": ".csv", "squad": ".json", "squad2": ".json"}
SUFFIX |= {"korquad": ".json", "squad-retrieval": ".json", "story-cloze": ".csv"}


def test_every_task_has_a_file_here() -> None:
    assert set(FILES) == set(TASKS)


@pytest.mark.parametrize("name", FILES)
def test_a_task_reads_its_own_format(name: str, tmp_path: Path) -> None:
    content, first = FILES[name]
    kind = ".jsonl" if content.startswith("{") else ".tsv" if "\t" in content else ".txt"
    path = tmp_path / f"train{SUFFIX.get(name, kind)}.xz"
    path.write_bytes(lzma.compress(content.encode()))
    rows = load_examples(named_task(name), path).rows
    assert (rows[0].text, rows[0].pair, rows[0].label) == first
    assert rows[0].place.startswith(str(path))


def test_the_real_files(shared: Path) -> None:
    counts = {
        "cola": ("glue/CoLA", 8551, 1043),
        "rte": ("glue/RTE", 2490, 277),
        "wnli": ("glue/WNLI", 635, 71),
        "stsb": ("glue/STS-B", 5749, 1500),
        "sick": ("nli", 4500, 500),
    }
    for name, (folder, train_rows, dev_rows) in counts.items():
        chosen = named_task(name)
        files = files_in(chosen, shared / "data" / folder)
        found = [len(load_examples(chosen, file or "").rows) for file in files]
        assert found == [train_rows, dev_rows]
    sizes = (("klp2016", "klp2016.ko.dev", 366), ("conll2003", "conll2003.testa", 3250))
    for name, file, size in sizes:
        rows = load_examples(named_task(name), shared / f"data/ner/{file}.txt.xz").rows
        assert len(rows) == size
    squad = load_examples(named_task("squad2"), shared / "data/squad/dev-half-v2.0.json.xz").rows
    assert (len(squad), sum(not e.label for e in squad)) == (6078, 3168)


# ------------------------------------------------------------------ your own columns, and what is
# wrong in them


def write(path: Path, text: str) -> Path:
    path.write_text(text, "utf-8")
    return path


PTB = {  # lines as they stand in the set, and as the Journal printed them but for the numbers
    " net was $ N million or N cents a share ": "net was $1 million or 1 cents a share",
    " lin closed at $ N down $ N ": "lin closed at $1 down $1",
    " the rate fell to N N from N N ": "the rate fell to 1% from 1%",
    " the notes are N N N securities of N ": "the notes are 1 1% securities of 1",
    " they paid $ N N years ago ": "they paid $1 1 years ago",
    " c$ N and us$ N and # N million ": "c$1 and us$1 and #1 million",
    " a $ <unk> offer a $ 300-a-share bid ": "a $<unk> offer a $300-a-share bid",
    " i 'm sure they 'll say it 's o'brien 's ": "i'm sure they'll say it's o'brien's",
    " united airlines ' parent <unk> 's too ": "united airlines' parent <unk>'s too",
    " in the '80s and the 1970s ": "in the '80s and the 1970s",
    " we wo n't we ca n't and you can not ": "we won't we can't and you cannot",
    " mgm\\/ua said net income \\* ": "mgm/ua said net income *",
    " 30-year bonds by n. <unk> at s&p ": "30-year bonds by n. <unk> at s&p",
}


def cut_again(line: str) -> str:
    """From a line of the Journal to that of the set."""
    line = re.sub(r"([$#])(?=[\d<])", r"\1 ", re.sub(r"([*/])", r"\\\1", line))
    line = re.sub(r"(\S)('s|'re|'ve|'m|'ll|'d|n't|')(?!\S)", r"\1 \2", line)
    words = {"1": "N", "1%": "N N", "cannot": "can not"}
    return f" {' '.join(words.get(word, word) for word in line.split(' '))} "


@pytest.mark.parametrize("line", PTB)
def test_the_journal_is_put_together_as_it_was_printed(line: str) -> None:
    assert rewritten(PTB_RULES, line) == PTB[line]
    assert cut_again(PTB[line]) == line


def test_what_is_put_together_can_be_cut_again(shared: Path) -> None:
    """GPT-2 §3.1: invertible, so that a likelihood of the one is a likelihood of the other."""
    with lzma.open(shared / "data" / "lm" / "ptb.valid.txt.xz", "rt") as file:
        text = file.read().rstrip("\n")
    assert [cut_again(line) for line in rewritten(PTB_RULES, text).split("\n")] == text.split("\n")


def test_universal_dependencies_are_a_tagging(tmp_path: Path) -> None:
    def line(number: str, word: str, tag: str) -> str:
        return "\t".join((number, word, "_", tag, *"______")) + "\n"

    sentence = line("1-2", "I'm", "_") + line("1", "I", "PRON") + line("2", "'m", "AUX")
    text = f"# text = I'm\n{sentence}{line('2.1', 'here', '_')}\n{line('1', 'Go', 'VERB')}\n"
    path = tmp_path / "en.conllu.xz"
    path.write_bytes(lzma.compress(text.encode()))
    task, _ = guess_task(None, path)
    rows = load_examples(task, path).rows
    assert [(e.words, e.label, e.place) for e in rows] == [
        (("I", "'m"), ("PRON", "AUX"), f"{path}:3"),
        (("Go",), ("VERB",), f"{path}:7"),
    ]


def test_custom_columns_in_any_file(tmp_path: Path) -> None:
    csv = write(tmp_path / "a.csv", 'review,stars\n"good, really",5\nbad,1\n')
    jsonl = write(tmp_path / "a.jsonl", '{"review": "good", "stars": 5}\n')
    korean = tmp_path / "k.tsv"
    korean.write_bytes("review\tstars\n정말 재미있다\t5\n".encode("cp949"))
    chosen = custom_task("classification", text="review", label="stars")
    assert [e.label for e in load_examples(chosen, [csv, jsonl, korean]).rows] == [
        "5",
        "1",
        "5",
        "5",
    ]
    assert load_examples(chosen, korean).rows[0].text == "정말 재미있다"
    assert [
        e.label
        for e in load_examples(custom_task("regression", text="review", label="stars"), csv).rows
    ] == [5.0, 1.0]
    tagged = write(tmp_path / "t.jsonl", '{"words": ["a", "b"], "tags": ["O", "B-X"]}\n')
    assert load_examples(custom_task("tagging", text="words", label="tags"), tagged).rows[
        0
    ].label == ("O", "B-X")
    listed = write(tmp_path / "l.csv", """words,tags\n"['New York', 'is']","['B-X' 'O']"\n""")
    (row,) = load_examples(custom_task("tagging", text="words", label="tags"), listed).rows
    assert (row.words, row.label) == (("New York", "is"), ("B-X", "O"))
    choices = write(tmp_path / "c.csv", "q,a,b,right\nwho?,me,you,1\n")
    assert load_examples(
        custom_task("choice", text="q", label="right", choices=("a", "b")), choices
    ).rows[0].choices == ("me", "you")
    asked = write(tmp_path / "q.csv", "q,context,answer\nwho?,it was me,me\nwhy?,none,\n")
    assert [
        e.label for e in load_examples(custom_task("answer", text="q", label="answer"), asked).rows
    ] == [(("me", 7),), ()]


BAD = {
    "label missing": (
        custom_task("classification"),
        "a.csv",
        "text,label\ngood,1\nbad,\n",
        r"a\.csv:3: the label in 'label' is missing",
    ),
    "unknown column": (
        custom_task("classification", text="txt"),
        "a.csv",
        "text,label\ngood,1\n",
        r"a\.csv:2 has no column 'txt'.* Did you mean 'text'",
    ),
    "wrong label": (
        named_task("sst2"),
        "a.tsv",
        "sentence\tlabel\ngood\t2\n",
        r"a\.tsv:2: the label '2' is not one of 0, 1",
    ),
    "fields": (
        named_task("sst2"),
        "a.tsv",
        "sentence\tlabel\na\tb\t1\n",
        r"a\.tsv:2: 3 fields where there should be 2",
    ),
    "no number": (
        named_task("stsb"),
        "a.tsv",
        "sentence1\tsentence2\tscore\na\tb\thigh\n",
        r"a\.tsv:2: 'score' must be a number, not 'high'",
    ),
    "answer elsewhere": (
        custom_task("answer", label="answer"),
        "a.csv",
        "text,context,answer\nq,here,there\n",
        r"a\.csv:2: the answer 'there' is not in its context",
    ),
    "tag without word": (
        named_task("conll2003"),
        "a.txt",
        "EU NNP I-NP I-ORG\nO\n",
        r"a\.txt:1: line 2 must hold a word and a tag",
    ),
    "tags and words": (
        custom_task("tagging", text="w", label="t"),
        "a.jsonl",
        '{"w": ["a", "b"], "t": ["O"]}\n',
        r"a\.jsonl:1: there are 2 words and 1 tags",
    ),
    "strange tag": (
        named_task("conll2003"),
        "a.txt",
        "EU x y PERSON\n",
        r"'PERSON' is not a tag such as O",
    ),
    "not JSON": (custom_task("classification"), "a.jsonl", '{"text": 1\n', r"a\.jsonl:1: not JSON"),
    "no text": (
        custom_task("classification"),
        "a.jsonl",
        '{"text": 5, "label": 1}\n',
        r"a\.jsonl:1: 'text' must hold text, not 5",
    ),
    "choice too far": (
        custom_task("choice", text="q", choices=("a", "b")),
        "a.csv",
        "q,a,b,label\nw,x,y,2\n",
        r"a\.csv:2: the answer is choice 2, but there are only 2",
    ),
    "empty": (custom_task("classification"), "a.csv", "text,label\n", r"There are no examples in"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_row_is_named_with_its_place(what: str, tmp_path: Path) -> None:
    chosen, name, content, said = BAD[what]
    with pytest.raises(MalmoiError, match=said):
        load_examples(chosen, write(tmp_path / name, content))


def test_bad_rows_can_be_left_out_and_are_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "text,label\ngood,1\nbad,\n,0\n")
    found = load_examples(custom_task("classification"), path, skip_bad=True)
    assert len(found.rows) == 2
    assert "1 bad row skipped, such as" in found.notes[0]
    assert found.notes[1].endswith("a.csv:4.")  # an empty text is kept and told


def test_one_class_and_doubled_ids(tmp_path: Path) -> None:
    chosen = custom_task("classification")
    rows = load_examples(chosen, write(tmp_path / "a.csv", "text,label\na,1\nb,1\n")).rows
    with pytest.raises(MalmoiError, match=r"All 2 rows .*a\.csv:2.* have the label '1'"):
        label_names(chosen, rows)
    squad = json.loads(FILES["squad"][0])
    squad["data"][0]["paragraphs"] *= 2
    with pytest.raises(MalmoiError, match=r"the id '1' comes 2 times, but ids must differ"):
        load_examples(named_task("squad"), write(tmp_path / "s.json", json.dumps(squad)))


def test_unknown_names_offer_the_nearest() -> None:
    with pytest.raises(UsageError, match="Did you mean 'sst2'"):
        named_task("sst-2")
    with pytest.raises(UsageError, match="needs the columns of its choices"):
        custom_task("choice")


def test_the_text_view() -> None:
    prompt = task_prompt(named_task("sst2"), Example("a fine film", label="1"))
    assert (prompt.query, prompt.choices[prompt.gold or 0]) == (
        "Review: a fine film\nSentiment:",
        " positive",
    )
    prompt = task_prompt(named_task("copa"), Example("It rained so", label=1, choices=("a", "b")))
    assert (prompt.choices, prompt.gold) == ((" a", " b"), 1)
    prompt = task_prompt(
        named_task("conll2003"),
        Example("EU in Rome", label=("B-ORG", "O", "B-LOC"), words=("EU", "in", "Rome")),
    )
    assert prompt.shown == "Text: EU in Rome\nNames: EU (ORG); Rome (LOC)"
    assert parse_tags(prompt.choices[0], ("EU", "in", "Rome")) == ("B-ORG", "O", "B-LOC")
    prompt = task_prompt(
        named_task("winograd"), Example("The cup is so", "_ is full.", 1, choices=("he", "she"))
    )
    assert (prompt.shown, prompt.partial) == ("The cup is so she is full.", True)
    prompt = task_prompt(named_task("squad2"), Example("Why?", "Rome.", ()))
    assert prompt.shown == "Rome.\nQuestion: Why?\nAnswer: unanswerable"


def test_iob2_from_other_marks() -> None:
    assert iob2(["I-A", "I-A", "B-A", "O", "S-B"], "") == ["B-A", "I-A", "B-A", "O", "B-B"]


# ------------------------------------------------------------------ features


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return train_tokenizer(TEXTS * 4, kind="wordpiece", vocab=120)


@pytest.fixture(scope="module")
def gpt_words() -> Tokenizer:
    return add_frame_tokens(train_tokenizer(TEXTS * 4, kind="byte-bpe", vocab=300))


def test_a_framed_tokenizer_marks_texts_and_pairs(gpt_words: Tokenizer) -> None:
    shown = [gpt_words.token(t) for t in gpt_words.encode("the", "state").tokens]
    assert (shown[0], shown[-1], shown.count("<$>")) == ("<s>", "<e>", 1)
    assert is_framed(gpt_words)
    assert not is_framed(train_tokenizer(TEXTS, kind="byte-bpe", vocab=300))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text("abcdeé가.-", min_size=1, max_size=6), min_size=1, max_size=12))
def test_every_word_finds_its_first_token(sentence: list[str]) -> None:
    for tokenizer in _tokenizers():
        encoding = tokenizer.encode(" ".join(sentence))
        firsts = list(first_tokens(sentence, encoding))
        begins = [sum(len(w) + 1 for w in sentence[:i]) for i in range(len(sentence))]
        for first, begin, word in zip(firsts, begins, sentence, strict=True):
            assert first is not None
            start, end = encoding.offsets[first]
            assert start <= begin < end or begin <= start < begin + len(word)
        assert len(set(firsts)) == len(firsts)


def _tokenizers(made: list[Tokenizer] = []) -> list[Tokenizer]:  # noqa: B006 - made once
    if not made:
        texts = ["abcde é 가 . - abc"] * 3
        made += [
            train_tokenizer(texts, kind="wordpiece", vocab=60),
            add_frame_tokens(train_tokenizer(texts, kind="byte-bpe", vocab=270)),
        ]
    return made


def test_long_sentences_are_cut_between_words(words: Tokenizer) -> None:
    sentence = TEXTS[1].split() * 5
    pieces = word_pieces(words, [sentence], 16)[0]
    assert len(pieces) > 2
    assert sum(len(piece.firsts) for piece in pieces) == len(sentence)
    assert all(len(piece.row.tokens) <= 16 for piece in pieces)
    assert [piece.start for piece in pieces] == sorted(piece.start for piece in pieces)


@pytest.mark.parametrize("kind", ["wordpiece", "byte-bpe"])
def test_windows_cover_the_context_and_keep_its_offsets(
    kind: str, words: Tokenizer, gpt_words: Tokenizer
) -> None:
    tokenizer = words if kind == "wordpiece" else gpt_words
    context = " ".join(TEXTS * 6)
    whole = context_windows(tokenizer, [("what comes next", context)], 10_000, 10)[0]
    assert len(whole) == 1
    cut = context_windows(tokenizer, [("what comes next", context)], 48, 10)[0]
    assert {tuple(o) for w in cut for o in w.offsets} == {tuple(o) for o in whole[0].offsets}
    for w in cut:
        begin = int(w.offsets[0, 0])
        at = next(i for i, o in enumerate(whole[0].offsets) if o[0] == begin) + whole[0].first
        length = len(w.offsets)
        assert list(w.tokens[w.first : w.first + length]) == list(whole[0].tokens[at : at + length])
    assert all(len(w.tokens) <= 48 for w in cut)
    assert all(
        w.tokens[0] == whole[0].tokens[0] and w.tokens[-1] == whole[0].tokens[-1] for w in cut
    )


def test_an_answer_is_found_in_the_windows_that_hold_it(words: Tokenizer) -> None:
    context = " ".join(TEXTS * 4)
    start = context.index("Alice in Seoul", 60)
    example = Example("who is it", context, (("Alice in Seoul", start),))
    items = encode_examples(named_task("squad"), [example], FeatureView(words, (), 40, 12))
    cut = context_windows(words, [("who is it", context)], 40, 12)[0]
    held = [(item, window) for item, window in zip(items, cut, strict=True) if item.label != (0, 0)]
    assert 0 < len(held) < len(items)
    for item, window in held:
        first, last = (place - window.first for place in item.label)
        assert context[window.offsets[first][0] : window.offsets[last][1]] == "Alice in Seoul"


def test_an_answer_longer_than_any_window_is_not_learnt_as_none(
    words: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    context = " ".join(TEXTS * 4)
    short = Example("who is it", context, (("Alice in Seoul", context.index("Alice in Seoul")),))
    long = Example("who is it", context, ((context, 0),), place="file:2")
    view = FeatureView(words, (), 40, 12)
    alone = encode_examples(named_task("squad"), [short], view)
    assert len(encode_examples(named_task("squad"), [short, long], view)) == len(alone)
    assert "1 of 2 rows are skipped, the first at file:2: their answers do not" in caplog.text
    with pytest.raises(MalmoiError, match="No answer fits into 40 tokens; raise --length"):
        encode_examples(named_task("squad"), [long], view)


def test_batches_waste_little_and_carry_their_labels(words: Tokenizer) -> None:
    config = preset("bert-tiny", vocab=words.vocab_size, context=64)
    examples = [Example(text, label=str(i % 2)) for i, text in enumerate([*TEXTS, "now"] * 8)]
    chosen = Task("x", "classification", lambda p: [], lambda r: Example(""))
    items = encode_examples(chosen, examples, FeatureView(words, ("0", "1"), 64))
    groups = plan_batches([item.length for item in items], 4, seed=1)
    assert sorted(i for group in groups for i in group) == list(range(len(items)))
    assert plan_batches([item.length for item in items], 4, seed=1) == groups
    total = sum(4 * max(items[i].length for i in group) for group in groups)
    assert total < 1.15 * sum(item.length for item in items)
    batch = collate([items[0], items[3]], config)
    assert batch["labels"].tolist() == [0, 1]
    assert batch["keep"][1].sum() == items[3].length
    assert batch["tokens"].shape == batch["segments"].shape


def test_choices_tags_and_both_orders_in_a_batch(words: Tokenizer) -> None:
    config = preset("bert-tiny", vocab=words.vocab_size, context=64)
    view = FeatureView(words, ("O", "B-PER"), 64)
    questions = [
        Example("the", "what _ next", 1, choices=("comes", "act", "now")),
        Example("a", None, 0, choices=("b", "c")),
    ]
    batch = collate(encode_examples(named_task("race"), questions, view), config)
    assert batch["places"].tolist() == [[0, 1, 2], [3, 4, -1]]
    tagged = [Example("Alice must", label=("B-PER", "O"), words=("Alice", "must"))]
    labels = collate(encode_examples(named_task("conll2003"), tagged, view), config)["labels"][
        0
    ].tolist()
    assert [label for label in labels if label != IGNORE_LABEL] == [1, 0]
    both = FeatureView(words, (), 64, both=True)
    pair = collate(
        encode_examples(named_task("stsb"), [Example("the state", "union", 2.5)], both), config
    )
    assert (pair["places"].tolist(), pair["labels"].tolist()) == ([[0, 1]], [2.5])


def test_the_language_models_labels_are_the_next_tokens(gpt_words: Tokenizer) -> None:
    config = preset(
        "gpt2-small", vocab=gpt_words.vocab_size, context=64, width=32, heads=1, depth=1
    )
    view = FeatureView(gpt_words, ("0", "1"), 64)
    chosen = custom_task("classification")
    items = encode_examples(
        chosen, [Example("the state", label="1"), Example("now", label="0")], view
    )
    batch = collate(items, config, lm=True)
    for row, item in enumerate(items):
        tokens = item.rows[0].tokens.tolist()
        judged = batch["lm_labels"][row].tolist()
        assert judged[: len(tokens) - 1] == tokens[1:]
        assert set(judged[len(tokens) - 1 :]) <= {IGNORE_LABEL}


def test_a_gpt_has_the_delimiter_before_the_choice_and_never_loses_the_question(
    gpt_words: Tokenizer,
) -> None:
    """GPT-1 §3.3: [z; q; $; a_k]."""
    framed = add_frame_tokens(gpt_words)
    chosen = custom_task("choice", pair="question", choices=("a", "b"))
    for text, whole in (("the state", True), ("the state of the union is strong " * 9, False)):
        example = Example(text, "now is", 0, choices=("the union", "now"))
        view = FeatureView(framed, (), 32, choice_apart=True)
        (item,) = encode_examples(chosen, [example], view)
        for row, choice in zip(item.rows, example.choices, strict=True):
            assert len(row.tokens) <= 32
            names = [framed.token(token) for token in row.tokens.tolist()]
            cut = names.index("<$>")
            first = framed.decode(row.tokens.tolist()[1:cut]).strip()
            assert framed.decode(row.tokens.tolist()[cut + 1 : -1]).strip() == choice
            assert first.endswith("now is")
            assert first.removesuffix("now is").strip() == text or not whole


def test_snli_and_scitail_in_their_other_formats(tmp_path: Path) -> None:
    table = write(
        tmp_path / "snli_1.0_dev.txt",
        "gold_label\tsentence1\tsentence2\tpairID\n-\tx\ty\t1\nentailment\ta\tb\t2\n",
    )
    found = load_examples(named_task("snli"), table)
    assert found.notes == ("1 of 2 rows have no gold label ('-') and are left out.",)
    (row,) = found.rows
    assert (row.text, row.pair, row.label, row.id) == ("a", "b", "entailment", "2")
    lines = write(
        tmp_path / "scitail_1.0_dev.txt",
        '{"gold_label": "entailment", "sentence1": "a", "sentence2": "b"}\n'
        '{"gold_label": "neutral", "sentence1": "c", "sentence2": "d"}\n',
    )
    rows = load_examples(named_task("scitail"), lines).rows
    assert [(one.text, one.label) for one in rows] == [("a", "entails"), ("c", "neutral")]


def test_a_public_format_is_recognised_without_a_name(tmp_path: Path) -> None:
    tagged = tmp_path / "mine.txt"
    tagged.write_text("Seoul B-LOC\nis O\n\nKim B-PER\nsaid O\n", "utf-8")
    assert guess_task(None, tagged)[0].name == guess_task("tagging", tagged)[0].name == "conll2003"
    tagged.write_text("Seoul B-LOC\nis\n\nKim B-PER\nsaid O\n", "utf-8")
    assert guess_task(None, tagged)[0].name == "conll2003"  # which names the bad line
    for field, name in (("", "squad"), (', "is_impossible": false', "squad2")):
        nested = tmp_path / f"{name}.json"
        asked = f'{{"qas": [{{"id": "1"{field}}}], "context": "Seoul"}}'
        nested.write_text(f'{{"data": [{{"paragraphs": [{asked}]}}]}}', "utf-8")
        assert guess_task(None, nested)[0].name == name
    nested.write_text(nested.read_text("utf-8").replace("{", '{"version": "KorQuAD_v1.0_dev", ', 1))
    assert guess_task(None, nested)[0].name == "korquad"
    lines = tmp_path / "lines.txt"
    lines.write_text("a film\tgood\na bore\tbad\n" * 5, "utf-8")
    assert guess_task(None, lines)[0].kind == "classification"
