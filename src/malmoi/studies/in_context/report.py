"""report.md: the results beside GPT-3's, and what small models cannot do."""

from collections.abc import Mapping, Sequence

from malmoi.metrics import MeanWithError
from malmoi.studies.in_context.curves import SizeResults, rough

GPT3 = {  # Brown et al. 2020 table 3.10: GPT-3 175B after 0, 1 and 100 examples
    "random-insertion": (0.0826, 0.454, 0.672),
    "reverse": (0.0009, 0.0048, 0.0044),
}
# accuracy with the most examples: above, a rule is learned; below, it is not
LEARNT = 0.8
FAILED = 0.2


def report(found: Mapping[str, SizeResults]) -> str:
    """The report in Markdown; every sentence is derived from the numbers."""
    parts = [_models(found), _curve(found), _rules(found), _beside(found), _limits(found)]
    return "# In-context learning in small models\n\n" + "\n".join(part for part in parts if part)


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def _share(value: MeanWithError) -> str:
    return f"{value.mean:.1%} ± {value.standard_error:.1%}"


def _models(found: Mapping[str, SizeResults]) -> str:
    rows = [
        (
            name,
            rough(one.facts["parameters"]),
            rough(one.facts["tokens"]),
            f"{one.facts['seconds']:.0f}",
            "" if one.facts["valid_loss"] is None else f"{one.facts['valid_loss']:.3f}",
        )
        for name, one in found.items()
    ]
    lead = (
        "GPTs of characters, pre-trained on text and on documents that each follow one hidden rule "
        "(`x = y`, line by line). The questions have words, and of some rules parameters, that no "
        "document had.\n\n"
    )
    return lead + _table(
        ("size", "parameters", "characters seen", "seconds", "validation loss"), rows
    )


def _curve(found: Mapping[str, SizeResults]) -> str:
    shots = next(iter(found.values())).shots
    head = ["examples", *found, *(f"{name}, instructed" for name in found)]
    rows = [
        [number, *(_share(one.at(number, one.rules, instructed=told)) for told in (False, True)
                   for one in found.values())]
        for number in shots
    ]  # fmt: skip
    gains = ", ".join(f"{_gain(one):+.1f} points ({name})" for name, one in found.items())
    return (
        "## Accuracy by the number of examples\n\n![Accuracy by examples](curve.svg)\n\nThe whole "
        "answer must be right, over all rules, ± standard error of the "
        f"questions.\n\n{_table(head, rows)}\nFrom {shots[0]} to {shots[-1]} examples: {gains}.\n"
    )


def _gain(one: SizeResults) -> float:
    first, last = (one.at(number, one.rules).mean for number in (one.shots[0], one.shots[-1]))
    return 100 * (last - first)


def _rules(found: Mapping[str, SizeResults]) -> str:
    """Accuracy on each rule from no examples to the most, size by size."""
    rows = [
        [rule, *(_rise(one, rule) for one in found.values())]
        for rule in next(iter(found.values())).rules
    ]
    shots = next(iter(found.values())).shots
    steps = " → ".join(map(str, _few(shots)))
    return (
        f"## Rule by rule\n\nWithout instruction, after {steps} "
        f"examples.\n\n{_table(['rule', *found], rows)}"
    )


def _few(shots: Sequence[int]) -> list[int]:
    """A selection of the example counts: none, one, some and the most."""
    return sorted({shots[0], shots[min(1, len(shots) - 1)], shots[len(shots) // 2], shots[-1]})


def _rise(one: SizeResults, rule: str) -> str:
    return " → ".join(f"{one.at(number, [rule]).mean:.0%}" for number in _few(one.shots))


def _beside(found: Mapping[str, SizeResults]) -> str:
    """GPT-3's own figures for the rules that it was tested on too."""
    name, largest = list(found.items())[-1]
    rules = [rule for rule in GPT3 if rule in largest.rules]
    last = largest.shots[-1]
    rows = [
        [
            rule,
            *(f"{value:.1%}" for value in GPT3[rule]),
            _share(largest.at(0, [rule], instructed=True)),
            _share(largest.at(last, [rule], instructed=True)),
        ]
        for rule in rules
        if 0 in largest.shots
    ]
    if not rows:
        return ""
    head = ["rule", "GPT-3 175B, 0", "1", "100 examples", f"ours ({name}), 0", f"{last} examples"]
    return (
        "## Beside GPT-3\n\nBrown et al. 2020, table 3.10, with their instruction. The figures are "
        "not of one kind: GPT-3 met these tasks in its prompt only and reads pieces of words; ours "
        "was pre-trained on documents of them and reads characters. Only the shapes of the curves "
        f"compare.\n\n{_table(head, rows)}"
    )


def _limits(found: Mapping[str, SizeResults]) -> str:
    """The rules that the largest model fails at."""
    name, largest = list(found.items())[-1]
    most = largest.shots[-1]
    ends = {rule: largest.at(most, [rule]).mean for rule in largest.rules}
    learnt = [rule for rule, share in ends.items() if share >= LEARNT]
    failed = [f"{rule} ({share:.0%})" for rule, share in ends.items() if share < FAILED]
    said = [
        f"With {most} examples the {name} model follows {len(learnt)} of {len(ends)} rules at "
        f"least {LEARNT:.0%} of the time"
        + (f" and stays below {FAILED:.0%} on {', '.join(failed)}." if failed else ".")
    ]
    if largest.unseen:
        rows = [[rule, *(_rise(one, rule) for one in found.values())] for rule in largest.unseen]
        steps = " → ".join(map(str, _few(largest.shots)))
        said.append(
            "Examples choose among rules that pre-training had; a rule that is two of them one "
            "after the other was in "
            f"no document, and examples teach it this much (after {steps} of them):\n\n"
            + _table(["rule", *found], rows).rstrip()
        )
    said.append(
        "The documents have the very form of the questions, so what is measured is how a model "
        "finds the rule and its parameter in context, not whether it can be taught anything. "
        "Held-out words are in no document, but the natural text has them. One run a size, one "
        "seed: differences between sizes of a few points are not significant."
    )
    return "## What these models cannot do\n\n" + "\n\n".join(said) + "\n"
