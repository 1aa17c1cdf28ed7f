"""A Malmoi model as an lm-evaluation-harness model, by its rules; imported only if requested."""

from collections.abc import Sequence
from typing import Any

from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

from malmoi.inference import Model, load
from malmoi.inference.batches import in_order, rows_by
from malmoi.inference.prompt import encode_text, start_token
from malmoi.inference.score import ScoredRow, fit_context, token_logprobs

DEFAULT_NEW_TOKENS = 256  # used if a task sets no limit


@register_model("malmoi")
class MalmoiLM(TemplateLM):  # type: ignore[misc]  # lm-eval is optional
    """Wraps a Malmoi folder or an open model."""

    def __init__(self, pretrained: str | Model, device: str | None = None, **others: Any) -> None:
        super().__init__()
        self.model = (
            pretrained if isinstance(pretrained, Model) else load(pretrained, device=device)
        )

    @property
    def eot_token_id(self) -> int:
        return start_token(self.model.tokenizer)

    @property
    def max_length(self) -> int:
        return self.model.config.context

    def tok_encode(
        self,
        string: str,
        add_special_tokens: bool | None = None,  # noqa: FBT001  # lm-eval's signature
        **others: Any,
    ) -> list[int]:
        tokenizer = self.model.tokenizer
        if add_special_tokens is None:
            return encode_text(tokenizer, string).tokens
        return tokenizer.encode(string, specials=add_special_tokens).tokens

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **others: Any
    ) -> list[tuple[float, bool]]:
        """Scores continuations, dropping a long request's oldest tokens as the harness does."""
        pairs = (ScoredRow(before + after, len(before)) for _, before, after in requests)
        rows = [fit_context(row, self.max_length, cut=True) for row in pairs]
        found = token_logprobs(self.model.network, rows)
        return [(sum(logprobs), greedy) for logprobs, greedy in found]

    def loglikelihood_rolling(
        self,
        requests: Sequence[Any],
        disable_tqdm: bool = False,  # noqa: FBT001, FBT002
    ) -> list[float]:
        """Scores whole texts in windows that overlap by one token, as the harness does."""
        totals = []
        for request in requests:
            tokens, start = self.tok_encode(request.args[0]), self.prefix_token_id
            windows = utils.get_rolling_token_windows(tokens, start, self.max_length, context_len=1)
            parts = [("", *utils.make_disjoint_window(window)) for window in windows]
            totals.append(sum(logprob for logprob, _ in self._loglikelihood_tokens(parts)))
        return totals

    def generate_until(
        self,
        requests: Sequence[Any],
        disable_tqdm: bool = False,  # noqa: FBT001, FBT002
    ) -> list[str]:
        """Generates texts, greedily unless the task says otherwise; equal settings are batched."""
        prompts = [request.args[0] for request in requests]
        settings = [request.args[1] for request in requests]
        return in_order(
            (places, self._written([prompts[i] for i in places], dict(settings[places[0]])))
            for places in rows_by(map(repr, settings)).values()
        )

    def _written(self, prompts: list[str], given: dict[str, Any]) -> list[str]:
        settings = normalize_gen_kwargs(given, DEFAULT_NEW_TOKENS)
        tokenizer = self.model.tokenizer
        until = handle_stop_sequences(settings.get("until"), eos=tokenizer.token(self.eot_token_id))
        most = settings["max_gen_toks"]
        room = max(self.max_length - most, 1)
        rows = [self.tok_encode(prompt) for prompt in prompts]
        shown = [
            prompt if len(row) <= room else tokenizer.decode(row[-room:], skip_specials=True)
            for prompt, row in zip(prompts, rows, strict=True)
        ]
        warmth = float(settings.get("temperature") or 0.0) if settings.get("do_sample") else 0.0
        return list(self.model.generate(shown, max_new_tokens=most, temperature=warmth, stop=until))
