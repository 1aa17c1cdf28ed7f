"""The in-context study: GPTs of several sizes that find a hidden rule in the examples they see."""
