"""Using a model gives what transformers gives, whatever the batch, and text comes out whole."""

import math
import subprocess
import sys
import unicodedata
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from hypothesis import given, settings, strategies as st

from malmoi.checkpoint import Checkpoint
from malmoi.errors import UsageError
from malmoi.inference import Model, load
from malmoi.inference.engine import Engine
from malmoi.inference.generation.detokenize import (
    ByteDetokenizer,
    StopFilter,
    TextWriter,
    detokenizer,
)
from malmoi.inference.generation.generate import Decoding
from malmoi.inference.generation.options import GenerationConfig, Sampling, stop_strings
from malmoi.inference.generation.sampling import (
    SAMPLING_RULES,
    TokenHistory,
    apply_rules,
    new_sequences,
    random_generators,
    sample_token,
)
from malmoi.inference.score import ScoredRow, score_windows, token_logprobs
from malmoi.inference.spans import _spans, merge_tags
from malmoi.kernels.fast_argmax import FastArgmax
from malmoi.model import Network, initialise
from malmoi.model.families import bert, gpt2
from malmoi.tokenizer import Encoding, Tokenizer, train_tokenizer
from malmoi.tokenizer.windows import ContextWindow
from random_models import random_gpt2

TEXTS = [
    "the state of the union is strong",
    "나는 오늘 학교에 갔다. 하늘이 맑다.",
    "a small model of small words",
] * 4
PROMPTS = ["the state", "나는 오늘 학교에 갔다", "a", "small words of the union is"]
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def bytes_tokenizer() -> Tokenizer:
    return train_tokenizer(TEXTS, kind="byte-bpe", vocab=320)


@pytest.fixture(scope="session")
def words_tokenizer() -> Tokenizer:
    return train_tokenizer(TEXTS, kind="wordpiece", vocab=120)


def saved(theirs: hf.PreTrainedModel, tokenizer: Tokenizer, folder: Path) -> Model:
    theirs.save_pretrained(folder)
    tokenizer.save(folder)
    return load(folder, device="cpu")


@pytest.fixture(scope="session")
def gpt2_pair(
    bytes_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> tuple[hf.PreTrainedModel, Model]:
    return random_gpt2(bytes_tokenizer, tmp_path_factory.mktemp("gpt2"), context=64)


@pytest.fixture(scope="session")
def gpt1_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[hf.PreTrainedModel, Model]:
    torch.manual_seed(1)
    tokenizer = train_tokenizer(TEXTS, kind="bpe", vocab=150)
    config = hf.OpenAIGPTConfig(
        vocab_size=tokenizer.vocab_size,
        n_positions=48,
        n_embd=32,
        n_layer=2,
        n_head=4,
        initializer_range=0.3,
    )
    theirs = hf.OpenAIGPTLMHeadModel(config).eval()
    return theirs, saved(theirs, tokenizer, tmp_path_factory.mktemp("gpt1"))


@pytest.fixture(scope="session")
def bert_pair(
    words_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> tuple[hf.PreTrainedModel, Model]:
    torch.manual_seed(2)
    config = small_bert(words_tokenizer)
    theirs = hf.BertForMaskedLM(config).eval()
    return theirs, saved(theirs, words_tokenizer, tmp_path_factory.mktemp("bert"))


def small_bert(tokenizer: Tokenizer, **more: object) -> hf.BertConfig:
    return hf.BertConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=40,
        initializer_range=0.3,
        **more,
    )


def tokens_of(model: Model, prompts: list[list[int]], config: GenerationConfig) -> list[list[int]]:
    """What is decoded, as tokens, each row to its own end."""
    wanted = new_sequences(prompts, config, model.config.context)
    decoding = Decoding(model.network, wanted)
    rows: list[list[int]] = [[] for _ in wanted]
    while decoding.running:
        for i, tokens in decoding.step().items():
            rows[i] += tokens
        over = (
            i
            for i, row in enumerate(rows)
            if len(row) == wanted[i].limit or row[-1] in config.end_tokens
        )
        decoding.drop(over)
    return rows


# ------------------------------------------------------------------ decoding against transformers


@torch.inference_mode()
def test_greedy_decoding_of_a_left_padded_batch_is_token_identical(gpt2_pair) -> None:
    theirs, ours = gpt2_pair
    prompts = [ours.tokenizer.encode(text).tokens for text in PROMPTS]
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    expected = theirs.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=20,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )[:, width:].tolist()
    assert tokens_of(ours, prompts, GenerationConfig(20, Sampling(temperature=0))) == expected
    assert len({tuple(row) for row in expected}) == len(PROMPTS)  # random, but not the same for all


