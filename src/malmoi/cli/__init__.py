"""The command `malmoi`."""

from malmoi.cli.app import main, run

__all__ = ["main", "run"]
