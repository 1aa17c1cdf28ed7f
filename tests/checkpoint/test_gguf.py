"""GGUF files: the weights and the tokens of the model they were made from; damage is one clear
sentence.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import sentencepiece
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer as Rust, models, pre_tokenizers, trainers

import malmoi
from malmoi.checkpoint.gguf import GGUFFile
from malmoi.errors import MalmoiError
from malmoi.tokenizer.gguf import PRE_TOKENIZERS, read_vocabulary

TEXT = (
    'The King said: "don\'t go!" 12345 times, naïve café; 나는 학교에 간다.\n\n  Twice  the   '
    "spaces\tand a tab. "
)
TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
SPECIALS = ["<|end|>", "<|start|>"]


def byte_vocabulary() -> Rust:
    """A small byte-level BPE learnt from the text above."""
    rust = Rust(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    rust.train_from_iterator(
        [TEXT] * 5,
        trainers.BpeTrainer(vocab_size=320, special_tokens=SPECIALS, initial_alphabet=alphabet),
    )
    return rust


def vocabulary_metadata(pre: str = "gpt-2") -> dict[str, Any]:
    model = json.loads(byte_vocabulary().to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIALS else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.chat_template": TEMPLATE,
    }


def tiny(**changes: Any) -> transformers.LlamaForCausalLM:
    sizes = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    sizes |= dict(
        intermediate_size=96, vocab_size=320, max_position_embeddings=128, rms_norm_eps=1e-5
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(sizes | changes))).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def neighbours(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's own order of the rows of queries and keys (its `permute`)."""
    return (
        weight.reshape(heads, 2, len(weight) // heads // 2, *weight.shape[1:])
        .swapaxes(1, 2)
        .reshape(weight.shape)
    )


def write_file(
    path: Path,
    model: transformers.LlamaForCausalLM,
    kind: Kind,
    tensors: dict[str, np.ndarray] | None = None,
) -> Path:
    """A GGUF file as llama.cpp's converter writes it."""
    c, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    for name, value in vocabulary_metadata().items():
        (writer.add_array if isinstance(value, list) else writer.add_key_value)(
            *_typed(name, value)
        )
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, c.num_hidden_layers)
    heads = {"attn_q": c.num_attention_heads, "attn_k": c.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        full = names.get_name(name, try_suffixes=(".weight",))
        ours = full.split(".")[-2]
        weight = tensor.numpy()
        weight = neighbours(weight, heads[ours]) if ours in heads else weight
        packed = kind if weight.ndim > 1 else Kind.F32
        writer.add_tensor(full, gguf.quants.quantize(weight, packed), raw_dtype=packed)
    for name, weight in (tensors or {}).items():
        writer.add_tensor(name, weight)
    return finish(writer, path)


def finish(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _typed(name: str, value: Any) -> tuple[Any, ...]:
    kinds = {
        str: gguf.GGUFValueType.STRING,
        bool: gguf.GGUFValueType.BOOL,
        int: gguf.GGUFValueType.UINT32,
    }
    return (name, value) if isinstance(value, list) else (name, value, kinds[type(value)])


BITS = {
    Kind.F32: 24,
    Kind.F16: 11,
    Kind.BF16: 8,
    Kind.Q8_0: 8,
    Kind.Q5_1: 5,
    Kind.Q5_0: 5,
    Kind.Q4_1: 4,
    Kind.Q4_0: 4,
}


@pytest.mark.parametrize("tied", [True, False])
@torch.no_grad()
def test_a_file_gives_the_logits_of_its_model_and_a_folder_that_transformers_opens(
    tied: bool, tmp_path: Path
) -> None:
    model = tiny(tie_word_embeddings=tied)
    ours = malmoi.load(write_file(tmp_path / "tiny.gguf", model, Kind.F32), device="cpu")
    tokens = torch.randint(0, 320, (1, 50))
    torch.testing.assert_close(ours.network(tokens)["lm"], model(tokens).logits, rtol=0, atol=1e-5)
    assert ours.notes == ()
    ours.save(tmp_path / "folder")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    torch.testing.assert_close(theirs(tokens).logits, model(tokens).logits, rtol=0, atol=1e-5)
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "folder")
    assert (
        words(TEXT).input_ids
        == ours.tokenizer.encode(TEXT).tokens
        == byte_vocabulary().encode(TEXT).ids
    )
    assert words.chat_template == ours.tokenizer.chat_template == TEMPLATE
    assert (words.bos_token, words.eos_token) == ("<|start|>", "<|end|>")
    assert ours.generate(TEXT, max_new_tokens=5, temperature=0) == malmoi.load(
        tmp_path / "folder", device="cpu"
    ).generate(TEXT, max_new_tokens=5, temperature=0)


@pytest.mark.parametrize("kind", BITS)
def test_packed_weights_round_trip_within_their_precision(kind: Kind, tmp_path: Path) -> None:
    model = tiny()
    ours = malmoi.load(write_file(tmp_path / "tiny.gguf", model, kind), device="cpu")
    query = model.state_dict()["model.layers.1.self_attn.q_proj.weight"]
    found = ours.network.trunk.blocks[1].attend.qkv.weight[: len(query)]
    assert (found - query).abs().max() <= 2 * query.abs().max() / (2 ** BITS[kind] - 1)  # one step
    want = gguf.quants.dequantize(gguf.quants.quantize(neighbours(query.numpy(), 4), kind), kind)
    assert torch.equal(found.contiguous(), torch.from_numpy(neighbours_back(want, 4)))


def neighbours_back(weight: np.ndarray, heads: int) -> np.ndarray:
    order = neighbours(np.arange(len(weight)), heads)
    return weight[np.argsort(order)]


@pytest.mark.parametrize(
    "kind", [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_XS, Kind.IQ4_NL]
)
def test_k_quants_are_unpacked(kind: Kind, tmp_path: Path) -> None:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    packed = np.random.default_rng(0).integers(0, 60, (3, 256 // block * size), np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_tensor("x", packed, raw_dtype=kind)
    found = GGUFFile(finish(writer, tmp_path / "one.gguf")).tensor("x")
    assert found.shape == (3, 256)
    np.testing.assert_array_equal(found.numpy(), gguf.quants.dequantize(packed, kind))
    assert found.unique().numel() > 5


def test_llama3_scaling_is_recognised_from_its_factors(tmp_path: Path) -> None:
    rope = dict(
        rope_type="llama3",
        rope_theta=500_000.0,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )
    model = tiny(rope_parameters=rope | dict(original_max_position_embeddings=8192))
    plain = 500_000.0 ** (-torch.arange(0, 16, 2) / 16)
    factors = {"rope_freqs.weight": (plain / model.model.rotary_emb.inv_freq).numpy()}
    path = write_file(tmp_path / "tiny.gguf", model, Kind.F32, tensors=factors)
    ours = malmoi.load(path, device="cpu")
    assert ours.config.rotary_scaling == "llama3:8,1,4,8192"
    tokens = torch.randint(0, 320, (1, 100))
    torch.testing.assert_close(ours.network(tokens)["lm"], model(tokens).logits, rtol=0, atol=1e-5)


# ------------------------------------------------------------------ vocabularies


@pytest.mark.parametrize("cut", PRE_TOKENIZERS)
@given(text=st.text(st.sampled_from("ab Z'st.,!0129é한글\n\t ㄱ①Ⅷ²+$~"), max_size=40))
@settings(max_examples=40, deadline=None)
def test_every_pre_tokenizer_keeps_every_text(cut: str, text: str) -> None:
    tokenizer = VOCABULARIES.setdefault(cut, read_vocabulary(vocabulary_metadata(cut), "here"))
    assert tokenizer.decode(tokenizer.encode(text).tokens) == text


VOCABULARIES: dict[str, malmoi.Tokenizer] = {}


def test_pre_tokenizers_match_the_models_they_are_named_after() -> None:
    def words(cut: str) -> list[str]:
        return [
            piece.replace("Ġ", " ")
            for piece, _ in PRE_TOKENIZERS[cut].pre_tokenize_str("I've 12345 o'clock!!")
        ]

    assert words("gpt-2") == ["I", "'ve", " 12345", " o", "'", "clock", "!!"]
    assert words("smollm") == ["I", "'ve", " ", "1", "2", "3", "4", "5", " o", "'", "clock", "!!"]
    assert words("llama-bpe") == ["I", "'ve", " ", "123", "45", " o", "'clock", "!!"]
    assert words("qwen2") == ["I", "'ve", " ", "1", "2", "3", "4", "5", " o", "'clock", "!!"]


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> sentencepiece.SentencePieceProcessor:
    """A vocabulary as LLaMA's: SentencePiece's BPE with bytes for what it does not know."""
    folder = tmp_path_factory.mktemp("pieces")
    (folder / "text.txt").write_text(
        "\n".join([*TEXT.split("\n"), "the cat and the king sat there", "in the end"] * 20)
    )
    settings = dict(
        model_type="bpe", vocab_size=380, byte_fallback=True, normalization_rule_name="identity"
    )
    settings |= dict(remove_extra_whitespaces=False, minloglevel=2, character_coverage=0.98)
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"), model_prefix=str(folder / "m"), **settings
    )
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "m.model"))