@torch.inference_mode()
def test_gpt1_decodes_as_transformers_does(gpt1_pair) -> None:
    theirs, ours = gpt1_pair
    prompts = [ours.tokenizer.encode(text).tokens for text in PROMPTS]
    one = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 12}
    expected = [theirs.generate(torch.tensor([p]), **one)[0, len(p) :].tolist() for p in prompts]
    assert tokens_of(ours, prompts, GenerationConfig(12, Sampling(temperature=0))) == expected


@torch.inference_mode()
def test_greedy_text_ends_at_eos_and_equals_transformers(gpt2_pair) -> None:
    theirs, ours = gpt2_pair
    ids = torch.tensor([ours.tokenizer.encode("the state").tokens])
    wanted = theirs.generate(
        ids, max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, ids.size(1) :]
    end = wanted[7].item()
    wanted = wanted[: wanted.tolist().index(end)]
    ours.checkpoint.generation["eos_token_id"] = [end]
    try:
        text = ours.generate("the state", max_new_tokens=30, temperature=0)
    finally:
        del ours.checkpoint.generation["eos_token_id"]
    assert text == ours.tokenizer.decode(wanted).removesuffix("\ufffd")


def test_rows_that_end_early_leave_and_change_nothing(gpt2_pair) -> None:
    _, ours = gpt2_pair
    prompts = [ours.tokenizer.encode(text).tokens for text in PROMPTS * 2]
    free = tokens_of(ours, prompts, GenerationConfig(25, Sampling(temperature=0)))
    ends = frozenset({free[0][3], free[1][9], free[2][15]})
    cut = [row[: next((k + 1 for k, t in enumerate(row) if t in ends), len(row))] for row in free]
    assert (
        tokens_of(ours, prompts, GenerationConfig(25, Sampling(temperature=0), end_tokens=ends))
        == cut
    )
    assert len({len(row) for row in cut}) > 2


def test_a_short_prompt_beside_a_long_one_may_still_fill_the_context(gpt2_pair) -> None:
    _, ours = gpt2_pair
    long, short = list(range(10, 70)), [5, 6]
    config = GenerationConfig(100, Sampling(temperature=0))
    together = tokens_of(ours, [long, short], config)
    assert together == [tokens_of(ours, [long], config)[0], tokens_of(ours, [short], config)[0]]
    assert [len(row) for row in together] == [4, 62]


@pytest.mark.parametrize("attention", [("causal", "causal & local:4"), ("causal & fixed:8,2",)])
def test_sparse_patterns_decode_as_the_full_forward(
    bytes_tokenizer: Tokenizer, attention: tuple[str, ...]
) -> None:
    config = gpt2(
        vocab=300, context=40, width=32, depth=2, heads=4, attention=attention, init_std=0.3
    )
    ours = Model(Checkpoint(initialise(Network(config, {"lm": 0}), 0), bytes_tokenizer))
    prompts = [[1, 2, 3, 4, 5, 6, 7], [9, 8]]
    for prompt, row in zip(
        prompts,
        tokens_of(ours, prompts, GenerationConfig(15, Sampling(temperature=0))),
        strict=True,
    ):
        for k, token in enumerate(row):
            shown = torch.tensor([prompt + row[:k]])
            assert ours.network(shown)["lm"][0, -1].argmax() == token


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # where the processor emulates bf16
@pytest.mark.parametrize(("scale", "shift"), [(0.02, 0.0), (1.0, 0.0), (0.1, 40.0)])
def test_the_fast_argmax_is_exact(scale: float, shift: float) -> None:
    config = gpt2(vocab=5000, context=8, width=96, depth=1, heads=2, init_std=scale)
    head = initialise(Network(config, {"lm": 0}), 0).heads["lm"]
    with torch.no_grad():
        head.weight[:, 0] -= shift * scale  # a part that all scores share, as in GPT-2's
        head.weight[4000] = head.weight[17]  # a tie, which the order of summing decides
        features = torch.randn(64, 96, generator=torch.Generator().manual_seed(1)) * 5
        features[0] = head.weight[17]
    screen = FastArgmax(head)
    with torch.inference_mode():
        expected = head.scores(features).argmax(-1)
        together = screen.argmax(features[:16])
        alone = torch.cat([screen.argmax(row[None]) for row in features])
        for found, best in ((together, expected[:16]), (alone, expected)):
            assert torch.equal(found.where(found != 4000, 17), best.where(best != 4000, 17))
    assert screen.is_current
    with torch.no_grad():
        head.weight.mul_(2)
    assert not screen.is_current


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_decoding_with_the_fast_argmax_changes_no_token(gpt2_pair) -> None:
    _, ours = gpt2_pair
    prompts = [ours.tokenizer.encode(text).tokens for text in PROMPTS]
    config = GenerationConfig(20, Sampling(temperature=0))
    screen = FastArgmax(ours.network.heads["lm"])
    decoding = Decoding(ours.network, new_sequences(prompts, config, 64), screen)
    steps = [decoding.step() for _ in range(20)]
    assert [
        [token for step in steps for token in step[i]] for i in range(len(prompts))
    ] == tokens_of(ours, prompts, config)


