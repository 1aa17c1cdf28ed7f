"""Distillation: the teacher's loss is the plain divergence, for the student alone; layers that
are equal may be one.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given, settings, strategies as st
from torch import Tensor

import malmoi
from conftest import typed
from malmoi.checkpoint import Checkpoint, read_checkpoint, table_for, write_checkpoint
from malmoi.cli.app import run_command
from malmoi.compression.distil import COSINE_WEIGHT, TEXT_SOFT, distil_model, student_of
from malmoi.compression.share import share_layers, shared
from malmoi.errors import UsageError
from malmoi.evaluation.kinds import KINDS, HeadKind, custom_task
from malmoi.model import Network, count_parameters, initialise
from malmoi.model.families import bert, distilbert, gpt2, gpt3, llama
from malmoi.tokenizer import train_tokenizer
from malmoi.training.losses import IGNORE_LABEL, ForwardPass, mlm
from malmoi.training.losses.distil import (
    MAX_SCORES,
    Distillation,
    distillation_loss,
    divergence,
    text_distiller,
)

TINY: dict[str, Any] = dict(
    vocab=61, context=24, width=16, depth=4, heads=2, dropout=0.0, attention_dropout=0.0
)
FAMILIES = {
    "bert": (bert(**TINY), "mlm"),
    "distilbert": (distilbert(**TINY), "mlm"),
    "gpt2": (gpt2(**TINY), "lm"),
    "llama": (llama(**TINY, hidden=32), "lm"),
}
TEXT_DISTILLERS = {head: text_distiller(head, f"{head}_labels") for head in ("lm", "mlm")}
GOOD, BAD = "a good fine great film", "a bad poor weak film"
ROWS = "text,label\n" + "".join(
    f"{text},{name}\n" for text, name in [(GOOD, "yes"), (BAD, "no")] * 16
)
QUICK: dict[str, Any] = dict(epochs=8, lr=2e-3, batch=8, precision="fp32")


def drawn(config: Any, heads: dict[str, int], seed: int = 0) -> Network:
    """A network whose scores are far from even, so that two of them disagree."""
    network = initialise(Network(config, heads), seed).eval()
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if weight.dim() > 1 and "norm" not in name:
                weight.mul_(8)
    return network


def a_batch(seed: int = 0) -> dict[str, Tensor]:
    """What every kind of loss reads: tokens, padding, and labels of which some are not judged."""
    torch.manual_seed(seed)
    tokens = torch.randint(0, 61, (3, 8))
    keep = torch.arange(8)[None] < torch.tensor([8, 5, 7])[:, None]
    following = torch.randint(0, 61, (3, 8)).masked_fill(~keep, IGNORE_LABEL)
    chosen, right = torch.tensor([1, 4, 9, 17, 0]), torch.tensor([3, 60, 7, 8, IGNORE_LABEL])
    return dict(tokens=tokens, keep=keep, lm_labels=following, mlm_slots=chosen, mlm_labels=right)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 9),
    st.integers(2, 30),
    st.floats(0.3, 8),
    st.floats(0.1, 20),
    st.integers(0, 999),
)
def test_the_kl_divergence_equals_torchs(
    rows: int, classes: int, temperature: float, size: float, seed: int
) -> None:
    some = torch.Generator().manual_seed(seed)
    student, teacher = (size * torch.randn(rows, classes, generator=some) for _ in range(2))
    p, q = (F.log_softmax(scores / temperature, -1) for scores in (teacher, student))
    wanted = temperature**2 * F.kl_div(q, p, reduction="none", log_target=True).sum(-1)
    torch.testing.assert_close(
        divergence(student, teacher, temperature), wanted, rtol=1e-4, atol=1e-4
    )
    never = torch.full((rows, 1), float("-inf"))  # what cannot be chosen changes nothing
    longer = divergence(torch.cat((student, never), 1), torch.cat((teacher, never), 1), temperature)
    torch.testing.assert_close(longer, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_distillation_in_chunks_counts_labelled_tokens_only(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, head = FAMILIES[family]
    monkeypatch.setitem(MAX_SCORES, "cpu", 61 * 3)
    teacher, student, batch = drawn(config, {head: 0}, 1), drawn(config, {head: 0}, 2), a_batch()
    done = ForwardPass.of(student, batch)
    (term,) = distillation_loss(Distillation(teacher, temperature=3.0), TEXT_DISTILLERS[head]).terms
    scores = [
        one.read(head, ForwardPass.of(one, batch).hidden).flatten(0, 1)
        for one in (student, teacher)
    ]
    rows, labels = (
        (slice(None), "lm_labels") if head == "lm" else (batch["mlm_slots"], "mlm_labels")
    )
    q, p = (F.log_softmax(some[rows] / 3.0, -1) for some in scores)
    judged = batch[labels].flatten() != IGNORE_LABEL
    wanted = 9.0 * F.kl_div(q, p.detach(), reduction="none", log_target=True).sum(-1)[judged].sum()
    total = term.total(done)
    torch.testing.assert_close(total, wanted, rtol=1e-4, atol=1e-4)
    weights = [w for w in student.parameters() if w.requires_grad]
    ours, plain = (
        torch.autograd.grad(loss, weights, allow_unused=True) for loss in (total, wanted)
    )
    for one, other in zip(ours, plain, strict=True):
        if other is not None:
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    assert not any(w.requires_grad for w in teacher.parameters())


def test_soft_labels_and_the_cosine_loss_are_weighted() -> None:
    config = bert(**TINY)
    teacher, student, batch = drawn(config, {"mlm": 0}, 1), drawn(config, {"mlm": 0}, 2), a_batch()
    done, counts = ForwardPass.of(student, batch), {"mlm_labels": torch.tensor(4.0)}
    hard = mlm()(done, counts)[0]
    soft = distillation_loss(Distillation(teacher), TEXT_DISTILLERS["mlm"])(done, counts)[0]
    hidden = ForwardPass.of(teacher, batch).hidden
    apart = (1 - F.cosine_similarity(done.hidden, hidden, dim=-1))[batch["keep"]].mean()
    weighted = Distillation(teacher, TEXT_SOFT, cosine=COSINE_WEIGHT)
    loss, told = weighted.add_to(mlm(), TEXT_DISTILLERS["mlm"])(done, counts)
    torch.testing.assert_close(7 * loss, 5 * soft + 2 * hard + apart)  # Sanh et al. 2019
    assert set(told) == {"mlm", "distil"}
    # no angle between widths that differ
    narrow = drawn(bert(**(TINY | {"width": 8})), {"mlm": 0}, 3)
    told = Distillation(teacher, 1.0, cosine=0.2).add_to(mlm(), TEXT_DISTILLERS["mlm"])(
        ForwardPass.of(narrow, batch), counts
    )[1]
    alone = distillation_loss(Distillation(teacher), TEXT_DISTILLERS["mlm"])(
        ForwardPass.of(narrow, batch), counts
    )[0]
    torch.testing.assert_close(told["distil"], alone)


DISTILLERS = TEXT_DISTILLERS | {
    name: kind.distil for name, kind in KINDS.items() if isinstance(kind, HeadKind) and kind.head
}


@pytest.mark.parametrize("kind", DISTILLERS)
def test_a_copy_of_the_teacher_has_nothing_to_learn(kind: str) -> None:
    config = (gpt2 if DISTILLERS[kind].head == "lm" else bert)(**TINY)
    teacher = drawn(config, {DISTILLERS[kind].head: 1 if kind == "regression" else 3})
    student, batch = student_of(Checkpoint(teacher), 4).network, a_batch()
    batch["labels"] = {
        "tagging": torch.zeros(3, 8),
        "answer": torch.ones(3, 2),
        "choice": torch.zeros(2),
        "multilabel": torch.zeros(3, 3),
    }.get(kind, torch.zeros(3))
    if kind == "choice":
        batch["places"] = torch.tensor([[0, 1], [2, -1]])
    if kind == "writing":
        batch["slots"] = torch.tensor([2, 3, 9])  # of the answers' tokens
    total = (
        distillation_loss(Distillation(teacher, cosine=1.0), DISTILLERS[kind])
        .terms[0]
        .total(ForwardPass.of(student, batch))
    )
    torch.testing.assert_close(total, torch.zeros(()), atol=1e-4, rtol=0)
    other = drawn(config, {DISTILLERS[kind].head: 1 if kind == "regression" else 3}, 5)
    assert (
        distillation_loss(Distillation(teacher), DISTILLERS[kind])
        .terms[0]
        .total(ForwardPass.of(other, batch))
        > 1e-3
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_student_is_every_second_layer_of_its_teacher(family: str) -> None:
    config, head = FAMILIES[family]
    teacher = drawn(config, {head: 0})
    student = student_of(Checkpoint(teacher)).network
    state, old = student.state_dict(), teacher.state_dict()
    for name, weight in state.items():
        source = name.replace("blocks.1.", "blocks.3.")
        assert torch.equal(weight, old[source]), name
        assert weight.data_ptr() != old[source].data_ptr()
    assert student.config.depth == 2
    assert table_for(student) is not None


def test_a_student_takes_distilberts_layers() -> None:
    twelve = Checkpoint(initialise(Network(gpt3(**(TINY | {"depth": 12})), {"lm": 0}), 0))
    six = student_of(twelve, 6).network
    chosen = [0, 2, 4, 7, 9, 11]  # DistilBERT's
    for block, layer in zip(six.trunk.blocks, chosen, strict=True):
        assert torch.equal(block.mlp.up.weight, twelve.network.trunk.blocks[layer].mlp.up.weight)  # type: ignore[union-attr]
    patterns = twelve.network.config.attention
    assert six.config.attention == tuple(patterns[i % 2] for i in chosen)
    for layers in (0, 13):
        with pytest.raises(UsageError, match="1 to 12 layers"):
            student_of(twelve, layers)
    with pytest.raises(UsageError, match="from 0 to 11"):
        student_of(twelve, (3, 12))


# ------------------------------------------------------------------ folders


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    words = train_tokenizer([GOOD, BAD] * 3, kind="wordpiece", vocab=90)
    config = bert(**(TINY | {"vocab": words.vocab_size, "width": 32}))
    write_checkpoint(
        Checkpoint(initialise(Network(config, {"mlm": 0, "nsp": 0}), 0), words), folder
    )
    return folder


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "a.csv"
    path.write_text(ROWS)
    return path


@pytest.fixture(scope="module")
def teacher(base: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("teacher")
    result = malmoi.finetune(
        base, custom_task("classification"), rows, out, rows, device="cpu", **QUICK
    )
    assert result.metrics["accuracy"] == 1
    return out


def test_a_task_is_taught_by_the_command(
    teacher: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = typed("compress distil --model", teacher, "--task classification --data", rows)
    command += [
        "--dev",
        str(rows),
        "--layers",
        "2",
        "--out",
        str(tmp_path / "s"),
        "--device",
        "cpu",
        "--json",
    ]
    command += [part for name, value in QUICK.items() for part in ("--set", f"{name}={value}")]
    assert run_command(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["accuracy"] == [1, 1]
    assert found["weights"][1] < found["weights"][0]
    student = read_checkpoint(tmp_path / "s")
    assert student.network.config.depth == 2
    assert count_parameters(student.network) == found["weights"][1]
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "s")
    assert sum(p.numel() for p in theirs.parameters()) == found["weights"][1]
    assert run_command(command) == 0
    assert "is finished" in capsys.readouterr().err
    assert run_command([*command, "--temperature", "5"]) == 2
    assert "temperature was 2.0" in capsys.readouterr().err


def test_a_gpt_may_have_a_student_that_never_met_a_task(rows: Path, tmp_path: Path) -> None:
    words = train_tokenizer([GOOD, BAD] * 3, kind="byte-bpe", vocab=290)
    for name, width in (("large", 32), ("small", 16)):
        config = gpt2(**(TINY | {"vocab": words.vocab_size, "width": width, "depth": 2}))
        write_checkpoint(
            Checkpoint(initialise(Network(config, {"lm": 0}), 0), words), tmp_path / name
        )
    task = custom_task("classification")
    malmoi.finetune(tmp_path / "large", task, rows, tmp_path / "t", rows, device="cpu", **QUICK)
    ways: dict[str, Any] = dict(
        task=task, dev=rows, student=tmp_path / "small", device="cpu", **QUICK
    )
    done = distil_model(tmp_path / "t", tmp_path / "s", rows, **ways)
    assert done.metrics["accuracy"] == (1, 1)
    assert read_checkpoint(tmp_path / "s").network.config.width == 16


def test_a_tagger_is_distilled(base: Path, tmp_path: Path) -> None:
    rows = tmp_path / "a.jsonl"
    row = {"text": GOOD.split(), "label": ["O", "B-X", "O", "B-X", "O"]}
    rows.write_text((json.dumps(row) + "\n") * 24)
    task = custom_task("tagging")
    malmoi.finetune(base, task, rows, tmp_path / "t", rows, device="cpu", **QUICK)
    done = distil_model(
        tmp_path / "t", tmp_path / "s", rows, task=task, dev=rows, soft=1.0, device="cpu", **QUICK
    )
    assert done.metrics["entity_f1"] == (1, 1)


@pytest.mark.parametrize("kind", ["mlm", "lm"])
def test_a_language_model_is_distilled_on_text(kind: str, base: Path, tmp_path: Path) -> None:
    source, text = base, tmp_path / "a.txt"
    text.write_text(
        "\n\n".join(f"{GOOD}. {BAD}. {word} {GOOD}." for word in "abcdefghijklmnopqrst" * 3)
    )
    if kind == "lm":
        source, words = (
            tmp_path / "gpt",
            train_tokenizer([GOOD, BAD] * 3, kind="byte-bpe", vocab=290),
        )
        write_checkpoint(
            Checkpoint(
                initialise(Network(gpt2(**(TINY | {"vocab": words.vocab_size})), {"lm": 0}), 0),
                words,
            ),
            source,
        )
    quick = dict(
        steps=4, lr="1e-3", batch=4, log_every=1, **{"data.valid": 0.2, "train.compile": False}
    )
    done = distil_model(source, tmp_path / "s", text, layers=2, device="cpu", **quick)
    logged = [
        json.loads(line) for line in (tmp_path / "s" / "metrics.jsonl").read_text().splitlines()
    ]
    assert {kind, "distil"} <= set(logged[0])
    assert "distil_loss" in logged[-1]
    assert read_checkpoint(tmp_path / "s").network.config.depth == 2
    assert done.weights[1] < done.weights[0]
    assert done.metrics["valid_loss"][1] == pytest.approx(logged[-1][f"{kind}_loss"], abs=1e-4)
    with pytest.raises(UsageError, match=r"holds another distillation \(soft was 0\.714"):
        distil_model(source, tmp_path / "s", text, layers=2, soft=0.9, device="cpu", **quick)
    with pytest.raises(UsageError, match="of a student with its teacher"):
        malmoi.pretrain(str(tmp_path / "s"), data=text, out=tmp_path / "s", steps=9, device="cpu")


def test_impossible_distillations_are_refused(
    teacher: Path, base: Path, rows: Path, tmp_path: Path
) -> None:
    task, out = custom_task("classification"), tmp_path / "s"
    words = train_tokenizer(["another vocabulary than that"] * 3, kind="wordpiece", vocab=60)
    narrow = dict(vocab=words.vocab_size, width=8, depth=1)
    write_checkpoint(
        Checkpoint(Network(bert(**(TINY | narrow)), {"mlm": 0}), words), tmp_path / "other"
    )
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    (tmp_path / "a.csv").write_text(ROWS.replace("yes", "maybe"))
    for model, data, ways, sentence in [
        (base, rows, {}, "no classify head"),
        (teacher, rows, {"layers": 5}, "1 to 4 layers, not 5"),
        (teacher, rows, {"student": tmp_path / "other"}, "different vocabulary"),
        (teacher, rows, {"student": tmp_path / "other", "layers": 1}, "--layers or --student"),
        (teacher, rows, {"student": base}, "larger than its teacher"),
        (teacher, rows, {"soft": 1.5}, "share of the loss"),
        (teacher, rows, {"temperature": 0}, "temperature must be positive"),
        (teacher, rows, {"adapter": "lora"}, "leave features, words and adapter out"),
        (teacher, rows, {"task": None}, "not a language model"),
        (teacher, tmp_path / "a.csv", {}, "does not have: maybe"),
        (tmp_path / "adapter", rows, {}, "is an adapter"),
        (tmp_path / "a.gguf", rows, {}, "GGUF"),
    ]:
        with pytest.raises(UsageError, match=sentence):
            distil_model(model, out, data, **{"task": task, "device": "cpu", **ways})


# ------------------------------------------------------------------ shared layers


def alike(heads: dict[str, int], rank: int = 0) -> Network:
    """A BERT whose layers are all equal; with a rank, its centred embeddings have only this many
    directions.
    """
    network = drawn(bert(**TINY), heads)
    with torch.no_grad():
        for block in network.trunk.blocks:
            block.load_state_dict(network.trunk.blocks[0].state_dict())
        embed = network.trunk.embed
        embed.norm.weight.uniform_(0.5, 2)  # type: ignore[operator, union-attr]
        embed.norm.bias.normal_()  # type: ignore[operator, union-attr]
        basis = torch.randn(rank, 16)
        for table in (embed.token, embed.position, embed.segment) if rank else ():
            table.weight.copy_(
                torch.randn(len(table.weight), rank) @ basis + torch.randn(len(table.weight), 1)
            )  # type: ignore[union-attr, arg-type, operator]
    return network


@pytest.mark.parametrize(("groups", "width", "rank"), [(1, 0, 0), (2, 16, 0), (1, 9, 8), (4, 9, 8)])
def test_equal_layers_and_thin_embeddings_may_be_shared(groups: int, width: int, rank: int) -> None:
    torch.manual_seed(0)
    old = alike({"classify": 3}, rank)
    new, batch = shared(old, groups, width), a_batch()
    assert count_parameters(new) < count_parameters(old) or groups == 4
    inputs = dict(keep=batch["keep"], segments=torch.randint(0, 2, (3, 8)))
    torch.testing.assert_close(
        new(batch["tokens"], **inputs)["classify"],
        old(batch["tokens"], **inputs)["classify"],
        rtol=1e-4,
        atol=1e-5,
    )


def test_layers_are_averaged_group_by_group() -> None:
    old = drawn(bert(**TINY), {"mlm": 0})
    new = shared(old, 2)
    for group, layers in enumerate([(0, 1), (2, 3)]):
        wanted = torch.stack([old.trunk.blocks[i].mlp.up.weight for i in layers]).mean(0)  # type: ignore[union-attr, arg-type]
        assert torch.equal(new.trunk.blocks[group].mlp.up.weight, wanted)  # type: ignore[union-attr]
    for groups, width in ((0, 0), (5, 0), (1, 17), (1, 1)):
        with pytest.raises(UsageError):
            shared(old, groups, width)


def test_a_gpt_of_a_thin_embedding_keeps_its_scores() -> None:
    torch.manual_seed(0)
    old = drawn(gpt2(**TINY), {"lm": 0})
    with torch.no_grad():
        basis = torch.randn(5, 16)
        for table in (old.trunk.embed.token, old.trunk.embed.position):
            table.weight.copy_(torch.randn(len(table.weight), 5) @ basis)  # type: ignore[union-attr, arg-type, operator]
    new, tokens = shared(old, 4, 6), a_batch()["tokens"]
    torch.testing.assert_close(new(tokens)["lm"], old(tokens)["lm"], rtol=1e-4, atol=1e-3)


def test_a_shared_bert_is_an_albert(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "albert"
    assert (
        run_command(
            ["compress", "share", "--model", str(base), "--embedding", "12", "--out", str(out)]
        )
        == 0
    )
    told = capsys.readouterr()
    assert f"{count_parameters(read_checkpoint(out).network):,}" in told.out
    assert "Train it again" in told.err
    theirs, tokens = (
        transformers.AutoModelForPreTraining.from_pretrained(out).eval(),
        torch.randint(0, 40, (2, 9)),
    )
    assert theirs.config.model_type == "albert"
    assert theirs.config.num_hidden_groups == 1
    with torch.no_grad():
        said = theirs(tokens)
        ours = read_checkpoint(out).network(tokens)
    torch.testing.assert_close(ours["mlm"], said.prediction_logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours["nsp"], said.sop_logits, rtol=1e-4, atol=1e-5)
    # ALBERT's embedding is always mapped: as wide as a layer, it is our own
    share_layers(base, tmp_path / "own", groups=2)
    assert json.loads((tmp_path / "own" / "config.json").read_text())["model_type"] == "malmoi"
    assert read_checkpoint(tmp_path / "own").network.config.groups == 2
