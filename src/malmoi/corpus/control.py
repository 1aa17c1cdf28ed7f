"""Documents that have names of control tokens in them, counted: to a tokenizer they are text, to a
reader a sign.

A corpus is made before its vocabulary, so these are the names that common vocabularies have.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from malmoi.text.documents import Document

NAMES = re.compile(
    r"<\|[^\s|<>]{1,40}\|>"  # <|endoftext|>, <|im_start|>, <|eot_id|>, …
    r"|\[(?:PAD|UNK|CLS|SEP|MASK|BOS|EOS)\]"
    r"|</?s>|<(?:pad|unk|cls|sep|mask|bos|eos|start_of_turn|end_of_turn)>"
    r"|\[/?INST\]|<</?SYS>>"
)
SHOWN = 5  # names in a sentence


def count_control_names(documents: Iterable[Document]) -> dict[str, Any]:
    """How many documents have any such name, and how many have each."""
    found = [set(NAMES.findall(document.text)) for document in documents]
    return {
        "documents": sum(map(bool, found)),
        "names": Counter(name for names in found for name in names),
    }


def total_control_names(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Several counts in one, the commonest name first."""
    documents = 0
    names = Counter[str]()
    for part in parts:
        documents += part["documents"]
        names.update(part["names"])
    return {
        "documents": documents,
        "names": dict(sorted(names.items(), key=lambda item: (-item[1], item[0]))),
    }


def control_sentence(found: Mapping[str, Any]) -> str:
    """What to tell of them; nothing where there are none."""
    if not found.get("documents"):
        return ""
    names = [f"{name} {count:,}" for name, count in found["names"].items()]
    more = ", …" if len(names) > SHOWN else ""
    return (
        f"{found['documents']:,} documents have the names of control tokens in them "
        f"({', '.join(names[:SHOWN])}{more}); they will be encoded as text."
    )
