"""Every measure against an oracle: scikit-learn, scipy, seqeval, and SQuAD's rules written out a
second time.
"""

import math
import re
import string
import warnings

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st

from malmoi.errors import UsageError
from malmoi.evaluation.kinds import by_tags, custom_task
from malmoi.metrics import METRICS, is_better, mean_with_error, score_predictions
from malmoi.metrics.labels import (
    accuracy,
    best_f1_threshold,
    best_label_thresholds,
    confusion,
    entities,
    entity_f1,
    f1,
    f1_macro,
    f1_micro,
    label_scores,
    matthews,
)
from malmoi.metrics.registry import bits_per_byte, mse, pearson, perplexity, spearman
from malmoi.metrics.texts import best_threshold, korquad_exact, korquad_f1, span_exact, span_f1

few = settings(max_examples=40, deadline=None)


def both(values: st.SearchStrategy) -> st.SearchStrategy:
    """Gold and predicted lists of one length."""
    return st.lists(st.tuples(values, values), min_size=1, max_size=30).map(
        lambda rows: ([a for a, _ in rows], [b for _, b in rows])
    )


@few
@given(both(st.sampled_from("abcd")))
def test_labels_as_scikit_learn(pair: tuple[list[str], list[str]]) -> None:
    from sklearn import metrics as theirs

    gold, said = (["a", "b", *some] for some in pair)  # scikit-learn warns of a single label
    assert accuracy(gold, said) == pytest.approx(theirs.accuracy_score(gold, said))
    assert f1_macro(gold, said) == pytest.approx(
        theirs.f1_score(gold, said, average="macro", zero_division=0)
    )
    assert f1_micro(gold, said) == pytest.approx(
        theirs.f1_score(gold, said, average="micro", zero_division=0)
    )
    assert matthews(gold, said) == pytest.approx(theirs.matthews_corrcoef(gold, said), abs=1e-12)
    assert confusion(gold, said).tolist() == theirs.confusion_matrix(gold, said).tolist()


@few
@given(both(st.sets(st.sampled_from("abcd")).map(lambda held: tuple(sorted(held)))))
def test_several_labels_as_scikit_learn(
    pair: tuple[list[tuple[str, ...]], list[tuple[str, ...]]],
) -> None:
    from sklearn import metrics as theirs

    gold, said = pair
    a, b = ([[int(name in held) for name in "abcd"] for held in some] for some in pair)
    for average, ours in (("macro", f1_macro), ("micro", f1_micro)):
        wanted = theirs.f1_score(a, b, average=average, zero_division=0)
        assert ours(gold, said, "abcd") == pytest.approx(wanted)
    assert accuracy(gold, said) == pytest.approx(theirs.accuracy_score(a, b))
    columns = theirs.precision_recall_fscore_support(a, b, average=None, zero_division=0)
    found = label_scores(gold, said, "abcd").values()
    assert [(one.precision, one.recall, one.f1, one.support) for one in found] == [
        pytest.approx(row) for row in zip(*columns, strict=True)
    ]


@few
@given(st.lists(st.tuples(st.booleans(), st.sampled_from([0.1, 0.2, 0.5, 0.7, 0.9])), min_size=1))
def test_no_threshold_has_a_better_f1_than_the_one_chosen(rows: list[tuple[bool, float]]) -> None:
    from sklearn.metrics import f1_score

    right = [flag for flag, _ in rows]
    chances = [chance for _, chance in rows]

    def f1_at(threshold: float) -> float:
        return f1_score(right, [chance >= threshold for chance in chances], zero_division=0)

    best = best_f1_threshold(right, chances)
    assert f1_at(best) == pytest.approx(max(f1_at(chance) for chance in chances))
    named = [("yes",) if flag else () for flag in right]
    columns = [[chance] for chance in chances]
    found = best_label_thresholds(named, columns, ["yes"], per_label=True)
    assert found == best_label_thresholds(named, columns, ["yes"])
    assert found == [best if any(right) else 0.5]


@few
@given(both(st.sampled_from("01")))
def test_two_labels_as_scikit_learn(pair: tuple[list[str], list[str]]) -> None:
    from sklearn.metrics import f1_score

    gold, said = pair
    wanted = f1_score([int(g) for g in gold], [int(s) for s in said], zero_division=0)
    assert f1(gold, said) == pytest.approx(wanted)


@few
@given(both(st.integers(-5, 5)))
def test_correlations_as_scipy(pair: tuple[list[int], list[int]]) -> None:
    from scipy.stats import pearsonr, spearmanr

    gold, said = pair
    if len(set(gold)) < 2 or len(set(said)) < 2:
        assert pearson(gold, said) == 0
        return
    assert pearson(gold, said) == pytest.approx(pearsonr(gold, said)[0], abs=1e-9)
    assert spearman(gold, said) == pytest.approx(spearmanr(gold, said)[0], abs=1e-9)


