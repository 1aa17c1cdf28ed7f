"""The Transformer of 2017: its sizes, its decoder's cache, and Marian as an oracle."""

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from malmoi.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from malmoi.errors import UsageError
from malmoi.model import KVCache, Network, count_parameters, initialise, preset
from malmoi.model.families import transformer

TINY = dict(vocab=40, context=24, width=16, heads=2, depth=2, encoder_depth=3, hidden=32)


@pytest.mark.parametrize(("name", "millions"), [("base", 65), ("big", 213)])
def test_the_sizes_are_the_papers(name: str, millions: int) -> None:
    """Table 3 rounds; its vocabulary is "about 37,000"."""
    with torch.device("meta"):
        network = Network(preset(f"transformer-{name}"), {"lm": 0})
    assert count_parameters(network) / 1e6 == pytest.approx(millions, rel=0.03)


def tiny() -> Network:
    return initialise(Network(transformer(**TINY), {"lm": 0}), seed=0).eval()


@torch.no_grad()
def test_token_by_token_from_memory_is_the_whole_pass_and_padding_changes_nothing() -> None:
    network = tiny()
    source = torch.randint(0, 40, (2, 7))
    target = torch.randint(0, 40, (2, 5))
    keep = torch.arange(7) < torch.tensor([[7], [4]])
    whole = network(target, source=source, source_keep=keep)["lm"]
    memory = network.trunk.encode(source, keep)
    cache = KVCache(network.config, 2, 5, dtype=network.dtype, device="cpu")
    steps = [network(target[:, i : i + 1], memory=memory, cache=cache)["lm"] for i in range(5)]
    torch.testing.assert_close(torch.cat(steps, 1), whole)
    alone = network(target[1:], source=source[1:, :4])["lm"]
    torch.testing.assert_close(alone, whole[1:])


@torch.no_grad()
def test_it_equals_torchs_own_transformer() -> None:
    """nn.Transformer has the same blocks, without embeddings and head."""
    network = tiny()
    c = network.config
    oracle = torch.nn.Transformer(
        c.width, c.heads, c.encoder_depth, c.depth, c.mlp_width, dropout=0.0, batch_first=True
    ).eval()
    oracle.encoder.norm = oracle.decoder.norm = None  # the paper has no norm after the stacks
    trunk = network.trunk
    for ours, theirs in [
        *zip(trunk.encoder.blocks, oracle.encoder.layers, strict=True),
        *zip(trunk.blocks, oracle.decoder.layers, strict=True),
    ]:
        theirs.self_attn.in_proj_weight.copy_(ours.attend.qkv.weight)
        theirs.self_attn.in_proj_bias.copy_(ours.attend.qkv.bias)
        theirs.self_attn.out_proj.load_state_dict(ours.attend.out.state_dict())
        theirs.linear1.load_state_dict(ours.mlp.up.state_dict())
        theirs.linear2.load_state_dict(ours.mlp.down.state_dict())
        if hasattr(ours, "cross"):
            weights = (ours.cross.query.weight, ours.cross.key_value.weight)
            biases = (ours.cross.query.bias, ours.cross.key_value.bias)
            theirs.multihead_attn.in_proj_weight.copy_(torch.cat(weights))
            theirs.multihead_attn.in_proj_bias.copy_(torch.cat(biases))
            theirs.multihead_attn.out_proj.load_state_dict(ours.cross.out.state_dict())
    source, target = torch.randint(0, 40, (3, 6)), torch.randint(0, 40, (3, 5))
    places = torch.arange(6)[None]
    ahead = torch.nn.Transformer.generate_square_subsequent_mask(5)
    expected = oracle(
        trunk.embed(source, places, None),
        trunk.embed(target, places[:, :5], None),
        tgt_mask=ahead,
        tgt_is_causal=True,
    )
    torch.testing.assert_close(network.hidden(target, source=source), expected)


def marian(**changes: object) -> transformers.MarianMTModel:
    config = transformers.MarianConfig(
        **dict(
            vocab_size=40, d_model=16, encoder_layers=2, decoder_layers=3,
            encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=24,
            decoder_ffn_dim=24, max_position_embeddings=24, pad_token_id=39, eos_token_id=0,
            decoder_start_token_id=39, forced_eos_token_id=None, activation_function="swish",
            scale_embedding=True,
        )
        | changes
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.MarianMTModel(config).eval()
    for parameter in (p for p in model.parameters() if p.requires_grad):
        torch.nn.init.normal_(parameter, std=0.3)
    model.final_logits_bias.normal_()
    return model


@torch.no_grad()
def test_a_marian_of_transformers_gives_its_logits_and_goes_back_bit_exact(tmp_path: Path) -> None:
    theirs = marian()
    theirs.save_pretrained(tmp_path / "theirs")
    ours = read_checkpoint(tmp_path / "theirs")
    assert ours.notes == ()
    source, target = torch.randint(0, 39, (2, 7)), torch.randint(0, 39, (2, 5))
    keep = torch.arange(7) < torch.tensor([[7], [4]])
    expected = theirs(input_ids=source, attention_mask=keep.long(), decoder_input_ids=target).logits
    found = ours.network(target, source=source, source_keep=keep)["lm"]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    write_checkpoint(ours, tmp_path / "ours")
    before, after = (load_file(tmp_path / n / "model.safetensors") for n in ("theirs", "ours"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@torch.no_grad()
def test_transformers_opens_ours_with_the_same_logits(tmp_path: Path) -> None:
    network = tiny()
    write_checkpoint(Checkpoint(network), tmp_path)
    theirs, told = transformers.AutoModelForSeq2SeqLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not any(told.values())
    source, target = torch.randint(0, 40, (2, 7)), torch.randint(0, 40, (2, 5))
    expected = theirs.eval()(input_ids=source, decoder_input_ids=target).logits
    found = network(target, source=source)["lm"]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("changes", [{"groups": 1}, {"segments": 2}, {"skip_connections": True}])
def test_unsupported_encoder_decoders_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="an encoder-decoder cannot be combined with"):
        transformer(**TINY, **changes)
