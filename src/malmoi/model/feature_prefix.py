"""Ready-made vectors before the text: images, sounds, anything that has features.

B batch, P vectors of each row, F their width, T tokens, D width. All of a row sees its vectors; the
text sees what comes before: the pattern `causal | prefix:P`.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from malmoi.config import ModelConfig
from malmoi.errors import UsageError
from malmoi.model.kv_cache import KVCache
from malmoi.model.transformer import Activations, Transformer


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
                raise UsageError("This model needs features: pass them with the text.")
            return super().forward(tokens, keep=keep, cache=cache, activations=activations)
        self._check(features)
        self._check_length(F.pad(tokens, (features.size(1), 0)), None, cache)
        vectors = self.project(features.to(self.project.weight.dtype))
        return self._after_vectors(vectors, tokens, None, keep, cache, activations)

    def _check(self, features: Tensor) -> None:
        shape = (self.config.feature_count, self.config.feature_width)
        if features.dim() != 3 or tuple(features.shape[1:]) != shape:
            raise UsageError(
                "These features have the shape {shape}; this model reads {first} vectors of "
                "{shape2} numbers for each text.",
                shape=list(features.shape),
                first=shape[0],
                shape2=shape[1],
            )
