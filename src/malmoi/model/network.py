"""The network: a trunk, a pooler and named heads; and how its weights are initialised."""

import copy
from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from malmoi.config import ModelConfig
from malmoi.errors import require_known, require_that
from malmoi.messages import msg
from malmoi.model.heads import (
    HEADS,
    LABEL_HEADS,
    POOLED_HEADS,
    VOCABULARY_HEADS,
    Generator,
    LinearHead,
    Pooler,
    VocabularyHead,
)
from malmoi.model.patterns import parse_pattern
from malmoi.model.transformer import Transformer

if TYPE_CHECKING:
    from malmoi.model.trunks import FeatureConfig, FeatureReader


class Network(nn.Module):
    """A trunk and named heads; calling it runs only the requested heads.

    `heads` maps a name to its number of classes (0 if fixed); a pooler is added for the heads that
    need one. With `features` the trunk is frozen and a small model reads its layers. Weights are
    zero, and norms 1, until `initialise` draws them or a file is read.
    """

    def __init__(
        self,
        config: ModelConfig,
        heads: Mapping[str, int],
        *,
        pooler: bool = False,
        features: "FeatureConfig | None" = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.features = features
        with _NotDrawn():
            self.trunk, self.reader = _trunk(config, features)
            if features is not None:
                # a frozen [CLS] was not trained to represent its sequence
                config = replace(config, pool="mean", pooler="none", head_transform=False)
            self.pooler = Pooler(config) if pooler or features is not None else None
            self.heads = nn.ModuleDict()
            for name, classes in heads.items():
                self.add(name, classes)

    @property
    def device(self) -> torch.device:
        return self.trunk.embed.token.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype it computes in, to which quantised weights are unpacked."""
        return self.trunk.embed.token.weight.dtype

    @property
    def width(self) -> int:
        """Width of the heads' input."""
        return self.config.width if self.reader is None else self.reader.width

    @property
    def classes(self) -> dict[str, int]:
        """The number of classes of each head (0 if fixed), as the constructor takes them."""
        linears = {name: getattr(head, "linear", None) for name, head in self.heads.items()}
        return {n: x.out_features if isinstance(x, nn.Linear) else 0 for n, x in linears.items()}

    @property
    def language_head(self) -> str:
        """The head over the vocabulary: lm for a GPT, mlm for a BERT; "" without one."""
        return next((name for name in HEADS if name in self.heads and HEADS[name].vocabulary), "")

    def require_language_head(self) -> str:
        """The head over the vocabulary, with which layers are read as tokens."""
        require_that(self.language_head, "This model has no head over the vocabulary.")
        return self.language_head

    @property
    def trunks(self) -> list[Transformer]:
        """The model's, and that of ELECTRA's generator."""
        others = (head.trunk for head in self.heads.values() if isinstance(head, Generator))
        return [self.trunk, *others]

    @property
    def blocks(self) -> list[nn.Module]:
        """Every block, an encoder's too."""
        encoder: Any = getattr(self.trunk, "encoder", None)
        return [*self.trunk.blocks, *getattr(encoder, "blocks", ())]

    def add(self, name: str, classes: int = 0) -> None:
        if name == "generator":
            self.heads[name] = Generator(self.config, self.trunk.embed)
            return
        require_known(name, HEADS, "There is no head {name!r}.{hint}")
        require_that(
            name not in LABEL_HEADS or classes >= 1,
            "The head {name!r} needs the number of its classes.",
            name=name,
        )
        if self.reader is not None:
            require_that(
                name in LABEL_HEADS,
                "A feature model on frozen layers has no head {name!r}; it can have {heads}.",
                name=name,
                heads=" or ".join(sorted(LABEL_HEADS)),
            )
            self.heads[name] = LinearHead(self.config, classes, width=self.width)
            return
        if name in POOLED_HEADS and self.pooler is None:
            self.pooler = Pooler(self.config)
        self.heads[name] = HEADS[name].build(self.config, self.trunk.embed.token, classes)

    def require_attention(self, what: str) -> None:
        """Refuses a model whose tokens do not attend to one another by softmax, in one text."""
        self.require_one_text(what)
        require_that(
            self.config.mixer == "attention",
            "{what} is for softmax attention; this model has {mixer}.",
            what=msg(what),
            mixer=self.config.mixer,
        )

    def require_one_text(self, what: str) -> None:
        """Refuses a model that reads more than a text: a source too, or features."""
        require_that(
            not (self.config.encoder_depth or self.config.feature_count),
            "{what} does not support translation models or models of features.",
            what=msg(what),
        )

    def masked(self) -> "Network":
        """A bidirectional view, whose mlm head is the lm head one position to the left."""
        c = self.config
        require_that(c.both_ways, "This model reads left to right only.")
        if not self.trunk.is_causal:
            return self
        attention = tuple(text.replace("causal", "full") for text in c.attention)
        heads = {("mlm" if name == "lm" else name): head for name, head in self.heads.items()}
        view = self._viewed(replace(c, attention=attention, pool="mean"))
        return view._with(heads=nn.ModuleDict(heads))

    def with_memory(self, memory: int) -> "Network":
        """The same weights with a memory of this many tokens, and windows that reach as far."""
        c = self.config
        require_that(
            self.trunk.needs_distances,
            "Without relative positions (transformer-xl) texts end at its context of {context}.",
            context=c.context,
        )
        attention = tuple(
            f"causal & local:{memory + 1}" if memory and pattern.window else pattern.text
            for pattern in self.trunk.patterns
        )
        return self._viewed(replace(c, attention=attention, memory=memory))

    def _viewed(self, config: ModelConfig) -> "Network":
        """A shallow copy with another config: every weight, buffer and block stays the same."""
        trunk = copy.copy(self.trunk)
        trunk.config = config
        trunk.patterns = [parse_pattern(text, config.heads) for text in config.attention]
        trunk.__dict__.pop("is_causal", None)
        view = self._with(trunk=trunk)
        view.config = config
        return view

    def without_head(self, name: str) -> "Network":
        """The same network, sharing its weights, without one of the heads."""
        heads = {other: head for other, head in self.heads.items() if other != name}
        return self._with(heads=nn.ModuleDict(heads))

    def _with(self, **modules: nn.Module) -> "Network":
        """A shallow copy with other modules."""
        view = copy.copy(self)
        view._modules = {**self._modules, **modules}
        return view

    def tie(self) -> None:
        """Ties vocabulary heads to the token embedding again, after its weight was replaced."""
        for head in self.heads.values() if self.config.tied else ():
            if isinstance(head, VocabularyHead):
                head.weight = self.trunk.embed.token.weight

    def forward(
        self,
        tokens: Tensor,
        *,
        heads: tuple[str, ...] | None = None,
        slots: Tensor | None = None,
        firsts: Tensor | None = None,
        keep: Tensor | None = None,
        **inputs: object,
    ) -> dict[str, Tensor]:
        """The scores of `heads`; with `slots` [M], vocabulary heads read only these positions."""
        hidden = self.hidden(tokens, keep=keep, **inputs)
        names = heads or tuple(self.heads)
        return {name: self.read(name, hidden, keep, slots, firsts) for name in names}

    def hidden(self, tokens: Tensor, *, keep: Tensor | None = None, **inputs: object) -> Tensor:
        """The heads' input [B, T, D]: the last layer, or features of frozen layers."""
        states: Tensor = self.trunk(tokens, keep=keep, **inputs)
        return states if self.reader is None else cast(Tensor, self.reader(states, keep))

    def read(
        self,
        name: str,
        hidden: Tensor,
        keep: Tensor | None = None,
        slots: Tensor | None = None,
        firsts: Tensor | None = None,
    ) -> Tensor:
        require_that(
            name in self.heads,
            "This model has no head {name!r} (it has: {have}); it was trained for something else.",
            name=name,
            have=", ".join(self.heads) or msg("none"),
        )
        if name in POOLED_HEADS:
            hidden = cast(nn.Module, self.pooler)(hidden, keep, firsts)
        if name == "mlm" and self.config.both_ways:
            hidden = torch.cat((hidden[:, :1], hidden[:, :-1]), 1)
        if name in VOCABULARY_HEADS and slots is not None:
            hidden = hidden.flatten(0, 1)[slots]
        return cast(Tensor, self.heads[name](hidden))


def _trunk(
    config: ModelConfig, features: "FeatureConfig | None"
) -> "tuple[Transformer, FeatureReader | None]":
    """The trunk of a config and what reads its layers; rare ones are imported when needed."""
    if not (features or config.encoder_depth or config.feature_count):
        return Transformer(config), None
    from malmoi.model import trunks

    if features:
        return trunks.LayeredTransformer(config, features), trunks.FeatureReader(config, features)
    return (trunks.EncoderDecoder if config.encoder_depth else trunks.FeaturePrefix)(config), None


def count_parameters(network: nn.Module) -> int:
    """The number of distinct weights; tied ones count once."""
    return sum(p.numel() for p in network.parameters())


@torch.no_grad()
def initialise(network: Network, seed: int | None = None, *, skip: Collection[str] = ()) -> Network:
    """Initialises the weights by the family's rule: N(0, σ), truncated for BERT; biases 0, norms 1.

    With `fan_in`, σ of a linear layer is 1/√inputs, so that narrow models attend from the start.
    Weights that write to the residual stream are scaled by 1/√(2·depth) (GPT-2 §2.3) or zeroed.
    Weights named in `skip` are not drawn: the caller replaces them.
    """
    generator = None if seed is None else torch.Generator(network.device).manual_seed(seed)
    for name, module in network.named_modules():
        for parameter_name, weight in module.named_parameters(recurse=False):
            if isinstance(module, nn.LayerNorm | nn.RMSNorm):
                weight.fill_(float(parameter_name == "weight"))
            elif parameter_name == "bias":
                weight.zero_()
            elif f"{name}.{parameter_name}" not in skip:
                _draw(module, weight, network.config, generator)
        if hasattr(module, "reset") and not name.startswith("reader"):
            module.reset(generator)
    _scale_residual_writers(network)
    if network.reader is not None:
        network.reader.reset(generator)
    return network


def _scale_residual_writers(network: Network) -> None:
    c = network.config
    scale = {"same": 1.0, "scaled": (2 * c.depth) ** -0.5, "zero": 0.0}[c.residual_init]
    for block in chain(*(trunk.blocks for trunk in network.trunks)) if not c.is_lstm else ():
        for writer in (block.attend.out, block.mlp.down):  # type: ignore[union-attr]
            writer.weight.mul_(scale)  # type: ignore[operator, union-attr]


def _draw(
    module: nn.Module, weight: Tensor, c: ModelConfig, generator: torch.Generator | None
) -> None:
    if c.init == "xavier" and weight.dim() == 2:
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(weight, generator=generator)
        else:
            nn.init.normal_(weight, std=c.width**-0.5, generator=generator)
    elif c.init == "truncated":
        nn.init.trunc_normal_(
            weight, std=c.init_std, a=-2 * c.init_std, b=2 * c.init_std, generator=generator
        )
    else:
        by_inputs = c.init == "fan_in" and isinstance(module, nn.Linear)
        std = weight.size(1) ** -0.5 if by_inputs else c.init_std
        nn.init.normal_(weight, std=std, generator=generator)


class _NotDrawn(TorchFunctionMode):
    """Weights that torch.nn.init would draw at random are zero.

    `initialise` draws a network's weights, or they are read, so torch's own are never used, and
    drawing 110M of them takes a second. On the meta device torch would even run its Python
    reference of each distribution, whose first use imports the compiler: 2 s of every start.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        kept = func in (nn.init.ones_, nn.init.zeros_)
        if kept or getattr(func, "__module__", "") != "torch.nn.init":
            return func(*args, **given)
        weight = given["tensor"] if "tensor" in given else args[0]
        return weight if weight.is_meta else weight.detach().zero_()
