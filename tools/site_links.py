"""A hook of mkdocs: links out of docs/, which work in the repository, become plain text."""

import re
from typing import Any

FOLDERS = "src|tests|bench|examples|models|tools"
OUTSIDE = re.compile(rf"\[([^\]]+)\]\((?:\.\./)+(?:{FOLDERS}|[A-Z])[^)]*\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    return OUTSIDE.sub(r"\1", markdown)
