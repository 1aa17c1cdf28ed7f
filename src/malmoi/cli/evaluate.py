"""`malmoi evaluate`: a fine-tuned model with its head, any other in context."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from malmoi.api.records import ColumnOptions, DetailedSettings, EvaluateSettings
from malmoi.api.run_options import LoadOptions
from malmoi.api.runs import announced, overlap_finder
from malmoi.cli import shared as cli
from malmoi.cli.finetune import show_facts, task_and_files
from malmoi.errors import UsageError, require_that
from malmoi.messages import joined, msg, plural
from malmoi.system.files import require_free

if TYPE_CHECKING:
    from malmoi.evaluation.in_context.run import InContextResult
    from malmoi.evaluation.tasks import Task

YAML = (".yaml", ".yml")


def evaluate_command(
    model: cli.Model,
    words: list[str] | None = cli.argument(
        None,
        "Labelled rows; some tasks generate their own. TASK: a name (malmoi tasks) or a "
        "kind such as classification; omit it for the one the model was fine-tuned for.",
        metavar="[TASK] [FILE…]",
        autocompletion=cli.complete_tasks,
    ),
    data: list[Path] | None = cli.option(None, "Labelled rows, if not given as FILE."),
    shots: str | None = cli.option(
        None, "Evaluate in context with this many examples: 0, 1, K, max, or 0,1,4.", metavar="K"
    ),
    asked: dict[str, Any] = cli.options_of(EvaluateSettings, DetailedSettings, LoadOptions),
    show: int = cli.option(0, "Print the first N prompts as the model saw them."),
    overwrite: cli.Overwrite = False,
    metric: str | None = cli.option(None, "Primary metric: f1_macro, mcc, bleu…"),
    columns: dict[str, Any] = cli.options_of(ColumnOptions),
    json: cli.Json = False,
) -> None:
    """Evaluate a model on a task, fine-tuned or in context.

    A fine-tuned model is evaluated with its head, any GPT or BERT in context with --shots.

    Example: malmoi evaluate --model runs/reviews test.csv

    Example: malmoi evaluate translation --model runs/en-de test.en test.de

    Example: malmoi evaluate copa --model runs/tiny-gpt copa.jsonl --shots 0,1,4 --show 2
    """
    out, harness = asked.pop("out", None), asked.pop("harness", None)
    loading: dict[str, Any] = {n: asked.pop(n) for n in ("device", "dtype") if n in asked}
    skip_bad, corpus = asked.pop("skip_bad", False), asked.pop("contamination", None)
    asking = asked if shots is None else {"shots": shots, **asked}
    if out is not None:
        require_free(out, overwrite=overwrite)
    find = overlap_finder(corpus) if corpus else None
    found: dict[str, Any] = {} if find is None else {"contamination": find}
    harnessed = next((word for word in words or [] if word.endswith(YAML)), None)
    name, files = ("", data or []) if harnessed else task_and_files(words or [], data)
    cli.load_torch()
    from malmoi.evaluation.evaluate import evaluate_model, in_context

    opened = cli.open_model(model, loading)
    rows: Any = files[0] if len(files) == 1 else files or None
    chosen = harnessed or _task(opened, name, rows, cli.parsed_columns(columns), metric)
    if opened.config.encoder_depth:
        show_facts(evaluate_model(opened, chosen, rows, **asking, **found), json)
    elif "beams" in asking:
        raise UsageError("--beams is for a model that translates (malmoi pretrain transformer-…).")
    elif harness is not None or isinstance(chosen, str):
        asking |= found | {"skip_bad": skip_bad, "harness": harness}
        show_facts(evaluate_model(opened, chosen, rows, **asking), json)
    elif show or out or in_context(chosen, opened, asking):
        from malmoi.evaluation.evaluate import few_shot_results, in_context_config

        config = in_context_config(asking | {"skip_bad": skip_bad})
        _print_results(few_shot_results(opened, chosen, rows, config, out, find), show, json)
    else:
        found |= asking | {"skip_bad": skip_bad, "per_label": True}
        facts = evaluate_model(opened, chosen, rows, **found)
        show_facts(facts, json)
        if not json:
            _print_contamination(facts.get("contamination"))


def _print_contamination(found: dict[str, Any] | None) -> None:
    if found is None:
        return
    counts = {name: found[name] for name in ("dirty", "items", "words", "short")}
    cli.print_result(
        msg(
            "\n{dirty:,} of {items:,} items share a run of {words} words with the corpus; "
            "{short:,} have no such run and count as clean.",
            **counts,
        )
    )
    columns = ("all", "clean", "dirty", "clean_minus_all")
    rows = [
        (name, *(f"{row[part]:.4f}" if part in row else "–" for part in columns))
        for name, row in found["scores"].items()
    ]
    cli.print_table(("measure", "all", "clean", "dirty", "clean − all"), rows)


def _task(
    model: "cli.inference.Model", name: str, rows: Any, columns: dict[str, Any], metric: str | None
) -> "Task":
    """The task that was named, or the one that the model was fine-tuned for, on its columns."""
    from malmoi.evaluation.guess import evaluated_task, tuned_task
    from malmoi.evaluation.kinds import by_metric

    require_that(
        name or tuned_task(model) is not None,
        "Which task? {folder} was not fine-tuned for one: name it, as in malmoi evaluate "
        "classification rows.csv --model {folder}.",
        folder=model.checkpoint.source,
    )
    return by_metric(announced(*evaluated_task(model, name or None, rows, columns)), metric or "")


def _print_results(found: "list[InContextResult]", show: int, json: bool) -> None:
    """Prints the requested prompts, then the metrics with their errors in one table."""
    for result in found:
        shown = [_item(result, i) for i in range(min(show, len(result.questions)))]
        if json:
            more = {"shown": shown} if shown else {}
            cli.print_json({"task": result.task, **result.facts, **more})
        else:
            _print_items(shown)
    if not json:
        _print_measures(found)
        for result in found:
            _print_contamination(result.contamination)


def _print_items(shown: list[dict[str, Any]]) -> None:
    answered = "    choices: {choices}\n    label: {right!r}, prediction: {said!r}\n"
    for one in shown:
        head = (f"--- {one['place']}, ", plural(one["shots"], "example"), f"\n{one['prompt']}⟨…⟩")
        cli.print_result(joined("", head))
        cli.print_result(msg(answered, **one))


def _print_measures(found: "list[InContextResult]") -> None:
    """Prints the metrics: a list for one number of examples, one column each for several."""
    names = list(found[0].verdict.measures)
    counts = ("shots", "examples")
    cells = [
        {name: str(result.verdict.measures[name]) for name in names}
        | {n: f"{result.facts[n]:g}" for n in counts}
        for result in found
    ]
    if len(found) == 1:
        cli.print_table(("measure", "value ± error"), cells[0].items())
        return
    columns = ("shots", *names, "examples")
    cli.print_table(columns, [[row[name] for name in columns] for row in cells])


def _item(result: "InContextResult", number: int) -> dict[str, Any]:
    question = result.questions[number]
    prediction = result.verdict.predictions[number]
    prompt = question.prompt
    return {
        "place": question.example.place,
        "shots": question.shots,
        "prompt": question.before,
        "choices": list(prompt.choices),
        "ending": prompt.ending,
        "right": None if prompt.gold is None else prompt.choices[prompt.gold],
        "said": prompt.choices[prediction] if type(prediction) is int else prediction,
    }
