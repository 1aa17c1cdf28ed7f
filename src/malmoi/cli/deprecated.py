"""Options that were renamed keep working for one release; a note on stderr names the new one."""

import sys
from collections.abc import Iterator, Mapping, Sequence

RENAMED_OPTIONS: dict[str, Mapping[str, str]] = {  # by command
    "finetune": {"--again": "--restart", "--untrained": "--from-scratch"},
    "corpus": {
        "--again": "--restart",
        "--against": "--decontaminate",
        "--good": "--quality-reference",
    },
    "plan": {"--rematerialise": "--gradient-checkpointing"},
}


def current_options(arguments: Sequence[str]) -> list[str]:
    """The arguments with every renamed option under its new name."""
    command = next((word for word in arguments if not word.startswith("-")), "")
    return list(_renamed(arguments, RENAMED_OPTIONS.get(command, {})))


def _renamed(arguments: Sequence[str], names: Mapping[str, str]) -> Iterator[str]:
    for i, argument in enumerate(arguments):
        if argument == "--":  # what follows are texts, not options
            yield from arguments[i:]
            return
        option, equals, value = argument.partition("=")
        if option in names:
            print(
                f"note: The option {option} is now called {names[option]}; the old name goes away.",
                file=sys.stderr,
            )
        yield names.get(option, option) + equals + value
