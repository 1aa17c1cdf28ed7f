"""Estimates of a run before it starts: parameters, FLOPs, memory, days, energy and cost."""
