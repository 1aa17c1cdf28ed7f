"""The user's language: the catalogue belongs to the source, and reads as Korean."""

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from conftest import environment
from malmoi.adapters.config import AdapterConfig
from malmoi.api.records import SETTINGS
from malmoi.cli import run_command
from malmoi.cli.app import build_app
from malmoi.inference.generation.options import ConstraintOptions, GenerationConfig
from malmoi.settings import settings_of
from malmoi.system.language import catalogue, language, translate, with_particles
from malmoi.training.recipe import Recipe

SOURCE = Path(__file__).parents[2] / "src" / "malmoi"
# sentences that typer says
TYPER = re.compile(
    r"Arguments|Options|\[|Show |Install |Missing |No such option|Option \{|Got unexpected"
    r"|Invalid value|\{0\} is not (a valid|one of)"
)
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
# nothing but values: these would match any sentence
TOO_GENERAL = {"{} has {}.{}", "{}:{}: {}. {}", "{} {}", "{}: {}"}


@pytest.fixture
def korean() -> Iterator[None]:
    with environment(MALMOI_LANG="ko", COLUMNS="80"):
        yield


@cache
def nodes() -> list[ast.AST]:
    trees = (ast.parse(file.read_text("utf-8")) for file in SOURCE.rglob("*.py"))
    return [node for tree in trees for node in ast.walk(tree)]


def template(node: ast.AST) -> str:
    """The text of a string, with {} for the values of an f-string; "" for anything else."""
    if isinstance(node, ast.JoinedStr):
        parts = (v.value if isinstance(v, ast.Constant) else "{}" for v in node.values)
        return "".join(str(part) for part in parts)
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return node.value if is_text else ""  # type: ignore[attr-defined]


def sentences() -> set[str]:
    """Every string of the source; docstrings by paragraph."""
    tracks = tomllib.loads((SOURCE / "studies" / "records.toml").read_text("utf-8"))["tracks"]
    found: set[str] = {track["about"] for track in tracks.values()}
    for node in nodes():
        if text := template(node):
            found |= {text, *(" ".join(part.split()) for part in text.split("\n\n"))}
            # a metric with its value, a number with its unit
            words = text.replace("_", " ")
            if text.isidentifier():
                measures = (words, f"{words} accuracy", f"{words} loss")  # the last two of a head
                found |= {f"{{}} {words}", *measures, *(f"{name} {{}}" for name in measures)}
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "plural":
            noun = template(node.args[1])
            found |= {f"{{}} {noun}", f"{{}} {noun}s"}
    return found


def arguments_of(*names: str) -> set[str]:
    """Every string of two words and more that is an argument of one of these calls."""
    calls = (node for node in nodes() if isinstance(node, ast.Call))
    said = {
        template(value)
        for call in calls
        if getattr(call.func, "id", getattr(call.func, "attr", "")) in names
        for value in call.args
    }
    return {text for text in said if " " in text}


def test_every_key_is_a_sentence_of_the_source() -> None:
    known = sentences()
    keys = {re.sub(r"\{\d\}", "{}", key) for key in catalogue() if not TYPER.match(key)}
    assert keys - known == set()


def test_a_translation_keeps_the_values_and_is_no_calque() -> None:
    # options and commands stay as they are typed
    kept = re.compile(r"\{\d\}|--[a-z]+")
    for english, korean in catalogue().items():
        assert set(kept.findall(korean)) == set(kept.findall(english)), english
        assert not [calque for calque in CALQUES if calque in korean], korean
        # a fixed particle would be wrong after half of the values
        assert not re.search(r"\}[”'’]?(?:은|는|이|가|을|를|과|와|로|으로)(?![가-힣(])", korean), (
            korean
        )


def test_every_error_has_a_korean_sentence() -> None:
    known = {re.sub(r"\{\d\}", "{}", key) for key in catalogue()}
    said = arguments_of(
        "UsageError", "MalmoiError", "ApiError", "BadRow", "BrokenRow", "_require", "require"
    )
    assert len(said) > 500
    assert said - known - TOO_GENERAL == set()


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


def test_sentences_are_translated_with_their_values(korean: None) -> None:
    assert translate("There is no task 'sst'. Did you mean 'sst2'? `malmoi tasks` lists them.") == (
        "'sst' 과제는 없습니다. 'sst2'를 찾으셨나요? 목록은 `malmoi tasks`로 봅니다."
    )
    pace = "0.42 s per step: about 12 steps in your 3 minutes."
    assert translate(f"{pace} That is too few to learn much: use --minutes 9.") == (
        "스텝당 0.42초: 3분 동안 약 12스텝. 이 정도로는 배우기 어렵습니다. 권장: --minutes 9."
    )


def test_a_column_named_like_a_unit_is_no_count(korean: None) -> None:
    assert translate("text = document") == "텍스트 = document"
    assert translate("14,021 documents") == "문서 14,021개"


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("'한글'이(가) 말모이을(를)", "'한글'이 말모이를"),
        ("3을(를) 5(으)로, 7(으)로", "3을 5로, 7로"),
        ("0.3%을(를) data.csv(으)로", "0.3%를 data.csv로"),
        ("model.json은(는) file(이)라", "model.json은 file이라"),
        ("라벨(3개)과(와) NER(으)로", "라벨(3개)과 NER로"),
    ],
)
def test_particles_follow_the_last_sound(written: str, read: str) -> None:
    assert with_particles(written) == read


def test_where_and_what_are_translated_apart(korean: None) -> None:
    said = "Invalid recipe: train.lr must be positive, not -1."
    assert translate(said) == "레시피가 잘못되었습니다: train.lr은 양수여야 합니다. 받은 값: -1."
    said = "a.csv:3: the label in 'stars' is missing"
    assert translate(said) == "a.csv:3: 'stars' 열에 라벨이 없습니다"
    said = "a.csv:3: 1 field where there should be 2; a.csv:4: 4 fields where there should be 2."
    fields = "필드가 2개여야 하는데"
    assert translate(said) == f"a.csv:3: {fields} 1개입니다; a.csv:4: {fields} 4개입니다."


def test_help_and_errors_are_korean(korean: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["finetune", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "미세 조정합니다" in shown
    assert "최대 학습률." in shown
    assert run_command(["tasks", "sst"]) == 2
    assert "과제는 없습니다" in capsys.readouterr().err
    assert run_command(["generate"]) == 2
    assert "옵션이 필요합니다: '--model' / '-m'. 도움말: malmoi" in capsys.readouterr().err


def test_every_help_text_has_a_korean_one() -> None:
    def every(command: Any) -> Iterator[Any]:
        yield command
        for inner in getattr(command, "commands", {}).values():
            yield from every(inner)

    known = catalogue()
    said = {
        " ".join(part.split())
        for command in every(get_command(build_app()))
        for text in (command.help, *(getattr(one, "help", None) for one in command.params))
        for part in (text or "").split("\n\n")
    }
    said = {text for text in said if re.search(r"[a-z]{3,} [a-z]", text)}
    missing = {text for text in said if not text.startswith("Example") and text not in known}
    assert missing == set()
