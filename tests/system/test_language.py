"""The user's language: every message of the source has Korean, and reads as Korean."""

import ast
import pickle
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from string import Formatter
from typing import Any

import pytest
from jinja2 import Environment
from jinja2.nodes import Call, Const
from typer.main import get_command

from conftest import environment
from malmoi.adapters.config import AdapterConfig
from malmoi.api.records import SETTINGS
from malmoi.cli import run_command
from malmoi.cli.app import build_app
from malmoi.demo.texts import BUILT_IN
from malmoi.errors import MalmoiError, UsageError, nearest
from malmoi.evaluation.tasks import TASKS
from malmoi.inference.generation.options import ConstraintOptions, GenerationConfig
from malmoi.messages import catalogue, joined, language, measured, msg, plural, sections, translate
from malmoi.metrics import METRICS
from malmoi.settings import settings_of
from malmoi.text.rows import BadRow
from malmoi.training.recipe import Recipe

SOURCE = Path(__file__).parents[2] / "src" / "malmoi"
# functions whose arguments are said to users
DOORS = {"msg", "UsageError", "MalmoiError", "ApiError", "BadRow", "BrokenRow", "require"}
DOORS |= {"require_known", "require_that", "required", "ensure", "explained"}
DOORS |= {"_require", "CorruptState", "DiskError", "QueueFull", "ensure_whole", "refuse_unless"}
DOORS |= {"info", "warning", "say", "_say", "note", "line", "heading"}
# English word order in Korean words, and spellings that Korean papers do not use
CALQUES = ("들립니다", "섭니다", "짐작", "낱말 가리기", "대화 틀", " %", "당신", "그것은")
# one word for one thing
CALQUES += (
    "파인튜닝",
    "미세조정",
    "레이블",
    "에폭",
    "임곗값",
    "글롭",
    "데이터 세트",
    "허깅 페이스",
)
# wrong after half of the values
FIXED_PARTICLE = re.compile(r"\}[”'’]?(?:은|는|이|가|을|를|과|와|로|으로)(?![가-힣(])")


@pytest.fixture
def korean() -> Iterator[None]:
    with environment(MALMOI_LANG="ko", COLUMNS="80"):
        yield


@cache
def nodes() -> list[ast.AST]:
    """The source, and in the templates of pages what stands between braces."""
    trees = [ast.parse(file.read_text("utf-8")) for file in SOURCE.rglob("*.py")]
    for file in SOURCE.rglob("*.jinja"):
        for kind in (Call, Const):
            for found in Environment().parse(file.read_text("utf-8")).find_all(kind):
                trees.append(ast.parse(as_python(found)))
    return [node for tree in trees for node in ast.walk(tree)]


def as_python(node: Call | Const) -> str:
    """A text of a template, or a call with the texts that it is given."""
    if isinstance(node, Const):
        return repr(node.value)
    texts = [repr(one.value) for one in node.args if isinstance(one, Const)]
    return f"{getattr(node.node, 'name', '_')}({', '.join(texts)})"


def calls() -> Iterator[tuple[str, ast.Call]]:
    for node in nodes():
        if isinstance(node, ast.Call):
            yield getattr(node.func, "id", getattr(node.func, "attr", "")), node


def words_of(text: str) -> str:
    """The text without its values."""
    return "".join(words for words, *_ in Formatter().parse(text))


def fields_of(text: str) -> set[str]:
    return {name for _, name, *_ in Formatter().parse(text) if name is not None}


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def texts_of(node: ast.expr) -> set[str]:
    """The texts that an argument may be: itself, one of two, or what its name was given."""
    if isinstance(node, ast.IfExp):
        return texts_of(node.body) | texts_of(node.orelse)
    if isinstance(node, ast.Name):
        return assigned().get(node.id, set())
    return {node.value} if is_text(node) else set()  # type: ignore[attr-defined]


@cache
def assigned() -> dict[str, set[str]]:
    """Sentences by the name of the variable that holds them, anywhere in the source."""
    found: dict[str, set[str]] = {}
    for node in nodes():
        sentence = isinstance(node, ast.Assign) and is_text(node.value)
        if sentence and node.value.value.endswith((".", "}")):  # type: ignore[attr-defined]
            for target in node.targets:  # type: ignore[attr-defined]
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, set()).add(node.value.value)  # type: ignore[attr-defined]
    return found


