"""How fast a small GPT-2 trains on this processor: our trainer's step beside transformers', in one
run.

    malmoi bench train_cpu [--batch 32] [--seconds 10] [--rounds 3] [--json]

The same shape (4 layers of 256, context 256, no dropout), the same AdamW and clipping, the same
random tokens. The ways take turns, and the median of the rounds counts; bf16 only where the
processor has units for it. Ratios count: the tokens a second are this machine's at this moment.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from _timing import Clock, benchmark_parser
from malmoi.checkpoint import Checkpoint
from malmoi.model import Network, initialise
from malmoi.model.families import gpt2
from malmoi.system.machine import this_machine
from malmoi.training.feed import PhaseFeed
from malmoi.training.parallel import ProcessGroup
from malmoi.training.recipe import Recipe, TrainConfig
from malmoi.training.run import TrainingRun
from malmoi.training.trainer import Trainer

SHAPE: dict[str, Any] = dict(vocab=256, context=256, width=256, depth=4, heads=4)
STILL: dict[str, Any] = dict(dropout=0.0, attention_dropout=0.0)
Step = Callable[[], object]


def batches(size: int) -> Iterator[torch.Tensor]:
    """Random tokens and the one after the last, the same for every way."""
    generator = torch.Generator().manual_seed(0)
    while True:
        yield torch.randint(SHAPE["vocab"], (size, SHAPE["context"] + 1), generator=generator)


def ours(size: int, folder: Path, precision: Any, *, compiled: bool) -> Step:
    """`Trainer.step` as `malmoi pretrain` runs it."""
    train = TrainConfig(
        steps=100_000, batch=size, precision=precision, compile=compiled, micro=size
    )
    recipe = Recipe(name="bench", model=gpt2(**SHAPE, **STILL), train=train)
    network = initialise(Network(recipe.model, {"lm": 0}), 0)
    nothing = PhaseFeed(lambda share: NotImplemented, SHAPE["context"], 1)
    trainer, given = (
        Trainer(
            TrainingRun(recipe, Checkpoint(network, None), [nothing], [], folder, ProcessGroup())
        ),
        batches(size),
    )

    def step() -> None:
        whole = next(given)
        trainer.step(
            [{"tokens": whole[:, :-1].contiguous(), "lm_labels": whole[:, 1:].contiguous()}]
        )

    return step


def theirs(size: int, *, half: bool) -> Step:
    """transformers' GPT2LMHeadModel, eager, with the same optimizer."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=SHAPE["vocab"],
        n_positions=SHAPE["context"],
        n_embd=SHAPE["width"],
        n_layer=SHAPE["depth"],
        n_head=SHAPE["heads"],
        bos_token_id=None,
        eos_token_id=None,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    )
    model, given = GPT2LMHeadModel(config).train(), batches(size)
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-4)

    def step() -> None:
        tokens = next(given)[:, :-1].contiguous()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = model(tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def speed(step: Step, seconds: float, tokens: int, now: Clock) -> float:
    """Tokens a second over at least two steps and this many seconds."""
    began, count = now(), 0
    while count < 2 or now() - began < seconds:
        step()
        count += 1
    return count * tokens / (now() - began)


def measure(
    ways: dict[str, Step],
    size: int,
    seconds: float,
    rounds: int,
    now: Clock = time.perf_counter,
) -> dict[str, float]:
    tokens = size * SHAPE["context"]
    for step in ways.values():  # compilation and first allocations
        step()
        step()
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, step in ways.items():
            found[name].append(speed(step, seconds, tokens, now))
    return {name: statistics.median(speeds) for name, speeds in found.items()}


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ways = {
            "transformers fp32": theirs(given.batch, half=False),
            "malmoi fp32": ours(given.batch, Path(folder), "fp32", compiled=False),
        }
        if this_machine().fast_bf16("cpu"):
            ways |= {
                "transformers bf16": theirs(given.batch, half=True),
                "malmoi bf16": ours(given.batch, Path(folder), "bf16", compiled=False),
                "malmoi bf16 compiled": ours(given.batch, Path(folder), "bf16", compiled=True),
            }
        speeds = measure(ways, given.batch, given.seconds, given.rounds)
    base = speeds["transformers fp32"]
    rows = [
        {"way": name, "tokens_per_second": round(s), "ratio": round(s / base, 2)}
        for name, s in speeds.items()
    ]
    if given.json:
        print(json.dumps({"threads": torch.get_num_threads(), "batch": given.batch, "rows": rows}))
        return
    print(f"{'way':<22} {'tokens/s':>10} {'× fp32 transformers':>20}")
    for row in rows:
        print(f"{row['way']:<22} {row['tokens_per_second']:>10,} {row['ratio']:>20}")


if __name__ == "__main__":
    main()
