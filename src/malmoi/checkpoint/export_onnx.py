"""Exports any head of a model to ONNX, with dynamic batch size, length and padding.

B batch, C choices, T tokens, I inputs of an LSTM.
"""

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim

from malmoi.checkpoint.read_folder import Checkpoint
from malmoi.errors import ensure, explained, require_known, require_that
from malmoi.kernels.int8 import is_quantized
from malmoi.messages import quiet_logs
from malmoi.model import Network
from malmoi.model.heads import HEADS, POOLED_HEADS
from malmoi.model.trunks import BiLSTM, FeatureReader
from malmoi.system.files import replace_file, scratch_folder
from malmoi.system.packages import optional_package
from malmoi.system.progress import Progress, report_progress

ONNX_INPUTS = ("input_ids", "attention_mask", "token_type_ids")  # transformers' names
# bytes of weights: a protobuf file holds at most 2 GiB, so larger ones go to a second file
MAX_INLINE_BYTES = 1_900_000_000
MAX_SCORE_DIFFERENCE = 1e-3  # a larger difference from our fp32 scores means a faulty export
OPSET = 20


class OnnxModel(nn.Module):
    """Token ids, mask and segments in; the scores of one head, or hidden states, out."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network
        self.head = next((name for name in HEADS if name in network.heads), None)
        recurrent = network.reader.recurrent if network.reader is not None else None
        self.recurrent = None if recurrent is None else OnnxLSTM(recurrent)
        self.inputs = ONNX_INPUTS if network.config.segments > 1 else ONNX_INPUTS[:2]
        self.outputs = HEADS[self.head].outputs if self.head else ("last_hidden_state",)
        several = self.head is not None and HEADS[self.head].choices
        # the named dimensions of every input
        self.shape = ("batch", "choices", "length") if several else ("batch", "length")

    def forward(self, tokens: Tensor, mask: Tensor, segments: Tensor | None = None) -> Any:
        rows = tokens.flatten(0, -2)
        keep = mask.flatten(0, -2).bool()
        hidden = self.hidden(rows, keep, None if segments is None else segments.flatten(0, -2))
        if self.head is None:
            return hidden
        found = self.network.read(self.head, hidden, keep, firsts=self.pooled_places(keep))
        parts = self.split(found, tokens)
        return parts if len(parts) > 1 else parts[0]

    def split(self, scores: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
        """The head's scores as the graph's outputs: one per name in `outputs`."""
        if len(self.outputs) > 1:
            return scores.unbind(-1)
        return (scores.view(tokens.shape[:-1]) if len(self.shape) > 2 else scores,)

    def hidden(self, tokens: Tensor, keep: Tensor, segments: Tensor | None) -> Tensor:
        if self.recurrent is None:
            return self.network.hidden(tokens, keep=keep, segments=segments)
        states = self.network.trunk(tokens, keep=keep, segments=segments)
        reader = cast(FeatureReader, self.network.reader)
        return cast(Tensor, self.recurrent(reader.join(states), keep))

    def pooled_places(self, keep: Tensor) -> Tensor | None:
        """Flat positions of the pooled tokens; `Pooler` uses len(), which fixes the batch."""
        pool = self.network.config.pool
        if self.head not in POOLED_HEADS or self.network.reader is not None or pool == "mean":
            return None
        B, T = keep.shape
        first = keep.int().argmax(1)
        last = T - 1 - keep.flip(1).int().argmax(1)
        return torch.arange(B) * T + (first if pool == "first" else last)


class OnnxLSTM(nn.Module):
    """A BiLSTM as ONNX's own operator, which takes the length of each row."""

    def __init__(self, lstm: BiLSTM) -> None:
        super().__init__()
        self.units = lstm.lstm.hidden_size
        self.layers = nn.ParameterList()
        # per layer, forward then backward: W, R and their biases
        weights = lstm.lstm.all_weights
        for pair in zip(weights[::2], weights[1::2], strict=True):
            both = (map(_reordered, parts) for parts in zip(*pair, strict=True))
            w, r, b, c = (torch.stack(tuple(parts)) for parts in both)
            self.layers.extend((w, r, torch.cat((b, c), 1)))

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        # [T, B, I]
        lengths = keep.sum(1).int()
        x = x.transpose(0, 1)
        for i in range(0, len(self.layers), 3):
            y = torch.onnx.ops.symbolic(
                "LSTM",
                (x, *self.layers[i : i + 3], lengths),
                {"direction": "bidirectional", "hidden_size": self.units},
                dtype=x.dtype,
                shape=(x.size(0), 2, x.size(1), self.units),
                version=OPSET,
            )
            x = y.transpose(1, 2).flatten(2)
        return x.transpose(0, 1)


def _reordered(weight: Tensor) -> Tensor:
    """Gates in ONNX's order, i o f c, from torch's i f g o."""
    i, f, g, o = weight.detach().chunk(4)
    return torch.cat((i, o, f, g))


def export_onnx(
    checkpoint: Checkpoint, path: Path, dtype: str = "fp32", inline_bytes: int = MAX_INLINE_BYTES
) -> float:
    """Writes the file, checked in ONNX Runtime; large weights beside it. The largest difference."""
    network = checkpoint.network.eval()
    size = sum(weight.nbytes for weight in network.parameters())
    _check(network, dtype, size)
    graph = OnnxModel(network)
    with _exporter(), scratch_folder(path.parent) as folder:
        made = folder / path.name
        report_progress(Progress("trace the graph", 0))
        program = _program(graph)
        _describe(program.model, checkpoint, graph)
        program.save(made, external_data=size > inline_bytes)
        if dtype == "int8":
            _quantize(made)
        report_progress(Progress("compare the scores with ours", 0))
        far = _distance(graph, made)
        ensure(
            dtype != "fp32" or far < MAX_SCORE_DIFFERENCE,
            "ONNX Runtime's scores differ from ours by {far:.1g}, so {path} was not written.",
            far=far,
            path=path.name,
        )
        for file in sorted(made.parent.iterdir(), reverse=True):  # NAME.onnx.data before NAME.onnx
            replace_file(path.parent / file.name, file.replace)
    return far