def said() -> set[str]:
    """Every text and template that is passed to a door, except for punctuation between values."""
    found = set()
    for name, call in calls():
        for argument in call.args if name in DOORS else ():
            found |= texts_of(argument)
    for node in nodes():  # rules by the sentence that says them
        for key in node.keys if isinstance(node, ast.Dict) else ():
            found |= {text for text in texts_of(key) if text.endswith(".")} if key else set()
    return {text for text in found if re.search("[A-Za-z]{2,} [A-Za-z]", words_of(text))}


def strings() -> set[str]:
    """Every string of the source; docstrings by paragraph, metrics and counts with numbers."""
    tracks = tomllib.loads((SOURCE / "studies" / "records.toml").read_text("utf-8"))["tracks"]
    found: set[str] = {track["about"] for track in tracks.values()}
    found |= {task.about for task in TASKS.values()}
    found |= {words for text in BUILT_IN.values() for words in (text.title, text.about)}
    metrics = {name.replace("_", " ") for name in METRICS}  # named by their functions
    found |= metrics | {f"{words} {{value}}" for words in metrics}
    for node in nodes():
        if is_text(node):
            text: str = node.value  # type: ignore[attr-defined]
            found |= {text, *(" ".join(part.split()) for part in text.split("\n\n"))}
            words = text.replace("_", " ")
            if text.isidentifier():  # a metric, also of a head, or a unit
                measures = (words, f"{words} accuracy", f"{words} loss")
                found |= {
                    f"{{count}} {words}",
                    *measures,
                    *(f"{one} {{value}}" for one in measures),
                }
    return found | counts()


def counts() -> set[str]:
    """What `plural` says: one row, many rows."""
    nouns = {c.args[1].value for name, c in calls() if name == "plural" and is_text(c.args[1])}  # type: ignore[attr-defined]
    return {f"{{count}} {noun}{end}" for noun in nouns for end in ("", "s")}


def test_everything_that_is_said_has_korean() -> None:
    texts = said() | counts()
    assert len(texts) > 1000
    assert {text for text in texts if text not in catalogue()} == set()


def test_every_key_is_a_text_of_the_source() -> None:
    assert set(catalogue()) - strings() - set(sections()["typer"]) == set()


def test_a_translation_keeps_the_values_and_is_no_calque() -> None:
    options = re.compile("--[a-z]+")  # stay as they are typed
    for english, korean in catalogue().items():
        assert fields_of(korean) == fields_of(english), english
        assert set(options.findall(korean)) == set(options.findall(english)), english
        assert not [calque for calque in CALQUES if calque in korean], korean
        assert not FIXED_PARTICLE.search(korean), korean


def test_every_setting_has_a_korean_help() -> None:
    records = (Recipe, AdapterConfig, GenerationConfig, ConstraintOptions)
    known = [*SETTINGS.values(), *map(settings_of, records)]
    said = {text for one in known for about in one.values() for text in (about.help, about.shown)}
    words = {text for text in said if re.search("[a-z]", text)}
    assert words - catalogue().keys() == set()


def test_the_language_follows_the_locale() -> None:
    assert language({}) == "en"
    assert language({"LANG": "ko_KR.UTF-8"}) == "ko"
    assert language({"LANG": "ko_KR.UTF-8", "MALMOI_LANG": "en"}) == "en"


def test_a_message_is_its_english_text_and_remembers_its_parts() -> None:
    message = msg("There is no {what} {name!r}.", what="task", name="a.b")
    assert message == "There is no task 'a.b'."
    assert pickle.loads(pickle.dumps(message)).template == message.template
    assert str(UsageError(message)) is message
    error = MalmoiError(
        "{place}: {error}", place="a.csv", error=BadRow("a.csv:3", "a text is empty")
    )
    assert str(error) == "a.csv: a.csv:3: a text is empty"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert msg("100 % of {}") == "100 % of {}"  # no values: no template


