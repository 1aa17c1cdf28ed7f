"""Writes a model as a Hugging Face folder, in its family's names where a family expresses it."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from malmoi.checkpoint.hf_tables import FAMILY_TABLES
from malmoi.checkpoint.quantized import Packing, is_linear_there, state_of
from malmoi.checkpoint.read_folder import OWN_MODEL_TYPE, TOKEN_IDS, Checkpoint
from malmoi.checkpoint.sentence_pooling import write_sentence_pooling
from malmoi.checkpoint.table import Table
from malmoi.checkpoint.translate import empty, fill_network, is_tied, to_hf
from malmoi.checkpoint.weights import Weight, dense, write_weights
from malmoi.errors import require_that
from malmoi.model import Network, count_parameters
from malmoi.model.heads import HEADS, Generator
from malmoi.system.files import output_folder, write_json, write_text
from malmoi.tokenizer import Tokenizer

SHARD_BYTES = 5_000_000_000


def write_checkpoint(
    checkpoint: Checkpoint,
    folder: str | Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    packing: Packing | None = None,
) -> None:
    """Saves a folder that transformers opens, or Malmoi's own; quantised with a `packing`."""
    folder = Path(folder)
    if {"generator", "mlm"} <= set(checkpoint.network.heads):  # what helped the network to learn
        alone = checkpoint.network.without_head("generator").without_head("detect")
        checkpoint = replace(checkpoint, network=alone)
    if "generator" in checkpoint.network.heads:  # ELECTRA's two networks are two folders
        with output_folder(folder) as place:
            write_checkpoint(_generator(checkpoint), place / "generator", shard_bytes=shard_bytes)
            whole = replace(checkpoint, network=checkpoint.network.without_head("generator"))
            write_checkpoint(whole, place, shard_bytes=shard_bytes, packing=packing)
        return
    network = checkpoint.network
    require_that(
        not network.trunk.has_soft_tokens,
        "A model folder cannot hold soft tokens: keep the adapter's folder.",
    )
    require_that(
        not network.config.both_ways or "mlm" not in network.heads,
        "This is one reading of a model that reads both ways: save the model itself.",
    )
    packing = packing or Packing.of(network)
    table = _table_for(checkpoint, packed=packing is not None)
    like = checkpoint.source_config.get("architectures", ())
    weights = state_of(network) if table is None else to_hf(table, network, like)
    if network.config.tied:
        weights = {k: v for k, v in weights.items() if not (table is None and is_tied(k))}
    config = _config_json(checkpoint, table)
    if packing is None:
        plain = ((name, dense(weight)) for name, weight in weights.items())
        dtype = checkpoint.dtype
        tensors = {n: t.to(dtype=dtype) if t.is_floating_point() else t for n, t in plain}
    else:
        tensors = packing.pack(weights, network, table)
        config |= packing.config_json(table)
    with output_folder(folder) as place:
        # a whole model replaces an adapter in the same folder
        (place / "adapter_config.json").unlink(missing_ok=True)
        write_weights(tensors, place, shard_bytes)
        if checkpoint.tokenizer is not None:
            checkpoint.tokenizer.save(place, segments=network.config.segments > 1)
        write_sentence_pooling(checkpoint.sentence, place, network.config.width)
        generation = checkpoint.generation or _default_generation(checkpoint)
        write_json(place / "generation_config.json", generation)
        write_json(place / "config.json", config)
        if not (place / "README.md").exists():
            kind = table.model_type if table else OWN_MODEL_TYPE
            write_text(place / "README.md", _model_card(network, kind, checkpoint.tokenizer))


def _generator(checkpoint: Checkpoint) -> Checkpoint:
    """The generator that a discriminator is trained with, as a masked language model of its own."""
    generator = cast(Generator, checkpoint.network.heads["generator"])
    network = empty(generator.config, {"mlm": 0}, pooler=False)
    weights: dict[str, Weight] = {
        name.replace("head.", "heads.mlm.", 1) if name.startswith("head.") else name: tensor
        for name, tensor in generator.state_dict().items()
    }
    fill_network(network, weights, Path(), {})
    return replace(checkpoint, network=network.eval(), generation={}, extra={})


def table_for(network: Network, model_type: str = "") -> Table | None:
    """The Hugging Face family that computes exactly this network, preferably `model_type`."""
    if network.features is not None:
        return None
    tables = sorted(FAMILY_TABLES.values(), key=lambda table: table.model_type != model_type)
    heads = set(network.heads)
    return next((table for table in tables if table.expresses(network.config, heads)), None)


def _table_for(checkpoint: Checkpoint, *, packed: bool) -> Table | None:
    """The family to save as; it must allow packed weights and the tokenizer's padding id."""
    network = checkpoint.network
    table = table_for(network, checkpoint.source_config.get("model_type", ""))
    if table is None or (packed and not is_linear_there(table)):
        return None
    wanted = table.write_config(network.config).get("pad_token_id")
    given = checkpoint.tokenizer.specials.pad if checkpoint.tokenizer else None
    return None if None not in (wanted, given) and wanted != given else table


def model_json(checkpoint: Checkpoint) -> dict[str, Any]:
    """The config.json of a model, with its labels (id2label)."""
    return _config_json(checkpoint, _table_for(checkpoint, packed=False))


