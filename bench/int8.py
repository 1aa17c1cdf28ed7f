"""Greedy decoding with int8 weights on the processor: ours beside `transformers` in fp32, in one
run.

    malmoi bench int8 [--json] [--model FOLDER_OR_GGUF | --shape gpt2] [--text FILE] [--tokens 48]
    [--rounds 3] [--cpu-time]

Without --model it is a GPT-2 of 124M (or, as --shape llama, a LLaMA of 135M) with random weights.
With --text it also says what rounding the weights costs: perplexity, and how often the likeliest
next token stays the same. A ratio above 1 means that we are faster.
"""

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from _timing import benchmark_parser
from decode import SHAPES, measure, on_machine, ours, peer_of, theirs
from malmoi.inference import Model, load

WINDOW, WINDOWS = 512, 8  # tokens of text that quality is measured on: some thousands tell 0.3 %


@torch.inference_mode()
def quality(exact: Model, small: Model, text: str) -> dict[str, float]:
    """Perplexity of both over windows of a text, and the share of tokens after which both expect
    the same.
    """
    tokens = torch.tensor(exact.tokenizer.ids([text])[0][: WINDOW * WINDOWS])
    rows = tokens[: len(tokens) // WINDOW * WINDOW].view(-1, WINDOW)
    losses, agreed = [0.0, 0.0], 0
    for row in rows:
        scores = [model.network(row[None])["lm"][0, :-1].float() for model in (exact, small)]
        for i, score in enumerate(scores):
            losses[i] += float(torch.nn.functional.cross_entropy(score, row[1:], reduction="sum"))
        agreed += int((scores[0].argmax(-1) == scores[1].argmax(-1)).sum())
    count = rows[:, 1:].numel()
    fp32, int8 = (float(torch.tensor(loss / count).exp()) for loss in losses)
    return {
        "perplexity_fp32": fp32,
        "perplexity_int8": int8,
        "worse": int8 / fp32 - 1,
        "agreement": agreed / count,
    }


def open_all(
    source: str | None, shape: str, folder: Path
) -> tuple[Model, Model, transformers.PreTrainedModel]:
    """The same weights three times: ours in fp32 and in int8, theirs in fp32."""
    if source is None:
        peer_of(shape).save_pretrained(folder)
    else:
        load(source, device="cpu").save(folder)  # a GGUF file becomes a folder that both open
    peer = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return load(folder, device="cpu", dtype="fp32"), load(folder, device="cpu", dtype="int8"), peer


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    parser.add_argument("--model", help="a folder or a GGUF file; random weights otherwise")
    parser.add_argument("--shape", choices=SHAPES, default=SHAPES[0])
    parser.add_argument("--text", type=Path, help="a text file to measure quality on")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--cpu-time", action="store_true", help="for a busy machine, one thread")
    chosen = parser.parse_args()
    clock = time.process_time if chosen.cpu_time else time.perf_counter
    if chosen.cpu_time:
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        exact, small, peer = open_all(chosen.model, chosen.shape, Path(folder))
        decoders = {"malmoi": ours(small), "malmoi fp32": ours(exact), "transformers": theirs(peer)}
        decoders["without kernel"] = on_machine("no-fused", ours(small))
        for batch in chosen.batches:
            row = measure(decoders, batch, chosen.tokens, chosen.rounds, clock)
            print(json.dumps(row) if chosen.json else describe(row), flush=True)
        if chosen.text:
            found = quality(exact, small, chosen.text.read_text("utf-8"))
            print(json.dumps(found) if chosen.json else tell(found))


def describe(row: dict[str, Any]) -> str:
    rates = (
        f"int8 {row['malmoi']:.1f} tokens/s (a call each: {row['without kernel']:.1f}), fp32 "
        f"{row['malmoi fp32']:.1f}, transformers {row['transformers']:.1f}"
    )
    return f"batch {row['batch']}: {rates}: {row['ratio']:.2f}× transformers"


def tell(found: dict[str, float]) -> str:
    cost = (
        f"perplexity {found['perplexity_fp32']:.3f} → {found['perplexity_int8']:.3f} "
        f"({found['worse']:+.2%})"
    )
    return f"{cost}, the same likeliest token after {found['agreement']:.1%} of all"


if __name__ == "__main__":
    main()