def test_values_are_kept_as_they_are() -> None:
    for name in ("no.such.csv", "runs", "the data", "이(가)", "{path}", "loss"):
        error = UsageError("There is no file or folder {path!r}.{hint}", path=name, hint="")
        assert translate(str(error), "ko") == f"{name!r}: 그런 파일이나 폴더가 없습니다."
    assert translate("runs", "en") == "runs"


def test_messages_in_messages_are_translated() -> None:
    hint = nearest("sst", ["sst2"])
    english = "There is no task {name!r}.{hint} `malmoi tasks` lists them."
    assert translate(msg(english, name="sst", hint=hint), "ko") == (
        "'sst' 과제는 없습니다. 'sst2'를 찾으셨나요? 목록은 `malmoi tasks`로 봅니다."
    )
    rows = (
        BadRow(
            "a.csv:3", "{fields} where there should be {names}", fields=plural(n, "field"), names=2
        )
        for n in (1, 4)
    )
    assert translate(joined("; ", map(str, rows)) + ".", "ko") == (
        "a.csv:3: 필드가 2개여야 하는데 1개입니다; a.csv:3: 필드가 2개여야 하는데 4개입니다."
    )
    assert translate("step 3: " + measured({"valid_loss": 1.5, "mine": 2}), "ko") == (
        "step 3: 검증 손실 1.5, mine 2"
    )


def test_an_error_of_an_error_is_translated() -> None:
    inner = MalmoiError("{path} must hold a JSON array.", path="a.json")
    outer = MalmoiError(
        "{path} does not describe a token store ({error}); build it again.", path="b", error=inner
    )
    assert "a.json에는 JSON 배열" in translate(str(outer), "ko")


@pytest.mark.parametrize(
    ("written", "values", "read"),
    [
        ("{a!r}이(가) {b}을(를)", ("한글", "말모이"), "'한글'이 말모이를"),
        ("{a}을(를) {b}(으)로", (3, 5), "3을 5로"),
        ("{a:.1%}을(를) {b}(으)로", (0.003, "data.csv"), "0.3%를 data.csv로"),
        ("{a}은(는) {b}(이)라", ("model.json", "file"), "model.json은 file이라"),
        ("라벨({a}개)과(와) {b}(으)로", (3, "NER"), "라벨(3개)과 NER로"),
    ],
)
def test_particles_follow_the_last_sound(written: str, values: tuple[Any, Any], read: str) -> None:
    assert translate(msg(written, a=values[0], b=values[1]), "ko") == read


def test_help_and_errors_are_korean(
    korean: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["finetune", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "미세 조정합니다" in shown
    assert "최대 학습률." in shown
    assert run_command(["tasks", "sst"]) == 2
    assert "과제는 없습니다" in capsys.readouterr().err
    assert run_command(["finetune", "no.such.csv"]) == 2
    assert "'no.such.csv': 그런 파일이나 폴더가 없습니다." in capsys.readouterr().err
    assert run_command(["chat"]) == 2
    assert "옵션이 필요합니다: '--model' / '-m'. 도움말: malmoi" in capsys.readouterr().err
    assert run_command(["pretrain", "a.txt", "--minutes", "soon"]) == 2
    assert "'--minutes'의 값이 올바르지 않습니다: 'soon'은 3, 3m" in capsys.readouterr().err
    (tmp_path / "rows.csv").write_text("text,label\na,x\nb,y\nc\n")
    assert run_command(["evaluate", "-m", str(tmp_path), str(tmp_path / "runs")]) != 0
    assert "없습니다" in capsys.readouterr().err


def test_every_help_text_has_a_korean_one() -> None:
    def every(command: Any) -> Iterator[Any]:
        yield command
        for inner in getattr(command, "commands", {}).values():
            yield from every(inner)

    known = catalogue()
    texts = {
        " ".join(part.split())
        for command in every(get_command(build_app()))
        for text in (command.help, *(getattr(one, "help", None) for one in command.params))
        for part in (text or "").split("\n\n")
    }
    texts = {text for text in texts if re.search(r"[a-z]{3,} [a-z]", text)}
    assert {text for text in texts if not text.startswith("Example") and text not in known} == set()
