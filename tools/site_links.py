"""A hook of mkdocs: links out of docs/, which work in the repository, become plain text."""

import re
from typing import Any

OUTSIDE = re.compile(
    r"\[([^\]]+)\]\((?:\.\./)+(?:src|tests|bench|examples|models|tools|[A-Z])[^)]*\)"
)


def on_page_markdown(markdown: str, **_: Any) -> str:
    return OUTSIDE.sub(r"\1", markdown)
