"""From tokens to training samples: the token store, and samplers whose every batch is a pure function of its number."""

from malmoi.data.encode import Progress, Stores, build
from malmoi.data.loader import Batch, Batches, BertBatches, LMBatches, Loader, Share
from malmoi.data.mask import Masking
from malmoi.data.mixture import Mixture
from malmoi.data.pairs import Pairs
from malmoi.data.store import Store
from malmoi.data.windows import Windows

__all__ = [
    "Batch",
    "Batches",
    "BertBatches",
    "LMBatches",
    "Loader",
    "Masking",
    "Mixture",
    "Pairs",
    "Progress",
    "Share",
    "Store",
    "Stores",
    "Windows",
    "build",
]
