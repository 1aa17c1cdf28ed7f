"""The child of `confined`: answers requests, one JSON object per line, within limits.

Run as a script, `confined_worker.py BYTES SECONDS`; it imports nothing from Malmoi, to start fast.
"""

import faulthandler
import json
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from malmoi.messages import msg


def main() -> None:
    """Answers until stdin is closed."""
    limit, seconds = map(int, sys.argv[1:3])
    # neither Windows nor macOS has such a limit; only time is bounded there
    with suppress(ImportError, ValueError, OSError):
        import resource  # noqa: TID251

        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    # imported before the clock starts, so that a template has all its time; regexes do not need it
    with suppress(ImportError):
        _environment()
    print(json.dumps({"found": "ready"}), flush=True)
    for line in sys.stdin:
        # in case the parent has died and cannot stop it
        faulthandler.dump_traceback_later(seconds, exit=True)
        text = json.dumps(answer(json.loads(line)))
        faulthandler.cancel_dump_traceback_later()
        print(text, flush=True)


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """The program's output, or why it failed."""
    try:
        return {"found": ANSWERS[question["do"]](question)}
    except MemoryError:
        return {"refused": "it needs more memory than a model's code is allowed"}
    except RecursionError:
        return {"refused": "it recurses without end"}
    # the program is untrusted: any exception counts as its failure
    except Exception as error:
        line = getattr(error, "lineno", None)
        return {"refused": str(getattr(error, "message", None) or error)[:1000], "line": line}


def render(question: dict[str, Any]) -> str:
    text = str(_compiled(question["template"]).render(**question["values"]))
    limit = question["limit"]
    if len(text) > limit:
        raise ValueError(
            msg("it writes {text:,} characters, more than {limit:,}", text=len(text), limit=limit)
        )
    return text


def match_names(question: dict[str, Any]) -> list[int | None]:
    patterns = [re.compile(pattern) for pattern in question["patterns"]]
    return [
        next((i for i, p in enumerate(patterns) if p.fullmatch(name)), None)
        for name in question["names"]
    ]


ANSWERS: dict[str, Callable[[dict[str, Any]], Any]] = {"render": render, "match": match_names}


# ------------------------------------------------------------------ Jinja


@lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    return _environment().from_string(template)


def _environment() -> Any:
    """jinja2 as transformers sets it up, so that the same template gives the same text."""
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):  # type: ignore[misc]  # jinja2 is optional
        """{% generation %}…{% endgeneration %} marks a model's output; here it is only text."""

        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = refuse
    made.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return made


def _to_json(  # templates call it with transformers' signature
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002
    indent: int | None = None,
    **options: Any,
) -> str:
    """Replaces jinja2's own filter, which escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


if __name__ == "__main__":
    main()
