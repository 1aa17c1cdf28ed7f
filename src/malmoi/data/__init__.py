"""From tokens to training samples: the token store, and samplers whose every batch is a pure function of its number."""

from malmoi.data.encode import Progress, Stores, build
from malmoi.data.store import Store
from malmoi.data.windows import Windows

__all__ = ["Progress", "Store", "Stores", "Windows", "build"]
