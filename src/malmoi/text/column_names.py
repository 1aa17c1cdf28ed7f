"""Common names of columns, most likely first, compared in lower case; and headers."""

import unicodedata
from collections.abc import Sequence

LABEL_NAMES = (
    "label", "labels", "class", "category", "target", "sentiment", "intent", "topic", "kind",
    "type", "tag", "tags", "emotion", "stars", "rating", "score", "gold_label", "y", "answer",
    "라벨", "레이블", "분류", "범주", "감정", "감성", "점수", "평점",
)  # fmt: skip
TEXT_NAMES = (
    "text", "sentence", "sentence1", "premise", "question", "review", "document", "content",
    "comment", "body", "message", "utterance", "query", "title",
    "본문", "문장", "텍스트", "내용", "리뷰", "댓글", "질문", "제목",
)  # fmt: skip
PAIRS = {
    "sentence1": "sentence2", "premise": "hypothesis", "question1": "question2",
    "text1": "text2", "question": "context", "sentence_a": "sentence_b", "문장1": "문장2",
}  # fmt: skip
CHAT_COLUMNS = ("messages", "conversations", "conversation")
# prompts and answers in public data sets
PROMPT_COLUMNS = (
    ("prompt", "answer"), ("prompt", "completion"), ("prompt", "response"),
    ("instruction", "output"), ("instruction", "response"), ("question", "answer"),
    ("source", "target"), ("document", "summary"), ("article", "highlights"),
    ("dialogue", "summary"), ("text", "summary"), ("input", "output"),
    ("질문", "답변"), ("원문", "번역"), ("본문", "요약"),
)  # fmt: skip
SECOND_COLUMNS = {"instruction": "input"}  # Alpaca: the input of an instruction


def label_name(value: object) -> str:
    """A label or column as people read it: without spaces around it, decomposed Hangul composed."""
    return unicodedata.normalize("NFC", str(value).strip())


def column_named(known: Sequence[str], names: Sequence[str]) -> str | None:
    """The column with the likeliest of the known names."""
    by_lower = {name.lower(): name for name in names}
    return next((by_lower[name] for name in known if name in by_lower), None)


def unnamed_columns(count: int) -> list[str]:
    """The names that columns of a table without a header get."""
    return [f"column{number}" for number in range(1, count + 1)]