def test_a_correlation_keeps_its_figures_whatever_the_scale() -> None:
    x = np.array([1.0, 2.0, 4.0, 3.0])
    for scale in (1e-200, 1e200):
        assert pearson(x * scale, x) == pytest.approx(1)
    assert spearman([1, 2, 2, 3], [10, 20, 20, 30]) == pytest.approx(1)


@few
@given(both(st.sampled_from([1.0, 2.0, 3.0, math.nan])))
@pytest.mark.filterwarnings("ignore::scipy.stats.ConstantInputWarning")
def test_nan_is_not_ranked(pair: tuple[list[float], list[float]]) -> None:
    from scipy.stats import spearmanr

    gold, said = pair
    assume(len(gold) > 1 and np.isnan([*gold, *said]).any())
    assert math.isnan(spearmanr(gold, said)[0])
    assert all(math.isnan(measure(gold, said)) for measure in (spearman, pearson, mse))


def test_nan_is_worse_than_any_number() -> None:
    for name, worst in (("accuracy", 0.0), ("mse", 1e300)):
        assert is_better(name, worst, math.nan)
        assert not is_better(name, math.nan, worst)
    assert math.isnan(pearson([1, 2], [1, math.inf]))
    assert math.isnan(perplexity([math.nan, -1.0]))
    assert perplexity([-1e4]) == math.inf
    assert spearman([1, 2, 3], [1, 2, math.inf]) == pytest.approx(1)  # infinity has a rank
    with pytest.raises(UsageError, match="question 2 is NaN"):
        best_threshold([["a"], ["b"]], ["a", "b"], [0.0, math.nan])


TAGS = st.sampled_from(["O", *(f"{mark}-{name}" for mark in "BIES" for name in ("PER", "LOC"))])


@few
@given(st.lists(st.lists(st.tuples(TAGS, TAGS), min_size=1, max_size=12), min_size=1, max_size=6))
def test_entities_as_seqeval(sentences: list[list[tuple[str, str]]]) -> None:
    from seqeval import metrics as theirs

    gold = [[g for g, _ in sentence] for sentence in sentences]
    said = [[s for _, s in sentence] for sentence in sentences]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = {
            "entity_f1": theirs.f1_score(gold, said),
            "entity_precision": theirs.precision_score(gold, said),
            "entity_recall": theirs.recall_score(gold, said),
        }
    assert score_predictions(tuple(wanted), gold, said) == pytest.approx(wanted)


def test_the_ways_to_mark_entities_agree() -> None:
    wanted = {("PER", 0, 1), ("PER", 2, 2), ("LOC", 4, 4)}
    assert entities(["I-PER", "I-PER", "B-PER", "O", "I-LOC"]) == wanted  # IOB1
    assert entities(["B-PER", "I-PER", "B-PER", "O", "B-LOC"]) == wanted  # IOB2
    assert entities(["B-PER", "E-PER", "S-PER", "O", "S-LOC"]) == wanted  # BIOES
    assert entities(["INTJ", "INTJ"]) == {("INTJ", 0, 0), ("INTJ", 1, 1)}  # a tag a word
    assert entities(["B-PER", "L-PER", "U-PER", "O", "U-LOC"]) == wanted  # BILOU


# ------------------------------------------------------------------ SQuAD, its rules once more


def normalised(text: str) -> list[str]:
    """Lower case, no punctuation, no articles, split at spaces: written from the description."""
    kept = text.lower().translate(str.maketrans("", "", string.punctuation))
    return [word for word in re.sub(r"\b(?:a|an|the)\b", " ", kept).split() if word]


def one_f1(gold: str, said: str) -> float:
    a, b = normalised(gold), normalised(said)
    if not a or not b:
        return float(a == b)
    shared = sum(min(a.count(word), b.count(word)) for word in set(a))
    if not shared:
        return 0.0
    precision, recall = shared / len(b), shared / len(a)
    return 2 * precision * recall / (precision + recall)


WORDS = st.lists(
    st.sampled_from(["the", "a", "Cat", "cat.", "sat", "an", "-", "on"]), max_size=4
).map(" ".join)
QUESTIONS = st.lists(
    st.tuples(st.lists(WORDS, max_size=3), WORDS, st.integers(-9, 9)), min_size=1, max_size=12
)


@few
@given(QUESTIONS)
def test_answers_by_squads_rules(rows: list[tuple[list[str], str, int]]) -> None:
    gold, said = [g for g, _, _ in rows], [s for _, s, _ in rows]
    meant = [[g for g in golds if normalised(g)] or [""] for golds in gold]
    exact = [
        max(normalised(g) == normalised(s) for g in golds)
        for golds, s in zip(meant, said, strict=True)
    ]
    scores = [max(one_f1(g, s) for g in golds) for golds, s in zip(meant, said, strict=True)]
    assert span_exact(gold, said) == pytest.approx(np.mean(exact))
    assert span_f1(gold, said) == pytest.approx(np.mean(scores))


