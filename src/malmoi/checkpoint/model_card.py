"""The model card: what a folder holds and how to use it."""

from malmoi.model import Network, count_parameters
from malmoi.tokenizer import Tokenizer

# the first that fits is shown, fine-tuned heads before pre-trained ones
_USES = {
    "classify": 'malmoi.load(".").predict("a text")',
    "tag": 'malmoi.load(".").predict("Alice went to Seoul.")',
    "span": 'malmoi.load(".").predict(("Where did she go?", "Alice went to Seoul."))',
    "choice": (
        'malmoi.load(".").predict(("It rained, so", ("the street was wet.", "the sun shone.")))'
    ),
    "lm": 'malmoi.load(".").generate("The state of")',
    "mlm": 'malmoi.load(".").fill("The {mask} of the union")',
}


def model_card(network: Network, model_type: str, tokenizer: Tokenizer | None) -> str:
    c = network.config
    id = tokenizer.specials.mask if tokenizer else None
    mask = tokenizer.token(id) if tokenizer and id is not None else "[MASK]"
    use = next(
        (use for head, use in _USES.items() if head in network.heads),
        'malmoi.load(".").embed(["a text"])',
    ).replace("{mask}", mask)
    elsewhere = (
        "A model of Malmoi's own type: after `import malmoi`, `transformers` opens this folder too."
        if model_type == "malmoi"
        else f"A `{model_type}` model: `transformers` opens this folder too."
    )
    return f"""---
library_name: malmoi
tags: [{", ".join(dict.fromkeys(("malmoi", model_type)))}]
---
# A {model_type} model of {count_parameters(network):,} weights

{elsewhere}

| depth | width | heads | context | vocabulary | attention |
|---|---|---|---|---|---|
| {c.depth} | {c.width} | {c.heads} | {c.context} | {c.vocab} | {", ".join(c.attention)} |

Heads: {", ".join(network.heads) or "none (a bare trunk)"}.

```python
import malmoi
{use}
```
"""
