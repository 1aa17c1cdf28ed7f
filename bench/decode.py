"""Greedy decoding on the processor: ours beside `transformers`, in one run, the same tokens.

    malmoi bench decode [--json] [--shape gpt2 llama] [--tokens 64] [--rounds 3] [--batches 1 8]

A GPT-2 of 124M, and a LLaMA of 135M (SmolLM2's shape). Both read the same folder of random weights,
in fp32, with a KV cache; rounds are taken in turn. A ratio above 1 means that we are faster. The
shape `tiny` shows in seconds whether both write the same.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
import transformers

from _timing import Clock, benchmark_parser, in_turn
from malmoi.inference import Model, load
from malmoi.inference.generation.fast_argmax import fast_argmax_for
from malmoi.inference.generation.generate import Decoding
from malmoi.inference.generation.options import GenerationConfig, Sampling
from malmoi.inference.generation.token_selection import new_sequences
from malmoi.system.machine import parse_machine, pretend

PROMPT = 32  # tokens
SHAPES = ["gpt2", "llama"]
Given = ParamSpec("Given")
Result = TypeVar("Result")
Decode = Callable[[list[list[int]], int], list[list[int]]]


def theirs(model: transformers.PreTrainedModel) -> Decode:
    @torch.inference_mode()
    def decode(prompts: list[list[int]], count: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        settings = {
            "do_sample": False,
            "max_new_tokens": count,
            "eos_token_id": None,
            "pad_token_id": 0,
        }
        return model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[
            :, PROMPT:
        ].tolist()

    return decode


def ours(model: Model) -> Decode:
    screen = fast_argmax_for(model.network)

    def decode(prompts: list[list[int]], count: int) -> list[list[int]]:
        wish = GenerationConfig(count, Sampling(temperature=0))
        sequences = new_sequences(prompts, wish, model.config.context)
        decoding = Decoding(model.network, sequences, screen)
        steps = [decoding.step() for _ in range(count)]
        return [[token for step in steps for token in step[i]] for i in range(len(prompts))]

    return decode


def on_machine(changes: str, work: Callable[Given, Result]) -> Callable[Given, Result]:
    """The same work on a machine that lacks something."""

    def run(*given: Given.args, **named: Given.kwargs) -> Result:
        with pretend(parse_machine(changes)):
            return work(*given, **named)

    return run


def measure(
    decoders: dict[str, Decode],
    batch: int,
    count: int,
    rounds: int,
    clock: Clock = time.perf_counter,
) -> dict[str, Any]:
    """Tokens a second of each, the median of rounds taken in turn, after one to warm up."""
    prompts = torch.randint(
        0, 49_152, (batch, PROMPT), generator=torch.Generator().manual_seed(batch)
    ).tolist()
    tokens = {name: decode(prompts, count) for name, decode in decoders.items()}
    works = {name: partial(decode, prompts, count) for name, decode in decoders.items()}
    seconds = in_turn(works, rounds, clock)
    medians = {name: batch * count / statistics.median(some) for name, some in seconds.items()}
    ratio = medians["malmoi"] / medians["transformers"]
    return {
        "batch": batch,
        **medians,
        "ratio": ratio,
        "identical": tokens["malmoi"] == tokens["transformers"],
    }


def peer_of(shape: str) -> transformers.PreTrainedModel:
    """Random weights of a shape, in fp32."""
    torch.manual_seed(0)
    if shape in ("gpt2", "tiny"):
        small = dict(n_embd=64, n_layer=2, n_head=4) if shape == "tiny" else {}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**small)).eval()
    sizes = dict(vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30)
    heads = dict(num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=2048)
    config = transformers.LlamaConfig(**sizes, **heads, tie_word_embeddings=True, rope_theta=1e5)
    return transformers.LlamaForCausalLM(config).eval()


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object a batch size")
    parser.add_argument("--shape", nargs="+", choices=[*SHAPES, "tiny"], default=SHAPES)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    chosen = parser.parse_args()
    for shape in chosen.shape:
        with tempfile.TemporaryDirectory() as folder:
            peer = peer_of(shape)
            peer.save_pretrained(Path(folder))
            decoders = {"malmoi": ours(load(folder, device="cpu")), "transformers": theirs(peer)}
            for batch in chosen.batches:
                row = {"shape": shape} | measure(decoders, batch, chosen.tokens, chosen.rounds)
                print(json.dumps(row) if chosen.json else describe(row), flush=True)


def describe(row: dict[str, Any]) -> str:
    same = "the same tokens" if row["identical"] else "DIFFERENT tokens"
    rates = f"malmoi {row['malmoi']:.1f} tokens/s, transformers {row['transformers']:.1f}"
    return f"{row['shape']}, batch {row['batch']}: {rates}: {row['ratio']:.2f}×, {same}"


if __name__ == "__main__":
    main()
