"""Ready-made vectors before the text: images, sounds, anything that has features.

B batch, P vectors of each row, F their width, T tokens, D width. All of a row sees its vectors; the
text sees what comes before: the pattern `causal | prefix:P`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from malmoi.config import ModelConfig
from malmoi.errors import UsageError
from malmoi.model.attention import KVCache
from malmoi.model.transformer import Activations, LayerCache, Transformer


class FeaturePrefix(Transformer):
    """features [B, P, F] and tokens [B, T] → hidden states of the tokens [B, T, D]."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__(c)
        self.project = nn.Linear(c.feature_width, c.token_width)

    def forward(  # type: ignore[override]
        self,
        tokens: Tensor,
        features: Tensor | None = None,
        keep: Tensor | None = None,
        cache: KVCache | None = None,
        activations: Activations | None = None,
    ) -> Tensor:
        """Hidden states of the text; with a cache whose rows have their features, of more text."""
        if features is None:
            if cache is None or not cache.used:
                raise UsageError("This model writes about features: give them with the text.")
            return super().forward(tokens, keep=keep, cache=cache, activations=activations)
        self._check(features)
        count = features.size(1)
        wide = F.pad(tokens, (count, 0))
        keep = None if keep is None else F.pad(keep, (count, 0), value=True)
        self._check_length(wide, None, cache)
        layout, positions = self._layout(wide, keep, None, None, cache)
        dtype = self.project.weight.dtype
        vectors = torch.cat((self.project(features.to(dtype)), self.embed.token(tokens)), 1)
        x = self.embed.place(vectors, positions, None)
        kept: list[LayerCache] = [
            None if cache is None else (cache, i) for i in range(self.config.depth)
        ]
        hidden = self._layers(x, layout, positions, None, kept, activations)
        return hidden[:, count:]

    def _check(self, features: Tensor) -> None:
        shape = (self.config.feature_count, self.config.feature_width)
        if features.dim() != 3 or tuple(features.shape[1:]) != shape:
            raise UsageError(
                f"These features have the shape {list(features.shape)}; this model reads "
                f"{shape[0]} vectors of {shape[1]} numbers for each text."
            )
