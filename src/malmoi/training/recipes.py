"""The recipes: faithful to their papers unless the name ends in -fast or noted otherwise."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from malmoi.errors import require_known, require_that
from malmoi.model import preset
from malmoi.training.recipe import (
    BUDGETS,
    OBJECTIVE_SAMPLES,
    SCHEDULES,
    DataConfig,
    Recipe,
    TokenizerConfig,
    TrainConfig,
    read_recipe,
)

WORDPIECE = TokenizerConfig(kind="wordpiece", vocab=30_522)
GPT1_BPE = TokenizerConfig(kind="bpe", vocab=40_478, lowercase=True)
SIZED = ("gpt", "bert", "both")  # recipes whose size is chosen by text, minutes and machine


def _recipe(name: str, about: str, train: TrainConfig, **parts: Any) -> Recipe:
    """For the model of this name; without other `parts`, next tokens in GPT-2's vocabulary."""
    return Recipe(name=name, about=about, model=preset(name), train=train, **parts)


def _byte_bpe(vocab: int) -> TokenizerConfig:
    return TokenizerConfig(kind="byte-bpe", vocab=vocab)


def bert_recipe(name: str, lr: float = 1e-4) -> Recipe:
    """Devlin et al. 2019 appendix A.2: 256 sequences, 1M steps, 90 % at 128 tokens, then 512."""
    about = "MLM + NSP, WordPiece, Adam with linear decay (Devlin et al. 2019)"
    data = DataConfig(lengths=(128, 512), shares=(0.9, 0.1))
    train = TrainConfig(
        steps=1_000_000, batch=256, lr=lr, betas=(0.9, 0.999), eps=1e-6, decay=0.01, warmup=0.01
    )
    return _recipe(name, about, train, objective="mlm+nsp", tokenizer=WORDPIECE, data=data)


def electra_recipe(name: str) -> Recipe:
    """Clark et al. 2020 appendix A, table 6: replaced token detection with a generator.

    Of the masks 15 % keep their token, as in the authors' code.
    """
    small = name == "electra-small"
    base = bert_recipe(name, lr=5e-4 if small else 2e-4)
    sizes: dict[str, Any] = dict(batch=128) if small else dict(steps=766_000)
    return replace(
        base,
        about="MLM by a generator + replaced tokens by the model (Clark et al. 2020)",
        objective="electra",
        data=DataConfig(lengths=(128 if small else 512,), mask_token=0.85, mask_random=0.0),
        train=replace(base.train, warmup=0.0, warmup_steps=10_000, **sizes),
    )


def albert_recipe(name: str) -> Recipe:
    """Lan et al. 2020: sentence order instead of NSP, shared layers."""
    return replace(
        bert_recipe(name),
        about="MLM + sentence order, shared layers (Lan et al. 2020)",
        objective="mlm+sop",
    )


def xlm_recipe(name: str) -> Recipe:
    """Lample & Conneau 2019 §3.3 at the size of BERT-mini: MLM and TLM in turn, no NSP.

    Segments are the languages; a pair is 128 tokens at most, as in BERT's first phase.
    """
    base = bert_recipe("bert-mini", lr=5e-4)
    return replace(
        base,
        name=name,
        about="MLM over translation pairs, TLM (Lample & Conneau 2019)",
        objective="mlm",
        data=DataConfig(pairs=True, lengths=(128,), shares=(1.0,)),
        tokenizer=TokenizerConfig(kind="wordpiece", vocab=10_000),
        train=replace(base.train, steps=100_000, batch=64),
    )


def transformer_recipe(name: str) -> Recipe:
    """Vaswani et al. 2017 §5: 25,000 tokens a side, Adam by eq. 3 after 4,000 steps of warm-up.

    `small` is for tens of thousands of pairs: the sizes, dropout, batch and rate of Wu et al. 2021.
    A step is `batch` units of 512 tokens a side. The last weights are averaged, as in §6.1.
    """
    small = name == "transformer-small"
    model = preset(name)
    train = TrainConfig(
        steps={"transformer-base": 100_000, "transformer-big": 300_000}.get(name, 8_000),
        batch=24 if small else 50,
        lr=0.005 if small else (model.width * 4000) ** -0.5,
        betas=(0.9, 0.98),
        eps=1e-9,
        decay=0.0,
        clip=1.0 if small else 0.0,  # small's warm-up is short where its budget is
        label_smoothing=0.1,
        schedule="inverse_sqrt",
        warmup=0.0,
        warmup_steps=2000 if small else 4000,
        ema=0.1 if small else 0.05,
        compile=False,  # batches have many shapes
    )
    return _recipe(
        name,
        "translation by an encoder and a decoder (Vaswani et al. 2017)",
        train,
        objective="translation",
        tokenizer=_byte_bpe(model.vocab),
        data=DataConfig(pairs=True, lengths=(512,), shares=(1.0,)),
    )


