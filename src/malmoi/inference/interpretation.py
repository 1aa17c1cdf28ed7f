"""Methods of `Model` for interpretation: interventions, importance, attributions."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Self

import torch

from malmoi.errors import UsageError, nearest
from malmoi.inference.attribution import (
    Attribution,
    AttributionMethod,
    gradient_input,
    leave_one_out,
    target_index,
)
from malmoi.inference.base import LoadedModel
from malmoi.inference.importance import (
    Importance,
    Method,
    Metric,
    PatchingMap,
    Row,
    importance,
    patching_map,
)
from malmoi.inference.intervene import ForwardResult, RunOptions, Subject, network_with, run_text
from malmoi.inference.predict import Predictor
from malmoi.inference.predictors import TEXT_HEADS
from malmoi.model.intervention import Intervention, Site


class Interpretation(LoadedModel):
    """Interpretation methods of `Model`."""

    @cached_property
    def _subject(self) -> Subject:
        return Subject(self.checkpoint)

    def run(
        self,
        text: str,
        interventions: Sequence[Intervention] = (),
        *,
        positions: Sequence[int] | None = None,
        top: int = 5,
        hidden: bool = False,
        attention: bool = False,
    ) -> ForwardResult:
        """Runs one forward pass, with interventions if given, and returns the most likely answers.

        A GPT answers after its last token, a BERT at each [MASK], a tagger at every token, a
        classifier once; `positions` selects other positions. `hidden` and `attention` also return
        the hidden states and the attention probabilities.
        """
        options = RunOptions(positions, top, hidden, attention)
        return run_text(self._subject, text, tuple(interventions), options)

    def intervene(self, *interventions: Intervention) -> Self:
        """Returns a model whose methods (generate, fill, predict…) all run under interventions.

        It shares the weights. Interventions that depend on one text's positions are for `run`.
        """
        for one in interventions:
            if one.needs_one_text:
                raise UsageError(
                    "{one!r} depends on the positions of one text: give it to run(text, […]).",
                    one=one,
                )
        view = network_with(self._subject, interventions)
        causal = self.network.trunk.is_causal
        if causal and not view.trunk.is_causal:
            raise UsageError(
                "A GPT whose mask shows later tokens cannot generate: use run(text, […]) for one "
                "forward pass."
            )
        model = type(self)(replace(self.checkpoint, network=view))
        model.__dict__["_causal"] = causal  # a text is encoded as the model was trained to read it
        return model

    def head_importance(
        self, rows: Sequence[Row], *, method: Method = "ablation", metric: Metric = "loss"
    ) -> Importance:
        """Measures how much worse the model predicts your rows without each head, attention and
        MLP.

        A GPT predicts every next token, a BERT the same random 15 % of each text, a classifier the
        label of (text, label). "ablation" recomputes the rows for each part, from its layer on;
        "gradient" estimates all parts from one forward and backward pass.
        """
        return importance(self._subject, rows, method, metric)

    def patching_map(
        self, source: str, text: str, *, site: Site = "residual", answer: str | None = None
    ) -> PatchingMap:
        """Shows where in the model two sentences of the same length diverge.

        Each position of each layer is copied from `source` into `text`, one at a time; the map
        holds log p of `answer`, by default the most likely one after `source`.
        """
        return patching_map(self._subject, source, text, site, answer)

    def attributions(
        self, text: str, *, target: str | None = None, method: AttributionMethod = "leave-one-out"
    ) -> Attribution:
        """Attributes an answer, a label or a token, to the words of a text.

        `target` is the answer to explain, by default the predicted one. "leave-one-out" predicts
        the text again without each word; "gradient" is gradient × input, for each token.
        """
        known = ("leave-one-out", "gradient")
        if method not in known:
            raise UsageError(
                "There is no method {method!r}.{hint}", method=method, hint=nearest(method, known)
            )
        self._subject.require_answer()
        if method == "gradient":
            return gradient_input(self._subject, text, target)
        mask = self._subject.tokenizer.specials.mask
        fixed = None if mask is None else self._subject.tokenizer.token(mask)
        return leave_one_out(text, target or self._likeliest(text), self._chances, fixed)

    def _likeliest(self, text: str) -> str:
        if self.task_head not in TEXT_HEADS:
            return self.run(text, top=1).guesses[-1][0].name
        (scores,) = self._label_chances([text])
        return max(scores, key=scores.__getitem__)

    def _chances(self, texts: Sequence[str], target: str) -> list[float]:
        """p(target) of each text, from the fine-tuned head or `run`."""
        if self.task_head in TEXT_HEADS:
            self._subject.label_index(target)
            return [scores[target] for scores in self._label_chances(texts)]
        index = target_index(self._subject, torch.zeros(1), target)
        logits = [self.run(text).logits[-1] for text in texts]
        return [float(torch.tensor(row).softmax(-1)[index]) for row in logits]

    def _label_chances(self, texts: Sequence[str]) -> list[dict[str, float]]:
        assert self.task_head is not None
        found = self.task_head.predict(Predictor.of(self.checkpoint), texts)
        return [prediction.scores for prediction in found]
