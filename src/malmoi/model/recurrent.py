"""Recurrent layers: the BiLSTM that BERT §5.3 puts on frozen hidden states. B batch, T tokens, D
width.
"""

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from malmoi.errors import UsageError


class BiLSTM(nn.Module):
    """Layers that read rows from both ends (Hochreiter & Schmidhuber 1997, Graves & Schmidhuber
    2005).

    `width` is that of the output, half of it from each direction. Padding changes nothing: it is
    never read.
    """

    def __init__(self, inputs: int, width: int, *, depth: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        if width < 2 or width % 2:
            raise UsageError(
                f"A BiLSTM's width must be even, half for each direction, not {width}."
            )
        between = dropout if depth > 1 else 0.0
        self.lstm = nn.LSTM(
            inputs, width // 2, depth, batch_first=True, dropout=between, bidirectional=True
        )

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        """[B, T, inputs] → [B, T, width]; `keep` [B, T] marks tokens, padding stands after them."""
        if keep is None:
            out: Tensor = self.lstm(x)[0]
            return out
        packed = pack_padded_sequence(x, keep.sum(1).cpu(), batch_first=True, enforce_sorted=False)
        read, _ = self.lstm(packed)
        return pad_packed_sequence(read, batch_first=True, total_length=x.size(1))[0]

    @torch.no_grad()
    def reset(self, generator: torch.Generator | None) -> None:
        """U(−1/√h, 1/√h), the usual rule of recurrent layers of h units."""
        bound = self.lstm.hidden_size**-0.5
        for weight in self.lstm.parameters():
            weight.uniform_(-bound, bound, generator=generator)
