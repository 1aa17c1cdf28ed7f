"""Methods of `Model` that look inside it; what they need is imported when one is called."""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Self

from malmoi.inference.base import LoadedModel

if TYPE_CHECKING:
    from malmoi.inference.embed import Float32Array
    from malmoi.interpret.forward_pass import ForwardResult, Subject
    from malmoi.interpret.importance import (
        Attribution,
        AttributionMethod,
        Importance,
        Method,
        Metric,
        PatchingMap,
        Row,
    )
    from malmoi.interpret.intervention import Intervention, Site
    from malmoi.interpret.pictures import Picture, PictureKind


class Interpretation(LoadedModel):
    """Interpretation methods of `Model`."""

    @cached_property
    def _subject(self) -> "Subject":
        from malmoi.interpret.forward_pass import Subject

        return Subject(self.checkpoint)

    def hidden_states(self, text: str, pair: str | None = None) -> "Float32Array":
        """Hidden states of a text's tokens [layers + 1, T, D]: the embedding, then every layer.

        The last is after the final norm, as in transformers' `output_hidden_states`.
        """
        from malmoi.interpret.forward_pass import hidden_states

        return hidden_states(self, text, pair)

    def attention(self, text: str, pair: str | None = None) -> "Float32Array":
        """Attention probabilities [layers, heads, T, T] of each token (row), as in `tokens`."""
        from malmoi.interpret.forward_pass import attention_probabilities

        return attention_probabilities(self, text, pair)

    def run(
        self,
        text: str,
        interventions: "Sequence[Intervention]" = (),
        *,
        positions: Sequence[int] | None = None,
        top: int = 5,
        hidden: bool = False,
        attention: bool = False,
    ) -> "ForwardResult":
        """Runs one forward pass, with interventions if given, and returns the most likely answers.

        A GPT answers after its last token, a BERT at each [MASK], a tagger at every token, a
        classifier once; `positions` selects other positions. `hidden` and `attention` also return
        the hidden states and the attention probabilities.
        """
        return self._subject.run(
            text, interventions, positions=positions, top=top, hidden=hidden, attention=attention
        )

    def intervene(self, *interventions: "Intervention") -> Self:
        """Returns a model, with the same weights, whose methods all run under interventions."""
        from malmoi.interpret.forward_pass import model_with

        return model_with(self, interventions)

    def head_importance(
        self, rows: "Sequence[Row]", *, method: "Method" = "ablation", metric: "Metric" = "loss"
    ) -> "Importance":
        """Measures how much worse your rows are predicted without each head, attention and MLP.

        A GPT predicts every next token, a BERT the same random 15 % of each text, a classifier the
        label of (text, label). "ablation" recomputes the rows for each part, from its layer on;
        "gradient" estimates all parts from one forward and backward pass.
        """
        from malmoi.interpret.importance import importance

        return importance(self._subject, rows, method, metric)

    def patching_map(
        self, source: str, text: str, *, site: "Site" = "residual", answer: str | None = None
    ) -> "PatchingMap":
        """Shows where in the model two sentences of the same length diverge.

        Each position of each layer is copied from `source` into `text`, one at a time; the map
        holds log p of `answer`, by default the most likely one after `source`.
        """
        from malmoi.interpret.importance import patching_map

        return patching_map(self._subject, source, text, site, answer)

    def attributions(
        self, text: str, *, target: str | None = None, method: "AttributionMethod" = "leave-one-out"
    ) -> "Attribution":
        """Attributes an answer, a label or a token, to the words of a text.

        `target` is the answer to explain, by default the predicted one. "leave-one-out" predicts
        the text again without each word; "gradient" is gradient × input, for each token.
        """
        from malmoi.interpret.importance import attribution

        return attribution(self._subject, text, target, method)

    def show(
        self,
        kind: "PictureKind",
        text: str,
        *,
        layer: int | None = None,
        head: int | None = None,
        top: int = 8,
    ) -> "Picture":
        """Draws tokens, attention (of all heads, a `layer` or a `head`), the lens or next."""
        from malmoi.interpret.pictures import show

        return show(self, kind, text, layer, head, top)