REAL = st.lists(st.sampled_from(["the", "Cat", "sat", "on"]), max_size=3).map(
    lambda some: " ".join([*some, "mat"])
)
# A threshold cannot part equals, and articles alone are no answer; the official search overlooks
# both.
SURE = st.lists(
    st.tuples(st.lists(REAL, max_size=3), REAL, st.integers(-99, 99)),
    min_size=1,
    max_size=12,
    unique_by=lambda row: row[2],
)


@few
@given(SURE)
def test_no_threshold_beats_the_best_one(rows: list[tuple[list[str], str, int]]) -> None:
    gold, said, null = ([row[i] for row in rows] for i in range(3))
    found = best_threshold(gold, said, null)

    def with_threshold(at: float) -> float:
        return span_f1(gold, ["" if n > at else s for s, n in zip(said, null, strict=True)])

    assert found.score == pytest.approx(max(with_threshold(at) for at in (min(null) - 1, *null)))
    assert with_threshold(found.threshold) == pytest.approx(found.score)


def test_squads_rules_by_hand() -> None:
    assert span_exact([["The Denver Broncos!"]], ["denver broncos"]) == 1
    assert span_f1([["Denver Broncos", "the Broncos of Denver"]], ["broncos"]) == pytest.approx(
        2 / 3
    )
    assert span_f1([[]], [""]) == 1
    assert span_f1([[]], ["anything"]) == 0
    assert span_f1([["yes"]], [""]) == 0
    # two answerable, one not; giving up on the least sure is best
    found = best_threshold([["a1"], ["b1"], []], ["a1", "b1", "c"], [-3.0, 1.0, 2.0])
    assert (found.score, found.threshold) == (1.0, 1.0)


# ------------------------------------------------------------------ language, means, refusals


def test_language_measures_and_means() -> None:
    assert perplexity([math.log(0.25)] * 3) == pytest.approx(4)
    assert bits_per_byte([math.log(0.5)] * 6, "말") == pytest.approx(2)  # three bytes
    found = mean_with_error([1.0, 2.0, 3.0, 4.0])
    assert (found.mean, found.deviation) == (2.5, pytest.approx(np.std([1, 2, 3, 4], ddof=1)))
    assert found.standard_error == pytest.approx(found.deviation / 2)
    assert mean_with_error([3.0]).standard_error == 0


def test_tags_that_mark_no_entities_are_judged_word_by_word() -> None:
    task = custom_task("tagging", text="words", label="tags")
    assert by_tags(task, ("ADJ", "NOUN", "X")).metrics == ("tag_accuracy", "tag_f1_macro")
    for tags in (("B-PER", "I-PER", "O"), ("O", "PER"), ("B", "I"), ()):
        assert by_tags(task, tags) is task
    gold, said = [["DET", "NOUN"], ["NOUN", "VERB"]], [["DET", "NOUN"], ["VERB", "VERB"]]
    found = score_predictions(["tag_accuracy", "tag_f1_macro", "entity_f1"], gold, said)
    # a tag's word is an entity of its own, so old scores compare
    assert found == pytest.approx(
        {"tag_accuracy": 3 / 4, "tag_f1_macro": 7 / 9, "entity_f1": 3 / 4}
    )


def test_unscorable_inputs_are_refused() -> None:
    with pytest.raises(UsageError, match="2 labels and 1 prediction"):
        accuracy(["a", "b"], ["a"])
    with pytest.raises(UsageError, match="nothing to score"):
        f1_macro([], [])
    with pytest.raises(UsageError, match="f1_macro"):
        f1(["a", "b", "c"], ["a", "b", "c"])
    with pytest.raises(UsageError, match="Sentence 1 has 2 tags and 1"):
        entity_f1([["O", "O"]], [["O"]])
    with pytest.raises(UsageError, match="Did you mean 'accuracy'"):
        METRICS.find("acuracy")
    assert is_better("accuracy", 0.9, 0.8)
    assert is_better("mse", 0.1, 0.2)


def test_korquad_counts_characters_as_its_script_does() -> None:
    """By hand: quotes and brackets become spaces, other punctuation goes, case is folded."""
    golds = [["《국회 의원》"], ["1988년", "1988년 9월"], ["서울(Seoul)"]]
    said = ["국회의원", "1988년 8월", "서울, SEOUL"]
    # 국회 의원 / 국회의원: the same four characters, but the space makes them unequal
    # best gold 1988년9월: 6 of the 7 characters on either side
    # 서울 seoul / 서울 seoul: equal
    assert korquad_exact(golds, said) == pytest.approx(1 / 3)
    assert korquad_f1(golds, said) == pytest.approx((1 + 6 / 7 + 1) / 3)
    assert korquad_f1([["가나다"]], ["나라"]) == pytest.approx(2 * 1 / (2 + 3))
    assert korquad_f1([["가"]], [""]) == 0
