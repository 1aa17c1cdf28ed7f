"""Parts of a job, for several processes or machines: every Nth item from the Ith on."""

import re

from malmoi.errors import UsageError

PART = re.compile(r"([1-9]\d{0,8})/([1-9]\d{0,8})")


def part_slice(part: str) -> slice:
    """The items of a part: of "3/16", every 16th from the third on; of "", all."""
    found = PART.fullmatch(part or "1/1")
    if found is None or int(found[1]) > int(found[2]):
        raise UsageError(
            "{part!r} is not a part of a job; write for example 3/16, the third of 16.", part=part
        )
    return slice(int(found[1]) - 1, None, int(found[2]))
