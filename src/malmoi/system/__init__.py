"""Foundations: files, run folders, this machine, limits on untrusted input."""
