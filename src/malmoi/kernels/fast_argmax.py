"""Faster greedy decoding on a CPU, where reading the weights is the bottleneck: read fewer bytes.

B rows, D width, V vocabulary, C candidates.
"""

from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from malmoi.model import Network
from malmoi.model.heads import VocabularyHead
from malmoi.system.machine import named_dtype, this_machine

MIN_HEAD_WEIGHTS = 4_000_000  # below this size, reading the head costs next to nothing
MAX_CANDIDATES = 4096  # beyond this, the full head is as fast
MAX_SCREENED_ROWS = 16  # beyond this, compute dominates memory traffic
# before this many steps the copy is not made: it takes as long as some ten of them save
STEPS_BEFORE_COPY = 16
COPIED_ROWS = 2048  # measured at a time: a second copy of the whole head would be slow to allocate


class FastArgmax:
    """Exact argmax over the vocabulary: screens with a bfloat16 copy, then checks the candidates.

    For bfloat16 copies h̃ and w̃, |h·w − h̃·w̃| ≤ ‖h − h̃‖·‖w̃‖ + ‖h‖·‖w − w̃‖ (Cauchy–Schwarz), so
    tokens whose rough score is more than twice that below the best cannot win.
    """

    def __init__(self, head: VocabularyHead) -> None:
        self.head = head
        self.version = _version(head.weight)
        self._steps = 0

    @cached_property
    def low(self) -> Tensor:
        return self.head.weight.detach().to(named_dtype("bf16"))

    @cached_property
    def _largest(self) -> tuple[float, float]:
        """The largest ‖w̃‖ and ‖w − w̃‖ of a row."""
        rows = self.head.weight.detach().split(COPIED_ROWS), self.low.split(COPIED_ROWS)
        norms = [
            (low.float().norm(dim=1).max(), (w - low).norm(dim=1).max())
            for w, low in zip(*rows, strict=True)
        ]
        norm, gap = torch.tensor(norms).amax(0).tolist()
        return norm, gap

    def pays(self) -> bool:
        """Counts a step; whether there were enough of them to make the copy."""
        self._steps += 1
        return self._steps > STEPS_BEFORE_COPY and self.is_current

    @property
    def is_current(self) -> bool:
        """Whether the head's weights are unchanged since they were copied."""
        return _version(self.head.weight) == self.version

    def argmax(self, features: Tensor) -> Tensor:
        """argmax over the vocabulary of each row: [B, D] → [B]."""
        rough, slack = self._rough(features)
        reach = rough.amax(1, keepdim=True) - 2 * slack
        candidates = (rough >= reach).any(0).nonzero().squeeze(1)
        if len(candidates) > MAX_CANDIDATES:
            return self.head.scores(features).argmax(-1)
        scores = F.linear(features, self.head.weight[candidates])
        # the bound does not hold: this machine's bfloat16 products are less accurate than assumed
        if bool(((scores - rough[:, candidates]).abs() > slack).any()):
            return self.head.scores(features).argmax(-1)
        return candidates[scores.argmax(-1)]

    def _rough(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Scores from the small copy [B, V], and a bound on each row's error [B, 1]."""
        low = features.to(self.low.dtype)
        rough = torch.mv(self.low, low[0])[None] if len(low) == 1 else F.linear(low, self.low)
        lost = (features - low).norm(dim=1, keepdim=True)
        norm, gap = self._largest
        slack = lost * norm + features.norm(dim=1, keepdim=True) * (gap + 2**-12 * norm)
        # the result is rounded too
        return rough.float(), slack + 2**-8 * rough.float().abs().amax(1, keepdim=True)


def fast_argmax_for(network: Network) -> FastArgmax | None:
    """A `FastArgmax` if it pays: a plain, large fp32 head on a CPU with bfloat16 instructions."""
    head = network.heads["lm"]
    if not isinstance(head, VocabularyHead) or head.bias is not None or head.cap:
        return None
    weight = head.weight
    plain = weight.device.type == "cpu" and weight.dtype == torch.float32
    pays = weight.numel() >= MIN_HEAD_WEIGHTS and this_machine().bf16_screening_pays
    return FastArgmax(head) if plain and pays else None


def greedy_tokens(network: Network, fast_argmax: FastArgmax | None, hidden: Tensor) -> list[int]:
    """The most likely token for each hidden state [B, D], screened where that pays."""
    if fast_argmax is not None and len(hidden) <= MAX_SCREENED_ROWS and fast_argmax.pays():
        return fast_argmax.argmax(fast_argmax.head.features(hidden)).tolist()
    return network.read("lm", hidden).argmax(-1).tolist()


def _version(weight: Tensor) -> int:
    """Counts in-place changes of a tensor; inference tensors keep no count and never change."""
    return 0 if weight.is_inference() else weight._version