def _config_json(checkpoint: Checkpoint, table: Table | None) -> dict[str, Any]:
    network = checkpoint.network
    if table is None:
        values = {
            "model_type": OWN_MODEL_TYPE,
            "model": network.config.to_dict(),
            "heads": network.classes,
            "pooler": network.pooler is not None,
        }
        values |= {"features": network.features.to_dict()} if network.features else {}
    else:
        like = checkpoint.source_config.get("architectures", ())
        values = {
            "architectures": [table.architecture(set(network.heads), network.config, like)],
            "model_type": table.model_type,
            **table.write_config(network.config),
        }
    ids = _token_ids(checkpoint)
    values |= {name: id for name, id in ids.items() if id is not None or name not in values}
    if checkpoint.tokenizer is not None and "cls_token_id" in values:  # ModernBERT's config has it
        specials = checkpoint.tokenizer.specials
        values |= {"cls_token_id": specials.cls, "sep_token_id": specials.sep}
    if "decoder_start_token_id" in values:
        values |= _decoder_start(checkpoint)
    if checkpoint.labels:
        values |= {
            "id2label": {str(i): name for i, name in enumerate(checkpoint.labels)},
            "label2id": {name: i for i, name in enumerate(checkpoint.labels)},
        }
    elif any(network.classes.values()):  # else transformers expects two
        values["num_labels"] = max(network.classes.values())
    extra = dict(checkpoint.extra)
    if problem_type := extra.pop("problem_type", None):
        values["problem_type"] = problem_type
    return values | ({"malmoi": extra} if extra else {})


def _token_ids(checkpoint: Checkpoint) -> dict[str, Any]:
    """Padding, start and end ids from the tokenizer, else from the original folder."""
    before = {name: id for name, id in checkpoint.source_config.items() if name in TOKEN_IDS}
    if checkpoint.tokenizer is None:
        return before
    named = vars(checkpoint.tokenizer.specials)
    ids = {name: named[name.removesuffix("_token_id")] for name in TOKEN_IDS}
    return {name: before.get(name) if id is None else id for name, id in ids.items()}


def _default_generation(checkpoint: Checkpoint) -> dict[str, Any]:
    ids = _token_ids(checkpoint)
    if checkpoint.network.config.encoder_depth:
        ids |= _decoder_start(checkpoint)
    return {key: value for key, value in ids.items() if value is not None}


def _decoder_start(checkpoint: Checkpoint) -> dict[str, int]:
    """The token that begins a translation: the folder's own, or the end-of-text token."""
    start = checkpoint.generation_setting("decoder_start_token_id")
    end = _token_ids(checkpoint).get("eos_token_id")
    return {"decoder_start_token_id": next((id for id in (start, end) if id is not None), 0)}


# shown for tokenizers that were trained on Korean text
KOREAN_USAGE = {
    "lm": 'generate("우리나라의")',
    "mlm": 'fill("우리나라의 {mask} 함께 지켜야 한다.")',
}
BOTH_READINGS = """
It was trained to read both ways: from left to right, to generate and score text, and in both
directions, to fill masks and embed texts. In `transformers` these are `AutoModelForCausalLM` and
`AutoModelForMaskedLM`. Tokenize prompts for the first with `add_special_tokens=False`: the
tokenizer ends a text with an end-of-text token, after which the model would start another one.
"""
KOREAN_TEXT = "우리나라의 역사와 문화에 대한"
ENGLISH_TEXT = "about the history and culture"


def _is_korean(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer splits Korean into fewer tokens per character than English."""
    texts = (KOREAN_TEXT, ENGLISH_TEXT)
    korean, english = (tokenizer.encode(text, specials=False).tokens for text in texts)
    if tokenizer.specials.unk in korean:
        return False
    shorter = len(korean) / len(KOREAN_TEXT) < len(english) / len(ENGLISH_TEXT)
    return shorter or tokenizer.specials.unk in english


def _model_card(network: Network, model_type: str, tokenizer: Tokenizer | None) -> str:
    c = network.config
    id = tokenizer.specials.mask if tokenizer else None
    mask = tokenizer.token(id) if tokenizer and id is not None else "[MASK]"
    korean = KOREAN_USAGE if tokenizer and _is_korean(tokenizer) else {}
    usages = {name: korean.get(name, spec.usage) for name, spec in HEADS.items()}
    both = c.both_ways and network.trunk.is_causal and "lm" in network.heads
    known = ("lm", "mlm") if both else tuple(network.heads)
    shown = [usage for name, usage in usages.items() if name in known and usage]
    uses = (shown if both else shown[:1]) or ['embed(["a text"])']
    use = "\n".join(f'malmoi.load(".").{one}' for one in uses).replace("{mask}", mask)
    own = "A model of Malmoi's own type: after `import malmoi`,"
    kind = own if model_type == OWN_MODEL_TYPE else f"A `{model_type}` model:"
    tag = next((spec.hub_task for name, spec in HEADS.items() if name in network.heads), "")
    about = "language: ko\n" if korean else ""
    about += f"pipeline_tag: {tag}\n" if tag else ""
    return f"""---
library_name: malmoi
{about}tags: [{", ".join(dict.fromkeys(("malmoi", model_type)))}]
---
# A {model_type} model of {count_parameters(network):,} parameters

{kind} `transformers` opens this folder too.
{BOTH_READINGS if both else ""}
| depth | width | heads | context | vocabulary | attention |
|---|---|---|---|---|---|
| {c.depth} | {c.width} | {c.heads} | {c.context} | {c.vocab} | {", ".join(c.attention)} |

Heads: {", ".join(network.heads) or "none (a bare trunk)"}.

```python
import malmoi
{use}
```
"""
