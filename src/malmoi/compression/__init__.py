"""A smaller model out of a large one: fewer bits, fewer parts, shared layers, or a student that
learns from it.
"""
