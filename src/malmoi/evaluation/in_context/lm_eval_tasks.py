"""Evaluation with lm-evaluation-harness, through its task YAML and model interface."""

import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from malmoi.errors import UsageError, ensure, explained, require_that
from malmoi.evaluation.in_context import graders
from malmoi.evaluation.in_context.run import InContextConfig, parse_shots, split_rows
from malmoi.evaluation.kinds import grade_answers, grade_texts, kind_of, task_prompt
from malmoi.evaluation.prompts import templated
from malmoi.evaluation.task import Example, Task
from malmoi.inference import Model
from malmoi.text.rows import RowSource

HarnessConfig = dict[str, Any]


def evaluate_with_harness(
    model: Model, task: Task | Path, data: RowSource | None, asking: InContextConfig, harness: str
) -> dict[str, Any]:
    """The harness's metrics, {"acc": 0.61, "acc_stderr": 0.02, …}; a path is a task's YAML."""
    require_that(
        harness == "lm-eval",
        "There is no harness {harness!r}; Malmoi knows lm-eval.",
        harness=harness,
    )
    shots, *others = parse_shots(asking.shots)
    if others or shots is None:
        raise UsageError("lm-eval takes one number of examples: --shots 4.")
    with tempfile.TemporaryDirectory() as folder:
        if isinstance(task, Task):
            task = write_task(templated(task, asking.template), data, asking, Path(folder))
        return run_lm_eval(model, task, shots, asking)


def run_lm_eval(model: Any, path: Path, shots: int, asking: InContextConfig) -> dict[str, Any]:
    """Runs `simple_evaluate` on one task file; `model` may name another back end with arguments."""
    with explained(ImportError, "lm-eval is not installed ({error}): pip install lm-eval."):
        import yaml
        from lm_eval.evaluator import simple_evaluate
        from lm_eval.tasks import TaskManager

        from malmoi.evaluation.in_context.lm_eval_model import MalmoiLM
    ensure(path.is_file(), "There is no task file {path}.", path=path)
    name = yaml.safe_load(path.read_text("utf-8"))["task"]
    judged, arguments = (MalmoiLM(model), None) if isinstance(model, Model) else model
    done = simple_evaluate(
        judged,
        arguments,
        tasks=[name],
        num_fewshot=shots,
        limit=asking.limit,
        fewshot_random_seed=asking.seed,
        task_manager=TaskManager(include_path=str(path.parent), include_defaults=False),
        bootstrap_iters=1000,
        log_samples=False,
    )
    measured = {
        key.partition(",")[0]: value for key, value in done["results"][name].items() if "," in key
    }
    found = {key: float(value) for key, value in measured.items() if value != "N/A"}
    return {**found, "shots": shots, "examples": done["n-samples"][name]["effective"]}


# ------------------------------------------------------------------ the harness's task format


def write_task(task: Task, data: RowSource | None, asking: InContextConfig, folder: Path) -> Path:
    """Writes the task's rows as JSON lines and its YAML; returns the YAML's path."""
    shape_of = HARNESS_SHAPES.get(kind_of(task).grade)
    if shape_of is None:
        raise UsageError(
            "lm-eval has no equivalent of {kind}; evaluate {task} without --harness.",
            kind=task.kind,
            task=task.name,
        )
    shape, document = shape_of(task)
    items, pool, _ = split_rows(task, data, replace(asking, limit=None, shots=0))
    # within one split, the harness never shows an item itself
    parts = {"test": items} if pool is items else {"test": items, "train": pool}
    for name, rows in parts.items():
        lines = (json.dumps(document(example), ensure_ascii=False) for example in rows)
        (folder / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines), "utf-8")
    config = {
        "task": f"malmoi_{task.name}",
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {name: str(folder / f"{name}.jsonl") for name in parts},
            "cache_dir": str(folder / "cache"),
        },
        "test_split": "test",
        "fewshot_split": list(parts)[-1],
        "description": task.intro,
        "fewshot_delimiter": task.separator,
        **shape,
    }
    path = folder / f"{task.name}.yaml"
    path.write_text(json.dumps(config, ensure_ascii=False, indent=1), "utf-8")  # JSON is valid YAML
    return path


HarnessDocument = Callable[[Example], HarnessConfig]


def _choices(task: Task) -> tuple[HarnessConfig, HarnessDocument]:
    def plain(example: Example) -> HarnessConfig:
        prompt = task_prompt(task, example)
        choices = [choice.removeprefix(" ") for choice in prompt.choices]
        return {"query": prompt.query, "choices": choices, "gold": prompt.gold}

    def by_context(example: Example) -> HarnessConfig:
        prompt = task_prompt(task, example)
        contexts = [prompt.query + choice for choice in prompt.choices]
        return {"choices": contexts, "ending": prompt.ending.removeprefix(" "), "gold": prompt.gold}

    measures = [
        {"metric": name, "aggregation": "mean", "higher_is_better": True}
        for name in ("acc", "acc_norm")
    ]
    shape = {"output_type": "multiple_choice", "doc_to_choice": "choices", "metric_list": measures}
    # several contexts, one ending: the harness then expects the gold index in doc_to_text
    if task.gap == "rest":
        shape |= {"doc_to_text": "gold", "doc_to_target": "{{ending}}"}
        return {**shape, "metric_list": measures[:1]}, by_context
    return {**shape, "doc_to_text": "{{query}}", "doc_to_target": "gold"}, plain


def _cloze(task: Task) -> tuple[HarnessConfig, HarnessDocument]:
    """The harness adds no space before a target scored alone, so the word includes its own."""
    shape = _shape("loglikelihood", "{{query}}", "{{' ' + answer}}", "acc", "perplexity")
    return {**shape, "target_delimiter": ""}, partial(_asked, task)


def _write(task: Task) -> tuple[HarnessConfig, HarnessDocument]:
    kwargs = {"until": ["\n"], "max_gen_toks": task.max_answer_tokens, "do_sample": False}
    shape = _shape("generate_until", "{{query}}", "{{answer}}", "exact_match")
    return {**shape, "generation_kwargs": kwargs}, partial(_asked, task)


def _asked(task: Task, example: Example) -> HarnessConfig:
    prompt = task_prompt(task, example)
    return {"query": prompt.query, "answer": prompt.choices[prompt.gold or 0].removeprefix(" ")}


def _text(task: Task) -> tuple[HarnessConfig, HarnessDocument]:
    measures = ("word_perplexity", "byte_perplexity", "bits_per_byte")
    shape = _shape("loglikelihood_rolling", "", "{{text}}", *measures)
    return shape, lambda example: {"text": example.text}


def _shape(output: str, text: str, target: str, *metrics: str) -> HarnessConfig:
    return {
        "output_type": output,
        "doc_to_text": text,
        "doc_to_target": target,
        "metric_list": [{"metric": name} for name in metrics],
    }


# by how a kind is graded here, the harness's equivalent
HARNESS_SHAPES: dict[graders.Grader, Callable[[Task], tuple[HarnessConfig, HarnessDocument]]] = {
    graders.grade_labels: _choices,
    graders.grade_choices: _choices,
    graders.grade_cloze: _cloze,
    grade_texts: _write,
    grade_answers: _write,
    graders.grade_likelihood: _text,
}
