"""Reproduced tables and figures of the papers, ours beside theirs. One package per study."""
