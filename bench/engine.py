"""Many requests, shared beginnings and drafts: ours beside `transformers` on the same random GPT-2
of 124M, in one run.

    malmoi bench engine [--device cpu|cuda] [--tokens N] [--compile] [--json]

On a processor (fp32): few-shot multiple choice against scoring each option by itself, batched by
question; 16 requests at once against one after another; drafts from the prompt against plain
decoding. On a GPU (bf16): one request and 64, against `generate` with its dynamic and with its
static, compiled cache. A ratio above 1 means that we are faster.
"""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer as Rust
from tokenizers import decoders, models, pre_tokenizers

from _timing import benchmark_parser, timed
from malmoi.inference import Model, load
from malmoi.inference.engine import Engine, GenerationJob
from malmoi.inference.generation.options import GenerationConfig, Sampling
from malmoi.inference.generation.prefix_cache import PrefixCache
from malmoi.inference.generation.prompt_lookup import PromptLookup
from malmoi.inference.generation.token_bytes import byte_alphabet
from malmoi.inference.likelihood import ScoredRow
from malmoi.inference.shared_prefix import token_logprobs
from malmoi.tokenizer import Tokenizer

VOCAB = 50_257
GREEDY = Sampling(temperature=0)
Result = dict[str, Any]


def made_up_tokenizer() -> Tokenizer:
    """A byte-level vocabulary of GPT-2's size, so that text comes out at GPT-2's cost: pairs and
    triples of bytes.
    """
    letters = list(byte_alphabet())
    words = [a + b for a in letters for b in letters[:190]]
    vocab = {
        token: i for i, token in enumerate([*letters, *words, *(w + "a" for w in words)][:VOCAB])
    }
    rust = Rust(models.BPE(vocab=vocab, merges=[]))
    rust.pre_tokenizer, rust.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    return Tokenizer(rust)


def both(device: str) -> tuple[Model, transformers.PreTrainedModel]:
    """The same random weights, opened by both."""
    torch.manual_seed(0)
    peer = transformers.GPT2LMHeadModel(transformers.GPT2Config()).eval()
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with tempfile.TemporaryDirectory() as folder:
        peer.save_pretrained(Path(folder))
        made_up_tokenizer().save(Path(folder))
        ours = load(folder, device=device, dtype=dtype)
    return ours, peer.to(device=device, dtype=dtype)


def drawn(count: int, length: int, seed: int = 0) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        tuple(row) for row in torch.randint(0, VOCAB, (count, length), generator=generator).tolist()
    ]


# ------------------------------------------------------------------ both devices


def served(engine: Engine, prompts: list[tuple[int, ...]], count: int) -> list[list[int]]:
    """All prompts through the engine at once, text and all."""
    tickets = [
        engine.submit(GenerationJob(prompt, GenerationConfig(count, GREEDY))) for prompt in prompts
    ]
    return [list(ticket.result().tokens) for ticket in tickets]


@torch.inference_mode()
def generated(
    peer: transformers.PreTrainedModel, prompts: list[tuple[int, ...]], count: int, **more: Any
) -> Any:
    ids = torch.tensor(prompts, device=peer.device)
    fixed = {
        "do_sample": False,
        "max_new_tokens": count,
        "min_new_tokens": count,
        "pad_token_id": 0,
    }
    mask = torch.ones_like(ids)
    return peer.generate(ids, attention_mask=mask, eos_token_id=None, **fixed, **more)[
        :, ids.size(1) :
    ].tolist()


def compare(name: str, unit: str, ours: float, peers: dict[str, float], **more: Any) -> Result:
    ratios = {peer: ours / rate for peer, rate in peers.items()}
    return {"what": name, "unit": unit, "malmoi": ours, **peers, "ratios": ratios, **more}


# ------------------------------------------------------------------ the processor