def test_sentencepiece_vocabularies_give_sentencepieces_tokens(
    pieces: sentencepiece.SentencePieceProcessor,
) -> None:
    count = range(pieces.get_piece_size())
    kinds = [
        2 if pieces.is_unknown(i) else 3 if pieces.is_control(i) else 6 if pieces.is_byte(i) else 1
        for i in count
    ]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [pieces.id_to_piece(i) for i in count],
        "tokenizer.ggml.scores": [pieces.get_score(i) for i in count],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    ours = read_vocabulary(metadata, "here")
    for text in (TEXT.strip(), "the king", " in the  there cat", "漢字 and café", "a\nb"):
        assert ours.encode(text).tokens == [1, *pieces.encode(text)], text
        assert ours.decode(ours.encode(text).tokens) == text


# ------------------------------------------------------------------ damage


def replace(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    return lambda data: data.replace(old, new, 1)


def announce(count: int) -> Callable[[bytes], bytes]:
    """The first list of the file claims to have this many entries."""

    def change(data: bytes) -> bytes:
        at = data.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens") + 8
        return data[:at] + count.to_bytes(8, "little") + data[at + 8 :]

    return change


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda data: b"", "is empty"),
        (lambda data: b"GGML" + data[4:], "does not begin with GGUF"),
        (lambda data: data[:4] + (99).to_bytes(4, "little") + data[8:], "version 99"),
        (
            lambda data: data[:8] + (2**60).to_bytes(8, "little") + data[16:],
            "declares 1152921504606846976 tensors",
        ),
        (
            lambda data: data[:16] + (2**60).to_bytes(8, "little") + data[24:],
            "declares 1152921504606846976 metadata",
        ),
        (announce(2**60), "declares 1152921504606846976 values"),
        (announce(2**63), "declares"),
        (lambda data: data[:-100], "ends at byte"),
        (lambda data: data[:3000], "cut short or damaged"),
        (replace(b"llama.block_count", b"llama.block_cound"), "does not say llama.block_count"),
        (replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0qwen9"), "kind 'qwen9'"),
        (replace(b"gpt-2", b"gpt-9"), "splits text by the rule 'gpt-9'.*Did you mean 'gpt-2'"),
        (
            replace(b"\x04\0\0\0\0\0\0\0gpt2", b"\x04\0\0\0\0\0\0\0bert"),
            "vocabulary of type 'bert'",
        ),
        (
            replace(b"output_norm.weight", b"output_gnom.weight"),
            "'output_gnom.weight', which Malmoi's llama does not",
        ),
    ],
)
def test_a_damaged_file_is_one_clear_sentence(damage: Any, sentence: str, tmp_path: Path) -> None:
    path = write_file(tmp_path / "tiny.gguf", tiny(), Kind.Q8_0)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(MalmoiError, match=sentence):
        malmoi.load(path, device="cpu")


@given(at=st.integers(0, 9000), byte=st.integers(0, 255), cut=st.none() | st.integers(24, 100_000))
@settings(max_examples=60, deadline=None)
def test_a_changed_byte_is_an_error_at_worst(
    at: int, byte: int, cut: int | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "broken.gguf"
    if not WHOLE:
        WHOLE["data"] = write_file(path, tiny(), Kind.Q8_0).read_bytes()
    data = bytearray(WHOLE["data"])
    data[at] = byte
    path.unlink()  # a traceback may still look at the last one, which is mapped, not read
    path.write_bytes(data[:cut])
    with suppress(MalmoiError):
        assert malmoi.load(path, device="cpu").config.depth == 2


WHOLE: dict[str, bytes] = {}
