"""Methods of `Model` for language models: generation, chat, likelihoods, zero-shot tasks."""

import math
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Literal, Unpack, overload

from malmoi.errors import require_that
from malmoi.inference.base import LoadedModel, listed_texts
from malmoi.inference.prompt import encode_conversation, encode_prompt

if TYPE_CHECKING:
    from malmoi.inference.generation.generate import TextGenerator
    from malmoi.inference.generation.keywords import GenerationOptions, GenerationSettings
    from malmoi.inference.generation.options import GenerationConfig
    from malmoi.inference.generation.prefix_cache import PrefixCache
    from malmoi.inference.predict import Prediction
    from malmoi.inference.score import Score
    from malmoi.inference.zero_shot import LabelWords, Shown
    from malmoi.tokenizer.chat_template import Messages


class LanguageModel(LoadedModel):
    """Generates and scores text with the lm head."""

    @overload
    def generate(  # type: ignore[overload-overlap]  # to Python, a str is a sequence of str
        self,
        prompt: str,
        *,
        n: Literal[1] = 1,
        parse_special: bool = False,
        **options: "Unpack[GenerationOptions]",
    ) -> str: ...
    @overload
    def generate(
        self,
        prompt: Sequence[str],
        *,
        n: Literal[1] = 1,
        parse_special: bool = False,
        **options: "Unpack[GenerationOptions]",
    ) -> list[str]: ...
    @overload
    def generate(
        self,
        prompt: str | Sequence[str],
        *,
        n: int,
        parse_special: bool = False,
        **options: "Unpack[GenerationOptions]",
    ) -> str | list[str] | list[list[str]]: ...

    def generate(
        self,
        prompt: str | Sequence[str],
        *,
        n: int = 1,
        parse_special: bool = False,
        **options: "Unpack[GenerationOptions]",
    ) -> str | list[str] | list[list[str]]:
        """Generates a continuation of a prompt; a list for a list of prompts or n > 1.

        An empty prompt starts after the tokenizer's beginning-of-text token, or else its
        end-of-text token; a tokenizer with neither is an error. Special tokens in a prompt, such as
        "<|endoftext|>", are plain text unless `parse_special` is set.
        """
        self._require_head("lm", "generate")
        config = self._generation_config(n=n, **options)
        texts = self.generator.continuations(
            self._prompts(listed_texts(prompt, "prompt"), parse_special=parse_special), config
        )
        if n == 1:
            return texts[0][0] if isinstance(prompt, str) else [some[0] for some in texts]
        return texts[0] if isinstance(prompt, str) else texts

    def stream(
        self, prompt: str, *, parse_special: bool = False, **options: "Unpack[GenerationSettings]"
    ) -> Iterator[str]:
        """Yields the text of `generate` in chunks as it is generated; whole characters only."""
        self._require_head("lm", "generate")
        config = self._generation_config(**options)
        alone = isinstance(prompt, str) and config.n == 1
        require_that(alone, "Only one continuation can be streamed; use generate for several.")
        prompts = self._prompts([prompt], parse_special=parse_special)
        return (text for _, text in self.generator.stream(prompts, config))

    def chat(self, messages: "Messages | str", **options: "Unpack[GenerationSettings]") -> str:
        """Replies to a conversation [{"role": "user", "content": "…"}, …] with the chat template.

        A str is a single user message. A model without a template continues "User:
        …\\nAssistant:". Options are those of `generate`, but max_new_tokens=256.
        """
        return "".join(self.chat_stream(messages, **options)).strip()

    def chat_stream(
        self, messages: "Messages | str", **options: "Unpack[GenerationSettings]"
    ) -> Iterator[str]:
        """Yields the reply of `chat` in chunks as it is generated."""
        self._require_head("lm", "chat")
        prompt = encode_conversation(self.tokenizer, messages)
        config = self._generation_config(**prompt.settings(dict(options)))
        require_that(config.n == 1, "A chat has one reply at a time; use another seed for another.")
        return (text for _, text in self.generator.stream([prompt.tokens], config))

    @overload
    def score(  # type: ignore[overload-overlap]
        self, context: str, continuation: str, *, cut: bool = False
    ) -> "Score": ...
    @overload
    def score(
        self, context: str | Sequence[str], continuation: Sequence[str], *, cut: bool = False
    ) -> "list[Score]": ...

    def score(
        self, context: str | Sequence[str], continuation: str | Sequence[str], *, cut: bool = False
    ) -> "Score | list[Score]":
        """Returns log p(continuation | context); lists are batched, and may share one context.

        A context that is too long loses its beginning; with `cut` a continuation does so too.
        """
        from malmoi.inference.score import score_pairs

        self._require_head("lm", "score")
        if isinstance(context, str) and isinstance(continuation, str):
            return self.score([context], [continuation], cut=cut)[0]
        contexts = [context] * len(continuation) if isinstance(context, str) else list(context)
        fit = not isinstance(continuation, str) and len(contexts) == len(continuation)
        require_that(fit, "score takes one continuation for each context, or many for one.")
        pairs = list(zip(contexts, continuation, strict=True))
        return score_pairs(self.network, self.tokenizer, pairs, self._prefixes, cut=cut)

    def perplexity(
        self, text: str, *, stride: int | None = None, memory: int | None = None
    ) -> float:
        """exp of the mean loss per token; windows advance by `stride` (half the context).

        A recurrent model carries its state instead, and a Transformer-XL its memory, of `memory`
        tokens if given.
        """
        from malmoi.inference.score import long_text_logprobs
        from malmoi.metrics.registry import perplexity

        self._require_head("lm", "measure perplexity")
        return perplexity(long_text_logprobs(self.network, self.tokenizer, text, stride, memory)[0])

    def bits_per_byte(
        self, text: str, *, stride: int | None = None, memory: int | None = None
    ) -> float:
        """Like perplexity, but comparable between models with different tokenizers."""
        from malmoi.inference.score import long_text_logprobs

        self._require_head("lm", "measure bits per byte")
        logprobs, size = long_text_logprobs(self.network, self.tokenizer, text, stride, memory)
        return -sum(logprobs) / math.log(2) / size

    # ------------------------------------------------------------------ without training

    @overload
    def classify(  # type: ignore[overload-overlap]  # to Python, a str is a sequence of str
        self, text: str, labels: "LabelWords", *, prompt: str | None = None, examples: "Shown" = ()
    ) -> "Prediction": ...
    @overload
    def classify(
        self,
        text: Sequence[str],
        labels: "LabelWords",
        *,
        prompt: str | None = None,
        examples: "Shown" = (),
    ) -> "list[Prediction]": ...

    def classify(
        self,
        text: str | Sequence[str],
        labels: "LabelWords",
        *,
        prompt: str | None = None,
        examples: "Shown" = (),
    ) -> "Prediction | list[Prediction]":
        """Classifies a text, or a list of them, by the names of the labels, without training.

        A model fine-tuned for inference is asked whether the text entails "This text is LABEL.",
        and a sentence encoder how near the two are; for them `prompt` has {label}. A GPT or BERT
        completes a prompt that has {text} and optionally {labels}, calibrated with content-free
        texts; `examples` are (text, label) pairs shown first.
        """
        from malmoi.inference.zero_shot import classify

        texts = [text] if isinstance(text, str) else list(text)
        found = classify(self, texts, labels, prompt, examples)
        return found[0] if isinstance(text, str) else found

    def answer(self, question: str, context: str = "", *, max_new_tokens: int = 32) -> str:
        """Answers a question, about a context if one is given."""
        from malmoi.inference.zero_shot import question_prompt

        return self._line(question_prompt(question, context), max_new_tokens)

    def summarise(
        self, text: str, *, sentences: int = 3, max_new_tokens: int = 100, seed: int = 0
    ) -> str:
        """Summarises in so many sentences, sampled from the two likeliest tokens (GPT-2 §3.6)."""
        from malmoi.inference.zero_shot import first_sentences, summary_prompt

        prompt = summary_prompt(text, self.tokenizer, self.network.config.context - max_new_tokens)
        written = self.generate(
            prompt, temperature=1, top_k=2, seed=seed, max_new_tokens=max_new_tokens, stop="\n\n"
        )
        return first_sentences(written, sentences)

    def _line(self, prompt: str, limit: int) -> str:
        return self.generate(prompt, temperature=0, max_new_tokens=limit, stop="\n").strip()

    def _generation_config(self, **options: "Unpack[GenerationSettings]") -> "GenerationConfig":
        from malmoi.inference.generation.generate import generation_config

        return generation_config(self.tokenizer, self._ends, self.config.vocab, options)

    @cached_property
    def generator(self) -> "TextGenerator":
        """The parts of this model that generation needs."""
        from malmoi.inference.generation.generate import TextGenerator
        from malmoi.kernels.fast_argmax import fast_argmax_for

        self._require_head("lm", "generate")
        return TextGenerator(self.network, self.tokenizer, fast_argmax_for(self.network))

    @cached_property
    def _prefixes(self) -> "PrefixCache":
        """Cached prefixes of the contexts that `score` has read."""
        from malmoi.inference.generation.prefix_cache import PrefixCache

        return PrefixCache(self.network)

    def _prompts(self, texts: Sequence[str], *, parse_special: bool = False) -> list[list[int]]:
        encode = partial(encode_prompt, self.tokenizer, parse_special=parse_special)
        return [encode(text).tokens for text in texts]
