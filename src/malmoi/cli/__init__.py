"""The command `malmoi`."""

from malmoi.cli.app import main, run_command

__all__ = ["main", "run_command"]
