"""Rotary scaling in a Hugging Face config (`rope_parameters`) and here ("llama3:8,1,4,8192")."""

from collections.abc import Mapping
from typing import Any

from malmoi.checkpoint.table import Several
from malmoi.errors import MalmoiError
from malmoi.limits import shown
from malmoi.untrusted import is_a

PLACE = "rope_parameters."
NUMBERS = {  # what each rule's numbers are called there, in our order
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
}
WHOLE = {"original_max_position_embeddings"}  # transformers warns where this is a float
ASSUMED = {"beta_fast": 32, "beta_slow": 1}
KNOWN = {
    "rope_type",
    "rope_theta",
    "partial_rotary_factor",
    *ASSUMED,
    *(n for names in NUMBERS.values() for n in names),
}


def read_scaling(theirs: Mapping[str, Any]) -> str:
    """The rule with its numbers, or nothing where positions are not scaled."""
    given = {key.removeprefix(PLACE): value for key, value in theirs.items() if key.startswith(PLACE)}
    kind = given.get("rope_type", "default")
    unknown = sorted(given.keys() - KNOWN)
    if kind not in ("default", *NUMBERS) or unknown:
        what = f"the rotary positions {shown(kind)}" + (f" with {', '.join(unknown)}" if unknown else "")
        raise MalmoiError(f"config.json asks for {what}; Malmoi has default, {', '.join(NUMBERS)}.")
    share = given.get("partial_rotary_factor", 1)
    if share != 1:
        raise MalmoiError(
            f"config.json says partial_rotary_factor = {shown(share)}, that only a part of each head is rotated; "
            "Malmoi rotates whole heads, so it cannot run this model."
        )
    if kind == "default":
        return ""
    given = {"original_max_position_embeddings": theirs.get("max_position_embeddings"), **ASSUMED, **given}
    wrong = [name for name in NUMBERS[kind] if not is_a(given.get(name), float) or given[name] <= 0]
    if wrong:
        raise MalmoiError(f"config.json asks for the rotary positions {kind!r} but gives no number as {wrong[0]}.")
    return f"{kind}:{','.join(repr(float(given[name])).removesuffix('.0') for name in NUMBERS[kind])}"


def write_scaling(text: str) -> dict[str, Any]:
    """Under today's name, and where there is a rule also as `rope_scaling`, the only name transformers 4 knows."""
    kind, _, rest = text.partition(":")
    numbers = [float(part) for part in rest.split(",")] if rest else []
    named = dict(zip(NUMBERS.get(kind, ()), numbers, strict=False))
    values = {name: int(number) if name in WHOLE else number for name, number in named.items()}
    rule = {"rope_type": kind or "default", **values}
    places = (PLACE, "rope_scaling.") if kind else (PLACE,)
    return {place + name: value for place in places for name, value in rule.items()}


ROPE = Several("rotary_scaling", read_scaling, write_scaling)
