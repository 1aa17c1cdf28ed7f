"""Counts documents that contain names of control tokens: harmless as text, but suspicious.

A corpus is built before its vocabulary, so these are the names of common vocabularies.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from malmoi.corpus.columns import TextColumn
from malmoi.messages import msg, plural

NAMES = re.compile(
    r"<\|[^\s|<>]{1,40}\|>"  # <|endoftext|>, <|im_start|>, <|eot_id|>, …
    r"|\[(?:PAD|UNK|CLS|SEP|MASK|BOS|EOS)\]"
    r"|</?s>|<(?:pad|unk|cls|sep|mask|bos|eos|start_of_turn|end_of_turn)>"
    r"|\[/?INST\]|<</?SYS>>"
)
SHOWN = 5  # names listed in the sentence


def count_control_names(texts: TextColumn) -> dict[str, Any]:
    """Counts the texts that contain any such name, and each name."""
    # most texts have neither of the signs that such a name begins with
    likely = (text for text in texts.all_encoded() if b"<" in text or b"[" in text)
    found = [set(NAMES.findall(text.decode())) for text in likely]
    return {
        "documents": sum(map(bool, found)),
        "names": Counter(name for names in found for name in names),
    }


def total_control_names(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Adds up several counts, the most frequent name first."""
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
    """Describes the counts in a sentence; empty if there are none."""
    if not found.get("documents"):
        return ""
    names = [f"{name} {count:,}" for name, count in found["names"].items()]
    more = ", …" if len(names) > SHOWN else ""
    return msg(
        "Names of control tokens in {documents} ({names}{more}); they will be encoded as text.",
        documents=plural(found["documents"], "document"),
        names=", ".join(names[:SHOWN]),
        more=more,
    )