# ------------------------------------------------------------------ sampling


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from([0.3, 0.8, 1.0, 1.7]),
    st.sampled_from([None, 1, 3, 50]),
    st.sampled_from([None, 0.05, 0.5, 0.9, 1.0]),
    st.sampled_from([1.0, 1.3, 0.7]),
    st.sampled_from([None, 0.02, 0.3]),
)
def test_rules_give_the_distribution_of_transformers(
    seed, temperature, top_k, top_p, penalty, min_p
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, 40, generator=generator) * 4
    ids = torch.randint(0, 40, (2, 6), generator=generator)
    seen = torch.zeros(2, 40, dtype=torch.bool).scatter(1, ids, True)
    bias = {int(ids[0, 0]): 3.5, 7: -100.0}
    theirs = {(token,): value for token, value in bias.items()}
    processors = hf.LogitsProcessorList([hf.SequenceBiasLogitsProcessor(theirs)])
    processors += [hf.RepetitionPenaltyLogitsProcessor(penalty)] if penalty != 1 else []
    processors += [hf.TemperatureLogitsWarper(temperature)]
    processors += [hf.TopKLogitsWarper(top_k)] if top_k else []
    processors += [hf.TopPLogitsWarper(top_p)] if top_p else []
    processors += [hf.MinPLogitsWarper(min_p)] if min_p else []
    expected = processors(ids, logits.clone())
    sampling = Sampling(temperature, top_k, top_p, penalty, min_p, logit_bias=bias)
    ours = apply_rules(sampling, logits, TokenHistory(seen, seen.float()))
    assert torch.equal(ours, expected)


def test_draws_follow_the_distribution_and_never_take_the_impossible() -> None:
    logits = torch.tensor([float("-inf"), 0.0, 1.0, float("-inf"), 2.0, float("-inf")])
    drawn = sample_token(logits.expand(6000, -1), random_generators(0, 6000))
    share = torch.bincount(drawn, minlength=6) / 6000
    assert torch.allclose(share, logits.softmax(-1), atol=0.025)
    assert not share[torch.isinf(logits)].any()


def test_the_same_seed_gives_the_same_text_whatever_the_batch(gpt2_pair) -> None:
    _, ours = gpt2_pair
    options = {"max_new_tokens": 12, "temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.2}
    alone = [ours.generate(prompt, seed=3, **options) for prompt in PROMPTS]
    assert ours.generate(PROMPTS, seed=3, **options) == alone
    several = ours.generate(PROMPTS[0], seed=3, n=4, **options)
    assert several == [ours.generate(PROMPTS[0], seed=3 + i, **options) for i in range(4)]
    assert len(set(several)) > 1
    assert ours.generate(PROMPTS, seed=3, n=2, **options)[0] == several[:2]
    assert ours.generate(PROMPTS[0], **options) != ours.generate(PROMPTS[0], **options)
    assert ours.generate([], **options) == []


def test_more_prompts_than_a_batch_come_back_in_order(gpt2_pair) -> None:
    _, ours = gpt2_pair
    prompts = [f"{'small ' * (i % 5)}{i}" for i in range(40)]
    texts = ours.generate(prompts, max_new_tokens=2, temperature=0)
    assert texts == [ours.generate(prompt, max_new_tokens=2, temperature=0) for prompt in prompts]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"n": 0}, "n must"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"stop": ("",)}, "stop"),
        ({"temprature": 1.0}, "'temperature'"),
    ],
)
def test_impossible_settings_are_refused_before_any_work(
    gpt2_pair, options: dict, words: str
) -> None:
    _, ours = gpt2_pair
    with pytest.raises(UsageError, match=words):
        ours.generate("the", **options)
    with pytest.raises(UsageError, match=words):
        ours.stream("the", **options)


