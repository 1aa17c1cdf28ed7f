"""Tables and figures of the papers, reproduced: ours beside theirs. One package per study."""