def transformer_tiny() -> Recipe:
    """A translator for minutes on a CPU: few words and layers, a linear decay, no dropout.

    Batches of 256 tokens a side: twice the updates of 512 for the same work (docs/lab.md).
    """
    base = transformer_recipe("transformer-tiny")
    settings: dict[str, Any] = dict(lr=2e-3, schedule="linear", warmup=0.1, warmup_steps=0)
    return replace(
        base,
        about="translation in minutes on a CPU, the shape of Vaswani et al. 2017",
        data=replace(base.data, lengths=(256,)),
        train=replace(base.train, steps=4000, batch=1, label_smoothing=0.0, ema=0.1, **settings),
    )


def caption_small() -> Recipe:
    """A small GPT that writes about vectors before its text, such as patches of an image.

    The number of vectors and their width come from the file of features.
    """
    features = dict(attention=("causal | prefix:1",), feature_count=1, feature_width=1)
    # with N(0, 0.02) and Adam, vectors of 0 … 1 need six times the steps
    shape = MODERN_GPT | dict(norm_kind="layer", init="fan_in", width=128, depth=2, heads=4)
    return Recipe(
        name="caption-small",
        about="text that follows feature vectors, for minutes on a CPU (data.features=FILE.npy)",
        model=preset("gpt2-small", context=128, **shape, **features),
        tokenizer=_byte_bpe(4096),
        train=TrainConfig(steps=2000, lr=3e-3, compile=False, **_MUON),
    )


def gpt1_recipe(name: str) -> Recipe:
    """Radford et al. 2018 §4.1: 100 epochs of 64 × 512 tokens, Adam to 2.5e-4 over 2,000 updates,
    cosine to 0.
    """
    about = "LM, BPE of 40,000 merges, cosine (Radford et al. 2018)"
    train = TrainConfig(
        epochs=100, batch=64, lr=2.5e-4, schedule="cosine", warmup=0.0, warmup_steps=2000
    )
    return _recipe(name, about, train, tokenizer=GPT1_BPE)