def test_prompts_that_cannot_be_continued(gpt2_pair, gpt1_pair) -> None:
    _, ours = gpt2_pair
    with pytest.raises(UsageError, match=r"\d\d tokens .* context of 64"):
        ours.generate("state union " * 60)
    with pytest.raises(UsageError, match="context of 64"):
        ours.stream("state union " * 60)  # before the first piece is asked for
    with pytest.raises(UsageError, match="empty"):
        gpt1_pair[1].generate("")
    assert isinstance(ours.generate("", max_new_tokens=3), str)  # starts from <|endoftext|>
    with pytest.raises(UsageError, match="a text or a list"):
        ours.generate([3])


# ------------------------------------------------------------------ text as it comes


@pytest.mark.parametrize("pair", ["gpt2_pair", "gpt1_pair"])
@pytest.mark.parametrize("seed", range(4))
def test_a_stream_joined_is_what_generate_returns(
    pair: str, seed: int, request: pytest.FixtureRequest
) -> None:
    ours = request.getfixturevalue(pair)[1]
    for stop in [(), ("e",), ("the", "\ufffd", " s")]:
        options = {"max_new_tokens": 30, "seed": seed, "stop": stop}
        text = ours.generate("the state of", **options)
        assert "".join(ours.stream("the state of", **options)) == text
        assert not any(s in text for s in stop)


@pytest.mark.parametrize("pair", ["gpt2_pair", "gpt1_pair", "bert_pair"])
def test_hidden_states_and_attention_are_those_of_transformers(
    pair: str, request: pytest.FixtureRequest
) -> None:
    theirs, ours = request.getfixturevalue(pair)
    eager = type(theirs)._from_config(theirs.config, attn_implementation="eager").eval()
    eager.load_state_dict(theirs.state_dict())
    asked = ("the state", "small words") if pair == "bert_pair" else ("the state of the union",)
    encoding = ours.tokenizer.encode(*asked)
    inputs = {"input_ids": torch.tensor([encoding.tokens])}
    if pair == "bert_pair":
        inputs["token_type_ids"] = torch.tensor([encoding.segments])
    with torch.no_grad():
        found = eager(**inputs, output_hidden_states=True, output_attentions=True)
    hidden = torch.stack(found.hidden_states)[:, 0].numpy()
    assert np.abs(ours.hidden_states(*asked) - hidden).max() <= 1e-5 * np.abs(hidden).max()
    attention = torch.stack(found.attentions)[:, 0].numpy()
    assert np.abs(ours.attention(*asked) - attention).max() <= 1e-5


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=40))
def test_byte_tokens_appear_as_whole_characters(bytes_tokenizer: Tokenizer, text: str) -> None:
    spell = ByteDetokenizer(bytes_tokenizer)
    pieces = [spell.push(token) for token in bytes_tokenizer.encode(text).tokens]
    assert "".join(pieces) == unicodedata.normalize("NFC", text)  # learnt vocabularies compose
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


def test_half_a_syllable_is_never_shown(bytes_tokenizer: Tokenizer) -> None:
    tokens = bytes_tokenizer.encode("뷁").tokens  # unseen in training: three bytes
    assert len(tokens) == 3
    spell = ByteDetokenizer(bytes_tokenizer)
    assert [spell.push(token) for token in tokens] == ["", "", "뷁"]
    cut = TextWriter(ByteDetokenizer(bytes_tokenizer), (), frozenset(), limit=2)
    assert [cut.push(token) for token in tokens[:2]] == ["", ""]


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "char", "byte-bpe"])
def test_every_kind_of_tokenizer_streams_what_it_decodes(kind: str) -> None:
    tokenizer = train_tokenizer(TEXTS, kind=kind, vocab=300)
    for text in TEXTS[:3]:
        tokens = tokenizer.encode(text, specials=False).tokens
        spell = detokenizer(tokenizer, tokens[:2])
        shown = tokenizer.decode(tokens[:2]) + "".join(spell.push(token) for token in tokens[2:])
        # whose prompt may end within a character
        assert shown == tokenizer.decode(tokens) or kind == "byte-bpe"


