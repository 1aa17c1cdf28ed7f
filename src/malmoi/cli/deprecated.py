"""Options that were renamed keep working for one release; a note on stderr names the new one."""

from collections.abc import Iterator, Mapping, Sequence

from malmoi.cli.output import note

RENAMED_OPTIONS: dict[str, Mapping[str, str]] = {  # by command
    "finetune": {
        "--again": "--overwrite",
        "--restart": "--overwrite",
        "--untrained": "--from-scratch",
    },
    "corpus": {
        "--again": "--overwrite",
        "--restart": "--overwrite",
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
        if argument == "--":  # texts follow, not options
            yield from arguments[i:]
            return
        option, equals, value = argument.partition("=")
        if option in names:
            note(f"The option {option} is now {names[option]}; the old name will be removed.")
        yield names.get(option, option) + equals + value