def multiple_choice(ours: Model, peer: transformers.PreTrainedModel, questions: int = 6) -> Result:
    """The same examples before every question, four options each: options a second."""
    shots, asked, options = drawn(1, 280)[0], drawn(questions, 24, 1), drawn(4 * questions, 5, 2)
    rows = [
        ScoredRow([*shots, *asked[i // 4], *option], 280 + 24) for i, option in enumerate(options)
    ]

    @torch.inference_mode()
    def each_option() -> list[float]:
        found = []
        for start in range(0, len(rows), 4):
            ids = torch.tensor([row.tokens for row in rows[start : start + 4]])
            logprobs = peer(ids).logits[:, 303:-1].log_softmax(-1)
            found += logprobs.gather(2, ids[:, 304:, None]).sum((1, 2)).tolist()
        return found

    theirs, expected = timed(each_option)
    seconds, found = timed(lambda: token_logprobs(ours.network, rows, PrefixCache(ours.network)))
    off = max(abs(sum(logprobs) - one) for (logprobs, _), one in zip(found, expected, strict=True))
    rates = {"transformers, each option": len(rows) / theirs}
    return compare(
        "few-shot choice, 280 + 24 + 5 tokens",
        "options/s",
        len(rows) / seconds,
        rates,
        largest_error=off,
    )


def sixteen_at_once(ours: Model, peer: transformers.PreTrainedModel, count: int) -> Result:
    prompts = drawn(16, 24, 3)
    with Engine(ours, slots=16, capacity=256) as engine:
        served(engine, prompts[:2], 2)  # warm
        seconds, found = timed(lambda: served(engine, prompts, count))
    theirs, expected = timed(lambda: [generated(peer, [prompt], count)[0] for prompt in prompts])
    rates = {"transformers, one by one": 16 * count / theirs}
    return compare(
        "16 requests", "tokens/s", 16 * count / seconds, rates, identical=found == expected
    )


def drafts(ours: Model, peer: transformers.PreTrainedModel, count: int) -> Result:
    prompt = drawn(1, 24, 4)[0] * 3
    lookup = PromptLookup(ours.network, prompt, count, ours.generator.fast_argmax)
    seconds, found = timed(lambda: list(lookup))
    theirs, expected = timed(lambda: generated(peer, [prompt], count)[0])
    more = {
        "acceptance": lookup.acceptance,
        "tokens_a_pass": count / lookup.passes,
        "identical": found == expected,
    }
    return compare(
        "drafts from the prompt",
        "tokens/s",
        count / seconds,
        {"transformers, plain": count / theirs},
        **more,
    )


# ------------------------------------------------------------------ the GPU


def decoding(
    ours: Model, peer: transformers.PreTrainedModel, batch: int, count: int, compiled: bool
) -> Result:
    """Tokens a second of `batch` requests at once, prompts of 32 tokens included; the second run
    of each counts.
    """
    prompts = drawn(batch, 32, batch)
    with Engine(ours, slots=batch, capacity=512, mode="compiled" if compiled else None) as engine:
        for _ in range(2):
            served(engine, prompts, count)  # records the graphs
        seconds, found = timed(lambda: served(engine, prompts, count))
    peers, tokens = {}, {}
    for name, more in {
        "dynamic cache": {},
        "static cache": {"cache_implementation": "static"},
    }.items():
        generated(peer, prompts, count, **more)
        theirs, tokens[name] = timed(lambda more=more: generated(peer, prompts, count, **more))  # type: ignore[misc]
        peers[f"transformers, {name}"] = batch * count / theirs
    same = sum(a == b for a, b in zip(found, tokens["dynamic cache"], strict=True))
    return compare(
        f"{batch} at once",
        "tokens/s",
        batch * count / seconds,
        peers,
        identical=f"{same} of {batch} texts",
    )


def describe(row: Result) -> str:
    """A line for ours and one for each peer."""
    lines = [f"{row['what']}: malmoi {row['malmoi']:,.1f} {row['unit']}"]
    lines += [
        f"    {peer}: {row[peer]:,.1f}, ours {ratio:.2f}×" for peer, ratio in row["ratios"].items()
    ]
    known = {"what", "unit", "malmoi", "ratios", *row["ratios"]}
    lines += [
        f"    {name.replace('_', ' ')}: {value:.3g}"
        if isinstance(value, float)
        else f"    {name}: {value}"
        for name, value in row.items()
        if name not in known
    ]
    return "\n".join(lines)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument(
        "--tokens",
        type=int,
        default=0,
        help="new tokens of a request (16 on a processor, else 128)",
    )
    parser.add_argument(
        "--compile", action="store_true", help="compile our steps too (GPU; a minute more)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a comparison")
    chosen = parser.parse_args()
    ours, peer = both(chosen.device)
    if chosen.device == "cpu":
        count = chosen.tokens or 16
        parts: list[Callable[[], Result]] = [
            lambda: multiple_choice(ours, peer),
            lambda: sixteen_at_once(ours, peer, count),
            lambda: drafts(ours, peer, 2 * count),
        ]
    else:
        parts = [
            lambda b=b: decoding(ours, peer, b, chosen.tokens or 128, chosen.compile)
            for b in (1, 64)
        ]  # type: ignore[misc]
    for part in parts:
        row = part()
        print(json.dumps(row) if chosen.json else describe(row), flush=True)


if __name__ == "__main__":
    main()