def _gpt3_training(lr: float, batch_tokens: int, context: int) -> TrainConfig:
    """Brown et al. 2020 §2.3 and appendix B; table 2.1 gives lr and batch.

    Warm-up over 375M tokens, cosine to 10 % at 260B, then flat to 300B. The batch grows over the
    first 4B tokens for batches of 0.5M tokens, 12B for 3.2M, in proportion between: only the ends
    are given.
    """
    batch = batch_tokens // context
    return TrainConfig(
        tokens=300_000_000_000,
        batch=batch,
        batch_start=min(batch, 32_768 // context),
        batch_ramp=(4e9 + 8e9 * (batch_tokens - _HALF) / (_LARGEST - _HALF)) / 300e9,
        lr=lr,
        betas=(0.9, 0.95),
        decay=0.1,
        schedule="cosine",
        warmup=375e6 / 300e9,
        floor=0.1,
        decay_until=260 / 300,
    )


def gpt2_recipe(name: str, lr: float) -> Recipe:
    """Radford et al. 2019: 512 × 1,024 tokens; its optimizer is unpublished, so GPT-3's is used."""
    changes: dict[str, Any] = dict(batch_start=0, batch_ramp=0.0, decay_until=1.0, warmup=0.01)
    about = "LM, byte-level BPE (Radford et al. 2019; the optimizer of Brown et al. 2020)"
    train = replace(_gpt3_training(lr, 512 * 1024, 1024), tokens=10_000_000_000, **changes)
    return _recipe(name, about, train)


def gpt3_recipe(name: str, lr: float, batch_tokens: int) -> Recipe:
    train = _gpt3_training(lr, batch_tokens, 2048)
    return _recipe(name, "LM with alternating dense and banded layers (Brown et al. 2020)", train)


def lstm_recipe(name: str) -> Recipe:
    """An LSTM language model of Zaremba et al. 2014's medium size; Adam instead of their SGD."""
    about = "LM by a recurrent network (Zaremba et al. 2014; Adam)"
    train = TrainConfig(
        steps=100_000, lr=1e-3, betas=(0.9, 0.99), decay=0.0, schedule="cosine", compile=False
    )
    return _recipe(name, about, train, tokenizer=_byte_bpe(10_000))


def lstm_gpt1_recipe(name: str) -> Recipe:
    """Radford et al. 2018 §5: GPT-1's data and training, a single layer of 2,048 units."""
    base = gpt1_recipe(name)
    return replace(
        base,
        about="LM by one LSTM layer, the ablation of GPT-1 (Radford et al. 2018)",
        train=replace(base.train, lr=1e-3, compile=False),
    )


def elmo_recipe(name: str) -> Recipe:
    """Peters et al. 2018 §3: a language model each way; subwords and Adam, not theirs."""
    base = lstm_recipe(name)
    return replace(
        base,
        about="two LSTM language models, one each way (Peters et al. 2018; subwords, Adam)",
        objective="bilm",
        train=replace(base.train, batch=128),
    )


def transformer_xl_recipe(name: str) -> Recipe:
    """Dai et al. 2019 and their scripts: Adam, cosine, clip 0.25; byte-BPE, not words."""
    theirs: dict[str, Any] = dict(lr=2.5e-4, warmup=0.0)
    sizes: dict[str, dict[str, Any]] = {
        "transformer-xl-small": dict(steps=200_000, batch=32, lr=1e-3),
        "transformer-xl-base": dict(steps=200_000, batch=60, warmup_steps=0, **theirs),
        "transformer-xl-large": dict(steps=4_000_000, batch=128, warmup_steps=16_000, **theirs),
    }
    about = "LM in segments with a memory (Dai et al. 2019; byte-BPE, same length for all)"
    train = TrainConfig(decay=0.0, clip=0.25, schedule="cosine", compile=False, **sizes[name])
    return _recipe(name, about, train, tokenizer=_byte_bpe(preset(name).vocab))


def gpt_char() -> Recipe:
    """A character-level GPT for minutes on a CPU: rotary, QK-norm, ReLU², Muon and WSD."""
    return Recipe(
        name="gpt-char",
        about="characters, minutes on a CPU; rotary, QK-norm, ReLU², Muon, WSD",
        model=preset(
            "gpt2-small",
            # a norm that is fast without a compiler, which would take a fifth of the three minutes
            **MODERN_GPT
            | dict(norm_kind="layer", vocab=256, context=256, width=192, depth=4, heads=3),
        ),
        tokenizer=TokenizerConfig(kind="char", vocab=256),
        data=DataConfig(valid=0.1),
        train=TrainConfig(
            minutes=3, batch=32, **_MUON, lr=3e-3, valid_every=250, save_every=500, compile=False
        ),
    )


MODERN_GPT: dict[str, Any] = dict(
    positions="rotary",
    qk_norm=True,
    norm_kind="rms",
    activation="relu2",
    bias=False,
    residual_init="zero",
    dropout=0.0,
    attention_dropout=0.0,
)
# ModernBERT's mathematics (Warner et al. 2024 §2.1) with global attention in every layer, so that
# transformers can load the trained model
MODERN_BERT: dict[str, Any] = dict(
    segments=0,
    positions="rotary",
    norm="pre",
    norm_bias=False,
    first_norm=False,
    embed_norm=True,
    final_norm=True,
    eps=1e-5,
    activation="geglu",
    bias=False,
    mlm_activation="gelu",
    pool="mean",  # without NSP, pre-training teaches [CLS] nothing
    pooler="gelu",
    head_transform=True,
    init="fan_in",
    residual_init="zero",
    dropout=0.0,
    attention_dropout=0.0,
)
_MASKING: dict[str, Any] = dict(mask_rate=0.25, mask_token=1.0, mask_random=0.0)
_MUON: dict[str, Any] = dict(
    **dict(optimizer="muon", betas=(0.9, 0.95), decay=0.0),
    **dict(schedule="wsd", cooldown=0.5, floor=0.0, warmup=0.0, warmup_steps=20),
)


def fast_gpt(base: Recipe) -> Recipe:
    """Changes the mathematics: rotary, RMS and QK norms, ReLU², zero-init outputs, Muon, WSD."""
    return replace(
        base,
        name=f"{base.name}-fast",
        about=f"{fast_gpt.__doc__}",
        model=replace(base.model, **MODERN_GPT),
        train=replace(base.train, **_MUON, lr=base.train.lr * 5, clip=0.0),
    )


def fast_bert(base: Recipe) -> Recipe:
    """Changes the mathematics to ModernBERT's: rotary, pre-norm, GeGLU, no biases, no segments; no
    dropout, 25 % masking, no NSP, Muon.
    """
    return replace(
        base,
        name=f"{base.name}-fast",
        about=f"{fast_bert.__doc__}",
        model=replace(base.model, **MODERN_BERT),
        objective="mlm",
        data=replace(base.data, **_MASKING),
        train=replace(base.train, **_MUON, lr=3e-3, clip=0.0),
    )


def sized_recipe(kind: str) -> Recipe:
    """What all sizes of `gpt`, `bert` or `both` have in common; `sizing.py` chooses the rest."""
    changes = dict(cooldown=0.75, cautious_decay=True, clip=0.0)
    bert = kind == "bert"
    shape = MODERN_BERT if bert else MODERN_GPT | {"both_ways": kind == "both"}
    return Recipe(
        name=kind,
        about="sized for its text, its minutes and its machine (see docs/lab.md)",
        # one head divides any width
        model=preset("bert-small" if bert else "gpt2-small", **shape, heads=1),
        objective={"bert": "mlm", "gpt": "lm"}.get(kind, kind),
        tokenizer=TokenizerConfig(kind="wordpiece" if bert else "byte-bpe", vocab=8192),
        data=DataConfig(shuffle="windows" if bert else "documents", **_MASKING),
        # saves by time are frequent enough
        train=TrainConfig(minutes=1.0, lr=3e-3, save_every=100_000, **_MUON | changes),
    )


_BERTS = {
    "bert-tiny": 1e-3,
    "bert-mini": 5e-4,
    "bert-small": 5e-4,
    "bert-medium": 3e-4,
    "bert-base": 1e-4,
    "bert-large": 1e-4,
}  # the paper's 1e-4 for base and large; the small ones train faster with more
_TRANSFORMERS = ("transformer-small", "transformer-base", "transformer-big")
_TRANSFORMER_XLS = ("transformer-xl-small", "transformer-xl-base", "transformer-xl-large")
_GPT2S = {"gpt2-small": 6e-4, "gpt2-medium": 3e-4, "gpt2-large": 2.5e-4, "gpt2-xl": 2e-4}
_HALF = 500_000
_LARGEST = 3_200_000
_GPT3S = {
    "gpt3-125m": (6e-4, _HALF),
    "gpt3-350m": (3e-4, _HALF),
    "gpt3-760m": (2.5e-4, _HALF),
    "gpt3-1.3b": (2e-4, 1_000_000),
    "gpt3-2.7b": (1.6e-4, 1_000_000),
    "gpt3-6.7b": (1.2e-4, 2_000_000),
    "gpt3-13b": (1e-4, 2_000_000),
    "gpt3-175b": (0.6e-4, _LARGEST),
}

RECIPES: dict[str, Callable[[], Recipe]] = {
    **{name: partial(bert_recipe, name, lr) for name, lr in _BERTS.items()},
    **{name: partial(electra_recipe, name) for name in ("electra-small", "electra-base")},
    "albert-base": partial(albert_recipe, "albert-base"),
    **{name: partial(transformer_recipe, name) for name in _TRANSFORMERS},
    "transformer-tiny": transformer_tiny,
    "xlm-small": partial(xlm_recipe, "xlm-small"),
    "gpt1": partial(gpt1_recipe, "gpt1"),
    **{name: partial(gpt2_recipe, name, lr) for name, lr in _GPT2S.items()},
    **{name: partial(gpt3_recipe, name, *values) for name, values in _GPT3S.items()},
    "gpt-char": gpt_char,
    "caption-small": caption_small,
    "lstm": partial(lstm_recipe, "lstm"),
    "lstm-gpt1": partial(lstm_gpt1_recipe, "lstm-gpt1"),
    **{name: partial(elmo_recipe, name) for name in ("elmo-small", "elmo")},
    **{name: partial(transformer_xl_recipe, name) for name in _TRANSFORMER_XLS},
    **{kind: partial(sized_recipe, kind) for kind in SIZED},
    **{f"{name}-fast": lambda name=name: fast_bert(RECIPES[name]()) for name in _BERTS},  # type: ignore[misc]
    **{f"{name}-fast": lambda name=name: fast_gpt(RECIPES[name]()) for name in _GPT2S},  # type: ignore[misc]
}


def named_recipe(name: str) -> Recipe:
    require_known(name, RECIPES, "There is no recipe {name!r}.{hint} `malmoi recipes` lists them.")
    return RECIPES[name]()


# ------------------------------------------------------------------ with the user's settings


def resolve_recipe(recipe: str | Recipe, overrides: Mapping[str, Any]) -> Recipe:
    """A recipe by name or file with overrides; a new budget replaces the recipe's own."""
    chosen = _named_or_read(recipe) if isinstance(recipe, str) else recipe
    paths = settings_by_path(chosen, overrides)
    sized = isinstance(recipe, str) and recipe in SIZED
    if sized and "model.heads" in paths:
        paths = {"model.head_width": 64, **paths}  # until the width is chosen, by the heads
    if "train.batch" in paths:
        paths = {"train.fit_batch": False, **paths}
    if names_budget(paths):
        unset: dict[str, Any] = dict.fromkeys(BUDGETS, 0)
        chosen = replace(chosen, train=replace(chosen.train, **unset))
    chosen = chosen.override(paths)
    # the row that data.masked_length divides is still to be chosen
    (chosen.override({"data.masked_length": 0}) if sized else chosen).check()
    return replace(chosen, plugins=_plugins(chosen))


def _named_or_read(name: str) -> Recipe:
    """A recipe by its name, or from a recipe.json or a run's folder."""
    path = Path(name) if name.endswith(".json") else Path(name) / "recipe.json"
    if name in RECIPES or (not path.is_file() and not name.endswith(".json")):
        # the paper's batch assumes its hardware; with a memory the number of rows is constant
        named = named_recipe(name)
        return named.override({"train.fit_batch": not named.model.memory})
    require_that(path.is_file(), "There is no recipe file {path}.", path=path)
    return read_recipe(path)


def settings_by_path(recipe: Recipe, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The overrides by path; a new tokenizer gets the model's vocabulary size."""
    paths = {_path(recipe, name): value for name, value in overrides.items() if value is not None}
    if "model.vocab" in paths:
        paths.setdefault("tokenizer.vocab", paths["model.vocab"])
    return paths


def _path(recipe: Recipe, name: str) -> str:
    if "." in name or name in vars(recipe):
        return name
    parts = ("model", "tokenizer", "data", "train")  # of two with such a field, the later
    known = {field: part for part in parts for field in vars(getattr(recipe, part))}
    require_known(name, known, "The recipe has no setting {name!r}.{hint}")
    return f"{known[name]}.{name}"


def names_budget(overrides: Mapping[str, Any]) -> bool:
    """Whether the user set a budget, as opposed to the recipe."""
    given = {name.removeprefix("train.") for name, value in overrides.items() if value is not None}
    return not given.isdisjoint(BUDGETS)


def _plugins(recipe: Recipe) -> tuple[str, ...]:
    """The plugins that registered names used by the recipe."""
    from malmoi.model import PATTERNS  # loads torch, which the list of recipes does not need

    patterns = set(re.findall(r"[A-Za-z_]\w*", " ".join(recipe.model.attention)))
    found = [
        OBJECTIVE_SAMPLES.origins.get(recipe.objective),
        SCHEDULES.origins.get(recipe.train.schedule),
        *(PATTERNS.origins.get(name) for name in sorted(patterns)),
    ]
    return tuple(dict.fromkeys(name for name in found if name is not None))
