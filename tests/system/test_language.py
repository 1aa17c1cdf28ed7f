"""The user's language: the catalogue belongs to the source, and reads as Korean."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from conftest import environment
from malmoi.cli import run_command
from malmoi.cli.app import build_app
from malmoi.system.language import catalogue, language, translate

SOURCE = Path(__file__).parents[2] / "src" / "malmoi"
# sentences that typer says
TYPER = re.compile(r"Arguments|Options|\[|Show |Install |Missing ")
# English word order in Korean words, and spellings that Korean papers do not use
CALQUES = ("들립니다", "섭니다", "짐작", "낱말 가리기", "대화 틀", " %", "당신", "그것은")


@pytest.fixture
def korean() -> Iterator[None]:
    with environment(MALMOI_LANG="ko", COLUMNS="80"):
        yield


def sentences() -> set[str]:
    """Every string of the source, with {} for a value; docstrings by paragraph."""
    found: set[str] = set()
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
                found |= {" ".join(part.split()) for part in node.value.split("\n\n")}
            elif isinstance(node, ast.JoinedStr):
                parts = (v.value if isinstance(v, ast.Constant) else "{}" for v in node.values)
                found.add("".join(str(part) for part in parts))
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "plural":
                noun = node.args[1]
                if isinstance(noun, ast.Constant):
                    found |= {f"{{}} {noun.value}", f"{{}} {noun.value}s"}
    return found


def test_every_key_is_a_sentence_of_the_source() -> None:
    known = sentences()
    keys = {re.sub(r"\{\d\}", "{}", key) for key in catalogue() if not TYPER.match(key)}
    assert keys - known == set()


@pytest.mark.parametrize("english", catalogue())
def test_a_translation_keeps_the_values_and_is_no_calque(english: str) -> None:
    korean = catalogue()[english]
    places = re.compile(r"\{\d\}")
    assert sorted(places.findall(korean)) == sorted(places.findall(english))
    assert not [calque for calque in CALQUES if calque in korean]
    # options and commands stay as they are typed
    assert set(re.findall(r"--[a-z]+", english)) == set(re.findall(r"--[a-z]+", korean))


def test_the_language_follows_the_locale() -> None:
    assert language({}) == "en"
    assert language({"LANG": "ko_KR.UTF-8"}) == "ko"
    assert language({"LANG": "ko_KR.UTF-8", "MALMOI_LANG": "en"}) == "en"


def test_sentences_are_translated_with_their_values(korean: None) -> None:
    assert translate("There is no task 'sst'. Did you mean 'sst2'? `malmoi tasks` lists them.") == (
        "'sst' 과제는 없습니다. 'sst2'을(를) 찾으셨나요? 목록은 `malmoi tasks`로 봅니다."
    )
    said = "0.42 s per step: about 12 steps in your 3 minutes. That is too few to learn much."
    assert translate(said).startswith("스텝당 0.42초: 3분 동안 약 12스텝. That")


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
