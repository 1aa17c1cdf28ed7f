"""The model card: what a folder holds and how to use it, for whoever finds it."""

from malmoi.model import Network, parameters

_USES = {
    "lm": 'malmoi.load(".").generate("The state of")',
    "mlm": 'malmoi.load(".").fill("The [MASK] of the union")',
    "classify": 'malmoi.load(".").predict("I love this movie!")',
    "tag": 'malmoi.load(".").predict("Alice went to Seoul.")',
}


def model_card(network: Network, model_type: str) -> str:
    c = network.config
    use = next((_USES[head] for head in network.heads if head in _USES), 'malmoi.load(".").embed(["a text"])')
    elsewhere = (
        "Hugging Face has no such model: open it with Malmoi."
        if model_type == "malmoi"
        else f"A `{model_type}` model: `transformers` opens this folder too."
    )
    return f"""---
library_name: malmoi
tags: [malmoi, {model_type}]
---
# A {model_type} model of {parameters(network):,} weights

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
