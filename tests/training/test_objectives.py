"""Objectives: the loss in pieces equals the plain one, sums and scales, and agrees with
transformers'.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

from conftest import native_bf16
from malmoi.checkpoint.hf_tables import FAMILY_TABLES
from malmoi.checkpoint.translate import to_hf
from malmoi.errors import UsageError
from malmoi.model import Network, initialise
from malmoi.model.families import bert, electra, gpt2
from malmoi.training.loss_module import LossModule, summarize_validation
from malmoi.training.losses import IGNORE_LABEL, ForwardPass, count_labels, lm, mlm, nsp, objective
from malmoi.training.losses.base import (
    DETECTION_BESIDE_MLM,
    DETECTION_WEIGHT,
    MAX_LOGITS,
    linear_cross_entropy,
)

TINY: dict[str, Any] = dict(
    vocab=61, context=24, width=16, depth=2, heads=2, dropout=0.0, attention_dropout=0.0
)


class Head(nn.Module):
    """The part of a vocabulary head that the loss reads."""

    def __init__(self, vocab: int, width: int, *, bias: bool, cap: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(vocab, width))
        self.bias = nn.Parameter(torch.randn(vocab)) if bias else None
        self.cap = cap


def plain(x: Tensor, head: Any, labels: Tensor) -> Tensor:
    logits = F.linear(x, head.weight, head.bias)
    logits = head.cap * torch.tanh(logits / head.cap) if head.cap else logits
    return F.cross_entropy(
        logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORE_LABEL, reduction="sum"
    )


def slopes(loss: Tensor, x: Tensor, head: Any) -> list[Tensor]:
    wanted = [x, head.weight, *([head.bias] if head.bias is not None else [])]
    return list(torch.autograd.grad(3.0 * loss, wanted))


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 23),
    vocab=st.integers(2, 70),
    bias=st.booleans(),
    cap=st.sampled_from([0.0, 2.0]),
    piece=st.integers(1, 900),
    ignored=st.floats(0, 1),
)
def test_the_loss_in_pieces_is_the_plain_loss(
    rows: int, vocab: int, bias: bool, cap: float, piece: int, ignored: float
) -> None:
    torch.manual_seed(rows * 100 + vocab)
    head: Any = Head(vocab, 5, bias=bias, cap=cap).double()
    x = torch.randn(rows, 5, dtype=torch.double, requires_grad=True)
    labels = torch.where(torch.rand(rows) < ignored, IGNORE_LABEL, torch.randint(vocab, (rows,)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MAX_LOGITS, "cpu", piece)
        ours = linear_cross_entropy(x, head, labels)
        with torch.no_grad():
            forward_only = linear_cross_entropy(x, head, labels)
    wanted = plain(x, head, labels)
    for loss in (ours, forward_only):
        # it is summed in fp32
        torch.testing.assert_close(loss.double(), wanted, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(slopes(ours, x, head), slopes(wanted, x, head), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5)


def test_half_precision_stays_near() -> None:
    torch.manual_seed(0)
    head: Any = Head(300, 32, bias=True)
    x = torch.randn(4, 20, 32, requires_grad=True)
    labels = torch.randint(300, (4, 20))
    with native_bf16():
        with torch.autocast("cpu", torch.bfloat16):
            ours = linear_cross_entropy(x, head, labels)
        ours_slopes = slopes(ours, x, head)
    assert ours.dtype == torch.float32
    wanted = plain(x, head, labels)
    torch.testing.assert_close(ours, wanted, rtol=1e-2, atol=1e-2)
    for mine, theirs in zip(ours_slopes, slopes(wanted, x, head), strict=True):
        assert F.cosine_similarity(mine.flatten().float(), theirs.flatten(), dim=0) > 0.999


# ---- objectives as values


def network(objective_name: str, seed: int = 0) -> Network:
    config = gpt2(**TINY, init_std=0.2) if objective_name == "lm" else bert(**TINY, init_std=0.2)
    return initialise(Network(config, dict.fromkeys(objective(objective_name).heads, 0)), seed)


def bert_batch(rows: int = 3, seed: int = 1) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    tokens = torch.randint(5, 61, (rows, 12))
    keep = torch.arange(12) < torch.tensor([12, 9, 7, 11][:rows])[:, None]
    slots = torch.tensor([2, 14, 25, 0])
    labels = torch.tensor([7, 8, 9, IGNORE_LABEL])  # the last slot only fills up
    following = torch.randint(2, (rows,))
    segments = (torch.arange(12) > 5).long().expand(rows, 12).contiguous()
    return dict(
        tokens=tokens,
        keep=keep,
        segments=segments,
        mlm_slots=slots,
        mlm_labels=labels,
        nsp_labels=following,
    )


def loss_of(net: Network, what: Any, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    return LossModule(net, what)(batch, count_labels(what, batch))  # type: ignore[no-any-return]


def test_objectives_add_and_scale() -> None:
    net, batch = network("mlm+nsp"), bert_batch()
    words, _ = loss_of(net, mlm(), batch)
    pairs, _ = loss_of(net, nsp(), batch)
    both = mlm() + 0.25 * nsp()
    loss, means = loss_of(net, both, batch)
    torch.testing.assert_close(loss, words + 0.25 * pairs)
    # the loss reported for a head is its own
    torch.testing.assert_close(means["nsp"], pairs.detach())
    assert both.heads == ("mlm", "nsp")
    torch.testing.assert_close(loss_of(net, 2 * both, batch)[0], 2 * loss)


def test_an_unknown_objective_offers_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"mlm\+nsp"):
        objective("mlm+nspp")


def test_validation_sums_become_metrics() -> None:
    net, batch = network("mlm+nsp"), bert_batch()
    what = objective("mlm+nsp")
    sums = {name: float(value) for name, value in LossModule(net, what).measure(batch).items()}
    metrics = summarize_validation(sums, {"mlm": 1.0, "nsp": 1.0})
    loss, means = loss_of(net, what, batch)
    assert metrics["valid_loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert metrics["nsp_loss"] == pytest.approx(means["nsp"].item(), rel=1e-6)
    scores = net(batch["tokens"], keep=batch["keep"], segments=batch["segments"])
    right = (scores["nsp"].argmax(-1) == batch["nsp_labels"]).float().mean()
    assert metrics["nsp_accuracy"] == pytest.approx(float(right))


# ---- transformers computes the same


def test_the_lm_loss_is_that_of_transformers() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    net = network("lm")
    table = FAMILY_TABLES["gpt2"]
    theirs = GPT2LMHeadModel(
        GPT2Config(**table.write_config(net.config), bos_token_id=0, eos_token_id=0)
    ).eval()
    theirs.load_state_dict(to_hf(table, net), strict=False)
    tokens = torch.randint(61, (3, 20))
    batch = {"tokens": tokens[:, :-1], "lm_labels": tokens[:, 1:]}
    ours, _ = loss_of(net, lm(), batch)
    torch.testing.assert_close(ours, theirs(tokens, labels=tokens).loss, rtol=1e-5, atol=1e-5)


def test_the_bert_loss_is_that_of_transformers() -> None:
    from transformers import BertConfig, BertForPreTraining

    net, batch = network("mlm+nsp"), bert_batch()
    table = FAMILY_TABLES["bert"]
    theirs = BertForPreTraining(BertConfig(**table.write_config(net.config))).eval()
    theirs.load_state_dict(to_hf(table, net), strict=False)
    labels = torch.full((3 * 12,), IGNORE_LABEL)
    labels[batch["mlm_slots"][:3]] = batch["mlm_labels"][:3]
    wanted = theirs(
        batch["tokens"],
        attention_mask=batch["keep"].long(),
        token_type_ids=batch["segments"],
        labels=labels.view(3, 12),
        next_sentence_label=batch["nsp_labels"],
    )
    ours, _ = loss_of(net, objective("mlm+nsp"), batch)
    torch.testing.assert_close(ours, wanted.loss, rtol=1e-5, atol=1e-5)


# ---- micro-batches


def test_replaced_tokens_are_found_by_the_rule_of_clark() -> None:
    """Equation 1 to 4 by hand: masks, what the generator draws for them, and who replaced what."""
    sizes = TINY | dict(width=32, embed_width=12, hidden=48, init_std=0.3)
    net = initialise(Network(electra(**sizes), {"generator": 0, "detect": 0}), 0)
    what, batch = objective("electra"), bert_batch()
    torch.manual_seed(3)
    done = ForwardPass.of(net, batch)
    loss, means = what(done, count_labels(what, batch))
    generator, flat = net.heads["generator"], batch["tokens"].flatten()
    inputs = {"segments": batch["segments"], "keep": batch["keep"]}
    logits = generator(generator.trunk(batch["tokens"], **inputs)).flatten(0, 1)[batch["mlm_slots"]]
    chosen = batch["mlm_labels"] != IGNORE_LABEL
    torch.manual_seed(3)
    drawn = torch.multinomial(logits.softmax(-1), 1)[:, 0]
    text, replaced = flat.clone(), torch.zeros_like(flat)
    for slot, label, token in zip(
        batch["mlm_slots"][chosen], batch["mlm_labels"][chosen], drawn[chosen], strict=True
    ):
        text[slot], replaced[slot] = token, token != label
    found = net(text.view_as(batch["tokens"]), heads=("detect",), **inputs)["detect"]
    keep = batch["keep"].bool()
    truth = replaced.view_as(keep).float()
    detection = F.binary_cross_entropy_with_logits(found[keep], truth[keep])
    masked = F.cross_entropy(logits[chosen], batch["mlm_labels"][chosen])
    torch.testing.assert_close(means["detect"], detection.detach())
    torch.testing.assert_close(means["mlm"], masked.detach())
    torch.testing.assert_close(loss, masked + DETECTION_WEIGHT * detection)
    assert 0 < replaced.sum() < chosen.sum() + 1
    # the discriminator teaches the generator nothing but the embeddings they share
    (DETECTION_WEIGHT * detection).backward()
    assert all(p.grad is None for p in generator.trunk.blocks.parameters())
    assert net.trunk.embed.token is generator.trunk.embed.token


def test_some_masks_are_filled_and_what_the_generator_wrote_into_others_is_found() -> None:
    """Of `mlm+rtd` by hand: own masks stay, are predicted, and are not judged."""
    sizes = TINY | dict(hidden=48, init_std=0.3, generator_share=0.5, generator_depth=1)
    net = initialise(Network(bert(**sizes), {"mlm": 0, "generator": 0, "detect": 0}), 0)
    generator, batch = net.heads["generator"], bert_batch()
    assert len(generator.trunk.blocks) == 1
    own = torch.tensor([False, True, False, False])
    batch["own_labels"] = torch.where(own, batch["mlm_labels"], IGNORE_LABEL)
    torch.manual_seed(3)
    what = objective("mlm+rtd")
    loss, means = what(ForwardPass.of(net, batch), count_labels(what, batch))
    inputs = {"segments": batch["segments"], "keep": batch["keep"]}
    logits = generator(generator.trunk(batch["tokens"], **inputs)).flatten(0, 1)[batch["mlm_slots"]]
    torch.manual_seed(3)
    drawn = torch.multinomial(logits.softmax(-1), 1)[:, 0]
    text = batch["tokens"].flatten().clone()
    replaced, judged = torch.zeros_like(text), batch["keep"].flatten().clone()
    for i in (0, 2):
        slot = batch["mlm_slots"][i]
        text[slot], replaced[slot] = drawn[i], drawn[i] != batch["mlm_labels"][i]
    judged[batch["mlm_slots"][1]] = False
    found = net(text.view_as(batch["tokens"]), heads=("mlm", "detect"), **inputs)
    filled = found["mlm"].flatten(0, 1)[batch["mlm_slots"]][own]
    wanted = {
        "mlm": F.cross_entropy(filled, batch["mlm_labels"][own]),
        "generator": F.cross_entropy(logits[:3], batch["mlm_labels"][:3]),
        "detect": F.binary_cross_entropy_with_logits(
            found["detect"].flatten()[judged], replaced[judged].float()
        ),
    }
    torch.testing.assert_close(means, {name: mean.detach() for name, mean in wanted.items()})
    torch.testing.assert_close(
        loss, wanted["mlm"] + wanted["generator"] + DETECTION_BESIDE_MLM * wanted["detect"]
    )
    measured = summarize_validation(
        {name: float(total) for name, total in LossModule(net, what).measure(batch).items()},
        {"mlm": 1.0, "generator": 1.0, "detect": DETECTION_BESIDE_MLM},
    )
    assert measured["mlm_accuracy"] in (0.0, 1.0)
    assert 0 <= measured["detect_accuracy"] <= 1


def gradients(net: Network, what: Any, batches: list[dict[str, Tensor]]) -> list[Tensor]:
    """Of several passes, as the trainer takes them: each is its share of all labels."""
    parts = [count_labels(what, batch) for batch in batches]
    counts = {name: torch.stack([part[name] for part in parts]).sum() for name in parts[0]}
    net.zero_grad()
    for batch in batches:
        LossModule(net, what)(batch, counts)[0].backward()
    return [p.grad.clone() for p in net.parameters() if p.grad is not None]


def test_four_passes_of_two_are_one_of_eight() -> None:
    net = network("lm").double()
    tokens = torch.randint(61, (8, 20))
    whole = {"tokens": tokens[:, :-1], "lm_labels": tokens[:, 1:].clone()}
    whole["lm_labels"][::3, 5:] = IGNORE_LABEL  # uneven counts
    pieces = [{name: value[i : i + 2] for name, value in whole.items()} for i in range(0, 8, 2)]
    for one, four in zip(gradients(net, lm(), [whole]), gradients(net, lm(), pieces), strict=True):
        torch.testing.assert_close(one, four, rtol=1e-6, atol=1e-6)


def test_uneven_masks_count_as_they_should() -> None:
    net, what = network("mlm+nsp").double(), objective("mlm+nsp")
    first, second = bert_batch(4, seed=1), bert_batch(4, seed=2)
    # 3 masked here, 1 there
    second |= {"mlm_slots": torch.tensor([1]), "mlm_labels": torch.tensor([9])}
    whole = {name: torch.cat([first[name], second[name]]) for name in first}
    whole["mlm_slots"] = torch.cat([first["mlm_slots"], second["mlm_slots"] + 4 * 12])
    for one, two in zip(
        gradients(net, what, [whole]), gradients(net, what, [first, second]), strict=True
    ):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6)


def test_a_pass_reads_scores_off_its_heads() -> None:
    net, batch = network("mlm+nsp"), bert_batch()
    hidden = net.trunk(batch["tokens"], keep=batch["keep"], segments=batch["segments"])
    assert ForwardPass(net, hidden, batch).scores("nsp").shape == (3, 2)
    with pytest.raises(UsageError, match="classify"):
        ForwardPass(net, hidden, batch).scores("classify")
    assert replace(ForwardPass(net, hidden, batch), batch={}).scores("mlm").shape == (3, 12, 61)