@settings(max_examples=200, deadline=None)
@given(
    st.text("ab\n", max_size=12),
    st.lists(st.text("ab\n", min_size=1, max_size=3), max_size=3),
    st.integers(1, 4),
)
def test_stop_strings_never_leak_wherever_they_are_cut(
    text: str, stops: list[str], size: int
) -> None:
    stream, shown = StopFilter(stop_strings(stops)), ""
    for i in range(0, len(text), size):
        shown += stream.push(text[i : i + size])
        if stream.found:
            break
    shown += stream.flush()
    complete = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    assert shown == (text[: min(complete)[1]] if complete else text)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=12), st.integers(1, 12), st.integers(0, 1), st.integers(1, 5))
def test_tokens_read_together_give_the_text_of_each_alone(
    bytes_tokenizer: Tokenizer, text: str, limit: int, kinds: int, size: int
) -> None:
    """Whichever token ends it, the limit or one in the middle."""
    tokens = bytes_tokenizer.encode(text + "뷁").tokens
    ends = frozenset(tokens[3:4]) if kinds else frozenset()
    alone, together = (
        TextWriter(ByteDetokenizer(bytes_tokenizer), (), ends, limit) for _ in range(2)
    )
    shown = "".join(alone.push(token) for token in tokens if not alone.done)
    parts = [together.push_all(tokens[i : i + size], None) for i in range(0, len(tokens), size)]
    assert "".join(part for part, _ in parts) == shown
    assert (together.left, together.ended, together.done) == (alone.left, alone.ended, alone.done)


# ------------------------------------------------------------------ scores