def _check(network: Network, dtype: str, size: int) -> None:
    require_known(dtype, ("fp32", "int8"), "This file cannot be written as {name!r}.{hint}")
    require_that(
        not is_quantized(network),
        "These weights are int8 already: export the model that they are from.",
    )
    require_that(
        dtype != "int8" or size <= MAX_INLINE_BYTES,
        "ONNX Runtime can quantise models of up to 2 GB: export this as fp32.",
    )
    network.require_attention("ONNX export")
    require_that(
        not network.trunk.has_soft_tokens,
        "An ONNX file cannot hold soft tokens: they belong to an adapter.",
    )


@contextmanager
def _exporter() -> Iterator[None]:
    """Silences the exporter, and explains which package is missing if any is."""
    for name in ("onnx", "onnxscript", "onnxruntime"):
        optional_package(name, "An ONNX file", "onnx onnxscript onnxruntime")
    with quiet_logs(), warnings.catch_warnings(action="ignore"):
        yield


def _program(graph: OnnxModel) -> Any:
    """Traces with dynamic lengths; torch raises if it would fix an example's shape."""
    context = graph.network.config.context
    example = example_inputs(graph, 2, min(8, context))
    limits = {name: Dim(name) for name in ("batch", "choices")}
    limits["length"] = Dim("length", max=context)
    shapes = tuple({i: limits[name] for i, name in enumerate(graph.shape)} for _ in example)
    # torch has its own exception hierarchy for what it cannot trace
    with explained(Exception, "This model cannot be turned into ONNX: {type}: {reason}"):
        return torch.onnx.export(
            torch.export.export(graph, example, dynamic_shapes=shapes),
            dynamo=True,
            opset_version=OPSET,
            input_names=graph.inputs,
            output_names=graph.outputs,
            verbose=False,
        )


def _describe(model: Any, checkpoint: Checkpoint, graph: OnnxModel) -> None:
    """Adds metadata: task, class names and settings; nothing about this machine."""
    for part in (model.graph, *model.graph):
        part.metadata_props.clear()
    _name_axes(model, graph)
    named = {str(i): name for i, name in enumerate(checkpoint.labels)}
    meta = {"labels": checkpoint.labels, "malmoi": checkpoint.extra, "id2label": named}
    model.metadata_props.update(
        {"head": graph.head or "none", "context": str(graph.network.config.context)}
        | {name: json.dumps(value, ensure_ascii=False) for name, value in meta.items() if value}
    )


def _name_axes(model: Any, graph: OnnxModel) -> None:
    """Names the axes that may vary (batch, choices, length) instead of torch's s1, s27."""
    import onnx_ir

    given = model.graph.inputs[0].shape
    names = {str(dim.value): name for dim, name in zip(given, graph.shape, strict=True)}
    made = (value for node in model.graph for value in node.outputs)
    for value in (*model.graph.inputs, *made):
        if value.shape is not None:
            value.shape = onnx_ir.Shape(
                dim if isinstance(dim, int) else names.get(str(dim.value), str(dim.value))
                for dim in value.shape
            )


def _quantize(file: Path) -> None:
    """Quantises matrices by row; activations are quantised dynamically.

    Weights keep 7 bits: without VNNI, ONNX Runtime adds pairs of products in 16 bits, and those of
    8 bits overflow without a word.
    """
    import onnx
    from onnxruntime.quantization import quantize_dynamic

    model = onnx.load(file)
    del model.graph.value_info[:]  # drops shapes of weights that are transposed on the way
    quantize_dynamic(model, file, per_channel=True, reduce_range=True)


@torch.inference_mode()
def _distance(graph: OnnxModel, file: Path) -> float:
    """The largest difference of a score, on a batch of another shape than the traced one."""
    import onnxruntime

    given = example_inputs(graph, 3, min(13, graph.network.config.context))
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    inputs = {name: part.numpy() for name, part in zip(graph.inputs, given, strict=True)}
    both = zip(expected_scores(graph, given), session.run(None, inputs), strict=True)
    gaps = [np.abs(ours - theirs) for ours, theirs in both]
    mask = given[1].numpy() > 0
    places = [mask if gap.shape[: mask.ndim] == mask.shape else ... for gap in gaps]
    return max(float(gap[some].max()) for gap, some in zip(gaps, places, strict=True))


def example_inputs(graph: OnnxModel, rows: int, length: int) -> tuple[Tensor, ...]:
    """Example inputs: random tokens, with right padding in every row but the first."""
    c = graph.network.config
    shape = (rows, 2, length) if len(graph.shape) > 2 else (rows, length)
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, c.vocab, shape, generator=random)
    mask = torch.ones_like(tokens)
    mask[1:, ..., length // 2 + 1 :] = 0
    segments = [torch.randint(0, c.segments, shape, generator=random)] if c.segments > 1 else []
    return (tokens, mask, *segments)


def expected_scores(graph: OnnxModel, given: tuple[Tensor, ...]) -> list[Any]:
    """The network's own outputs for these inputs."""
    rows, mask, *segments = (part.flatten(0, -2) for part in given)
    network, keep = graph.network, mask.bool()
    hidden = network.hidden(rows, keep=keep, segments=segments[0] if segments else None)
    if graph.head is None:
        return [hidden.numpy()]
    return [part.numpy() for part in graph.split(network.read(graph.head, hidden, keep), given[0])]
