"""What several tests share: where real data lies, quiet transformers, small models."""

import os
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import settings

settings.register_profile("any machine", deadline=None)  # a busy one is not a fault
settings.load_profile("any machine")

# Two test processes share two cores, and results to the bit need one number of threads in all of
# them.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

SHARED = Path(__file__).parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """Real data beside the checkout, for development only; its users have their own."""
    if not SHARED.is_dir():
        pytest.skip("real data is not on this machine")
    return SHARED


@pytest.fixture
def workdir(tmp_path: Path) -> Iterator[Path]:
    """A temporary folder as the working directory."""
    with chdir(tmp_path):
        yield tmp_path


@contextmanager
def native_bf16() -> Iterator[None]:
    """bf16 by torch's own products, on any chip: oneDNN tries it where the chip has none too,
    and warns of that.
    """
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before