def their_logprobs(theirs: hf.PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logprobs = theirs(torch.tensor([tokens])).logits[0].log_softmax(-1)
    return logprobs[:-1].gather(1, torch.tensor(tokens[1:])[:, None]).squeeze(1)


def test_scores_equal_transformers_alone_and_in_lists(gpt2_pair) -> None:
    theirs, ours = gpt2_pair
    context, choices = "the state of", [" the union", " small words of the day", " 하늘"]
    scores = ours.score(context, choices)
    for score, choice in zip(scores, choices, strict=True):
        tokens = ours.tokenizer.encode(context + choice).tokens
        expected = their_logprobs(theirs, tokens)[-len(score.tokens) :]
        assert score.token_logprobs == pytest.approx(expected.tolist(), abs=1e-5)
        assert score.logprob == pytest.approx(expected.sum().item(), abs=1e-4)
        assert ours.score(context, choice).logprob == pytest.approx(score.logprob, abs=1e-5)
    assert ours.score([context, "a"], choices[:2])[0].logprob == pytest.approx(
        scores[0].logprob, abs=1e-5
    )


def test_a_score_knows_whether_greedy_decoding_would_write_it(gpt2_pair) -> None:
    _, ours = gpt2_pair
    prompt = ours.tokenizer.encode("the state").tokens
    best = tokens_of(ours, [prompt], GenerationConfig(5, Sampling(temperature=0)))[0]
    rows = [
        ScoredRow(prompt + best, len(prompt)),
        ScoredRow([*prompt, *best[:-1], best[-1] ^ 1], len(prompt)),
    ]
    assert [greedy for _, greedy in token_logprobs(ours.network, rows)] == [True, False]


def test_scores_that_cannot_be_computed_are_refused(gpt2_pair) -> None:
    _, ours = gpt2_pair
    with pytest.raises(UsageError, match="continuation is empty"):
        ours.score("a", "")
    with pytest.raises(UsageError, match=r"context of 64; use perplexity"):
        ours.score("a", " state union" * 60)
    long = ours.score("state union " * 60, "of")  # the oldest of the context goes
    assert long.logprob < 0
    assert ours.score("", "a").logprob < 0  # after <|endoftext|>
    with pytest.raises(UsageError, match="one continuation for each"):
        ours.score(["a", "b"], ["c"])


def test_perplexity_is_the_loss_of_transformers_and_slides(gpt2_pair) -> None:
    theirs, ours = gpt2_pair
    text = "the state of the union is strong"
    tokens = ours.tokenizer.encode(text).tokens
    assert ours.perplexity(text) == pytest.approx(
        math.exp(-their_logprobs(theirs, tokens).mean()), rel=1e-4
    )
    tokens = ours.tokenizer.encode(text * 20).tokens
    assert len(tokens) > 130
    logprobs, done = [], 1  # the recipe in transformers' guide on perplexity
    for begin in range(0, len(tokens), 20):
        end = min(begin + 64, len(tokens))
        logprobs += (
            their_logprobs(theirs, tokens[begin:end]).tolist()[-(end - done) :]
            if end > done
            else []
        )
        done = end
    assert ours.perplexity(text * 20, stride=20) == pytest.approx(
        math.exp(-np.mean(logprobs)), rel=1e-4
    )
    with pytest.raises(UsageError, match="two tokens"):
        ours.perplexity("a")
    with pytest.raises(UsageError, match="stride"):
        ours.perplexity(text, stride=64)


def test_bits_per_byte_counts_the_bytes_that_were_predicted(gpt2_pair) -> None:
    theirs, ours = gpt2_pair
    text = "나는 오늘 학교에 갔다."
    tokens = ours.tokenizer.encode(text).tokens
    given_bytes = len(text.encode()) - len(
        text[ours.tokenizer.encode(text).offsets[1][0] :].encode()
    )
    bits = -their_logprobs(theirs, tokens).sum().item() / math.log(2)
    assert ours.bits_per_byte(text) == pytest.approx(
        bits / (len(text.encode()) - given_bytes), rel=1e-4
    )


@given(st.integers(2, 60), st.integers(2, 12), st.data())
def test_windows_score_every_token_once_with_enough_before_it(
    length: int, context: int, data: st.DataObject
) -> None:
    stride = data.draw(st.integers(1, context - 1))
    rows = score_windows(list(range(length)), context, stride)
    assert [t for row in rows for t in row.tokens[row.first :]] == list(range(1, length))
    assert all(len(row.tokens) <= context for row in rows)
    assert all(row.first >= min(row.tokens[row.first], context - stride) for row in rows)


# ------------------------------------------------------------------ masked models, vectors, heads


def test_prompts_are_text_unless_control_tokens_are_asked_for(gpt2_pair, bert_pair) -> None:
    ours, end = gpt2_pair[1], gpt2_pair[1].tokenizer.specials.eos
    greedy = dict(max_new_tokens=6, temperature=0)
    named = "the state<|endoftext|>of"
    tokens = ours.tokenizer.encode(named, parse_special=True).tokens
    assert end in tokens
    with Engine(ours, slots=1) as engine:
        assert engine.submit(engine.job(tokens, **greedy)).result().text == ours.generate(
            named, parse_special=True, **greedy
        )
        assert end not in engine.job(named, **greedy).prompt
    assert "".join(ours.stream(named, **greedy)) == ours.generate(named, **greedy)
    bert = bert_pair[1]
    wanted = bert.logits("the [SEP] of")
    assert len(wanted) == len(bert.tokenizer.encode("the [SEP] of").tokens) > 5
    assert len(bert.logits("the [MASK] of")) == 5


def test_a_control_token_among_the_stop_strings_stops(gpt2_pair) -> None:
    endless = Model(replace(gpt2_pair[1].checkpoint, generation={"eos_token_id": []}))
    end = endless.tokenizer.specials.eos
    assert (
        endless._generation_config().end_tokens
        == endless._generation_config(stop="the").end_tokens
        == frozenset()
    )
    assert endless._generation_config(stop=("the", "<|endoftext|>")).end_tokens == {end}


@torch.inference_mode()
def test_fill_equals_transformers(bert_pair, words_tokenizer: Tokenizer) -> None:
    theirs, ours = bert_pair
    text = "나는 오늘 [MASK] 갔다."
    tokens = words_tokenizer.encode(text, parse_special=True).tokens
    expected = (
        theirs(torch.tensor([tokens]))
        .logits[0, tokens.index(words_tokenizer.specials.mask)]
        .softmax(-1)
    )
    found = ours.fill(text, top=3)
    assert [fill.probability for fill in found] == pytest.approx(
        expected.topk(3).values.tolist(), abs=1e-5
    )
    assert [words_tokenizer.id(fill.token) for fill in found] == expected.topk(3).indices.tolist()
    assert all(fill.text.endswith("갔다.") and "[MASK]" not in fill.text for fill in found)
    two = ours.fill_masks("나는 [MASK] 학교에 [MASK].", top=2)
    assert [len(one) for one in two] == [2, 2]
    assert all(fill.text.count("[MASK]") == 1 for one in two for fill in one)
    # any other control token's name is text
    assert "[SEP]" in ours.fill("the [SEP] of [MASK]", top=1)[0].text
    with pytest.raises(UsageError, match=r"write \[MASK\]"):
        ours.fill("no mask here")
    with pytest.raises(UsageError, match="context of 40"):
        ours.fill("[MASK] " + "state " * 50)


def test_a_piece_of_a_word_joins_the_word_before_it(bert_pair) -> None:
    from malmoi.inference.pseudo_likelihood import replace_mask

    tokenizer = bert_pair[1].tokenizer
    piece = next(token for token in sorted(tokenizer.vocab()) if token.startswith("##"))
    assert (
        replace_mask(tokenizer, "the stat [MASK].", (9, 15), tokenizer.id(piece))
        == f"the stat{piece[2:]}."
    )


@torch.inference_mode()
def test_vectors_equal_transformers_and_padding_does_not_count(bert_pair) -> None:
    theirs, ours = bert_pair
    texts = ["the state", "나는 오늘 학교에 갔다. 하늘이 맑다.", "a"]
    together = ours.embed(texts, layers=(-2, -1))
    cls, words = ours.embed(texts, pool="cls"), ours.embed(texts, layers=0, pool="none")
    for i, text in enumerate(texts):
        hidden = theirs(
            torch.tensor([ours.tokenizer.encode(text).tokens]), output_hidden_states=True
        ).hidden_states
        assert np.allclose(together[i], (hidden[-2] + hidden[-1])[0].mean(0) / 2, atol=1e-5)
        assert np.allclose(cls[i], hidden[-1][0, 0], atol=1e-5)
        assert np.allclose(words[i], hidden[0][0], atol=1e-5)
    assert together.shape == (3, 48)
    assert together.dtype == np.float32
    assert ours.embed("a").shape == (48,)
    assert ours.embed([]).shape == (0, 48)


@torch.inference_mode()
def test_a_causal_model_embeds_too(gpt2_pair) -> None:
    theirs, ours = gpt2_pair
    ids = torch.tensor([ours.tokenizer.encode("the state").tokens])
    hidden = theirs(ids, output_hidden_states=True).hidden_states[-1][0]
    vectors = ours.embed(["the state", "나는 오늘 학교에 갔다"])
    assert np.allclose(vectors[0], hidden.mean(0), atol=1e-5)
    assert np.allclose(ours.embed("the state", pool="cls"), hidden[-1], atol=1e-5)
    assert np.allclose(ours.logits("the state"), theirs(ids).logits[0], atol=1e-4)


def test_impossible_embeddings_are_refused(bert_pair) -> None:
    ours = bert_pair[1]
    with pytest.raises(UsageError, match="'mean'"):
        ours.embed("a", pool="meen")
    with pytest.raises(UsageError, match="no layer 4"):
        ours.embed("a", layers=(4,))
    with pytest.raises(UsageError, match="context of 40"):
        ours.embed("state " * 50)
    assert ours.embed("state " * 50, truncate=True).shape == (48,)


@torch.inference_mode()
def test_a_classifier_predicts_as_transformers_does(
    words_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    torch.manual_seed(4)
    config = small_bert(words_tokenizer, id2label={0: "neg", 1: "neutral", 2: "pos"})
    theirs = hf.BertForSequenceClassification(config).eval()
    ours = saved(theirs, words_tokenizer, tmp_path)
    for text in ["the state of", ("the state", "a small model of words")]:
        pair = (text,) if isinstance(text, str) else text
        encoding = words_tokenizer.encode(*pair)
        logits = theirs(
            torch.tensor([encoding.tokens]), token_type_ids=torch.tensor([encoding.segments])
        ).logits[0]
        found = ours.predict(text)
        assert list(found.scores) == ["neg", "neutral", "pos"]
        assert list(found.scores.values()) == pytest.approx(logits.softmax(-1).tolist(), abs=1e-5)
        assert found.label == config.id2label[int(logits.argmax())]
    texts = ["a", "the state of the union", "small"]
    assert [p.label for p in ours.predict(texts)] == [ours.predict(text).label for text in texts]
    with pytest.raises(UsageError, match="not a mix of both"):
        ours.predict(["a", ("b", "c")])
    with pytest.raises(UsageError, match=r"cannot generate.*It can: predict, embed"):
        ours.generate("a")


def test_a_tagger_joins_words_into_spans(words_tokenizer: Tokenizer) -> None:
    text, labels = "small state of union", ("O", "B-LOC", "I-LOC", "I-PER")
    encoding = Encoding(
        [2, 9, 9, 9, 9, 9, 3],
        [0] * 7,
        [(0, 0), (0, 3), (3, 5), (6, 11), (12, 14), (15, 20), (0, 0)],
        [True, *[False] * 5, True],
        [None, 0, 0, 1, 2, 3, None],
    )
    best = [0, 1, 0, 2, 0, 3, 0]
    scores = torch.nn.functional.one_hot(torch.tensor(best), 4).float() * 5
    found = list(merge_tags(text, encoding, scores, labels))
    assert [(s.text, s.label, s.start, s.end) for s in found] == [
        ("small state", "LOC", 0, 11),
        ("union", "PER", 15, 20),
    ]
    network = initialise(
        Network(bert(vocab=120, context=16, width=32, depth=1, heads=2), {"tag": 4}), 0
    )
    tagger = Model(Checkpoint(network, words_tokenizer, labels))
    found = tagger.predict(text)
    assert found
    assert all(text[s.start : s.end] == s.text for s in found)
    assert len(tagger.predict([text, "a"])) == 2
    with pytest.raises(UsageError, match="context of 16"):
        tagger.predict("state " * 20)


def test_a_model_says_what_it_can_do(gpt2_pair, bert_pair) -> None:
    with pytest.raises(UsageError, match=r"cannot generate: it has no lm head.*It can: fill"):
        bert_pair[1].generate("the")
    with pytest.raises(UsageError, match=r"cannot fill.*It can: generate"):
        gpt2_pair[1].fill("the [MASK]")
    with pytest.raises(UsageError, match=r"cannot predict.*--labels A,B\) or fine-tune it: malmoi"):
        gpt2_pair[1].predict("the")
    bare = Model(Checkpoint(Network(gpt2(vocab=9, width=8, depth=1, heads=1), {"lm": 0})))
    with pytest.raises(UsageError, match="no tokenizer"):
        bare.generate("a")
    with pytest.raises(UsageError, match="Only one continuation"):
        gpt2_pair[1].stream("the", n=2)
    assert "generate" in repr(gpt2_pair[1])
    assert gpt2_pair[1].tokens("the")


def test_a_saved_model_is_the_same_model(gpt2_pair, tmp_path: Path) -> None:
    _, ours = gpt2_pair
    ours.save(tmp_path / "again")
    again = load(tmp_path / "again", device="cpu", dtype="fp32")
    assert np.array_equal(again.logits("the state"), ours.logits("the state"))
    assert again.generate("the", seed=1) == ours.generate("the", seed=1)
    with pytest.raises(UsageError, match="'bfloat16'"):
        load(tmp_path / "again", dtype="bfloat17")


def test_rules_and_settings_go_together() -> None:
    assert set(SAMPLING_RULES) == set(Sampling.__dataclass_fields__)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 20)), min_size=1, max_size=4),
    st.integers(1, 6),
    st.data(),
)
def test_the_best_spans_are_those_of_brute_force(
    shapes: list[tuple[int, int]], top: int, data: st.DataObject
) -> None:
    width = max(first + n for first, n in shapes) + 1
    seed = data.draw(st.integers(0, 2**20))
    scores = torch.randn(len(shapes), width, 2, generator=torch.Generator().manual_seed(seed))
    nothing = np.zeros(width, np.int32)
    some = [
        ContextWindow(nothing, nothing, first, np.array([(2 * i, 2 * i + 1) for i in range(n)]))
        for first, n in shapes
    ]
    for row, window, found in zip(scores, some, _spans(some, scores, top), strict=True):
        n, inside = len(window.offsets), row[window.first :]
        every = {
            (2 * i, 2 * j + 1): float(inside[i, 0] + inside[j, 1])
            for i in range(n)
            for j in range(i, n)
        }
        assert found == dict(sorted(every.items(), key=lambda item: -item[1])[:top])


# ------------------------------------------------------------------ starting

START = """
import sys
import malmoi
gpt = malmoi.load(sys.argv[1], device="cpu")
gpt.logits("the state")
files = {module.__file__ for name, module in sys.modules.items() if name.startswith("malmoi.")}
print(sum(not file.endswith("__init__.py") for file in files))
bert = malmoi.load(sys.argv[2], device="cpu")
gpt.generate("the state", max_new_tokens=3)
gpt.score("the state", " of the union")
bert.fill("the [MASK] of the union")
bert.embed("small words")
print(*(name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules))
"""


def test_no_model_waits_for_the_compiler_and_logits_for_no_other_verb(
    gpt2_pair, bert_pair, tmp_path: Path
) -> None:
    folders = [tmp_path / "gpt", tmp_path / "bert"]
    for (_, model), folder in zip((gpt2_pair, bert_pair), folders, strict=True):
        model.save(folder)
    ran = subprocess.run(
        [sys.executable, "-c", START, *folders], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    count, *compiled = ran.stdout.split()
    assert int(count) <= 53
    assert compiled == []
