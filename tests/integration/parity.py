"""Compares predictions of a trained run with its evaluation on the same rows, without compilation.

The program of a package runs in this process: the scoring graph, or what the exporter captures of it, which
takes seconds.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn
from torch.fx.experimental import _config as symbolic

from recsys import protos as pb
from recsys.config.declarations import model_of
from recsys.data.batch import Batch
from recsys.data.loader import Loader
from recsys.data.schema.vocabulary import mappings
from recsys.inference.cached_programs import CachedPrograms, compile_programs
from recsys.inference.item_embeddings import catalogue
from recsys.models import Model, Ranker, build_model, layout_rule
from recsys.scoring.cached_signature import CacheSpec
from recsys.scoring.signature import ScoringGraph, inputs_of, scoring_signature
from recsys.training import checkpoint
from recsys.training.session import CHECKPOINTS


def close(pipeline: pb.Pipeline) -> dict[str, Any]:
    """Tolerances for predictions of the same rows. In bfloat16 another order of sums may round to a neighbour
    on some CPUs; then the tolerance of packages applies."""
    if pipeline.model.precision == pb.BF16:
        return {"rtol": pipeline.export.parity_tolerance, "atol": pipeline.export.parity_tolerance}
    return {"rtol": 1e-4, "atol": 1e-5}


def trained_model(run: Path, pipeline: pb.Pipeline) -> Model:
    """The newest weights of a run, to evaluate."""
    model = build_model(pipeline).eval()
    checkpoint.load_weights(checkpoint.find(run / CHECKPOINTS, "newest"), model)
    return model


def evaluated_batches(pipeline: pb.Pipeline) -> list[Batch]:
    """The rows of `data.test` as evaluation reads them."""
    return list(Loader.open(pipeline, "test", layout_rule(pipeline), mode="evaluate").epoch(0))


def captured(model: Model, batch: Batch) -> Callable[..., Tensor]:
    """The program that a package is compiled from, with every named size dynamic."""
    graph, specs = ScoringGraph(model).eval(), scoring_signature(model.pipeline)
    dims = {name: torch.export.Dim(name, min=0) for spec in specs for name in spec.dims if not name.isdigit()}
    shapes = tuple(
        {axis: dims[name] for axis, name in enumerate(spec.dims) if name in dims} for spec in specs
    )
    inputs = inputs_of(batch, model.pipeline)
    with symbolic.patch(backed_size_oblivious=True), torch.no_grad():
        program = torch.export.export(graph, inputs, dynamic_shapes=(shapes,), strict=False)
    if model.pipeline.model.HasField("generator"):
        # A search on a GPU is recorded, which it cannot be if the host reads a number.
        assert not any(node.target is torch.ops.aten.item.default for node in program.graph.nodes)
    return program.module()


def with_cache(package: SimpleNamespace, model: Ranker) -> SimpleNamespace:
    """The same package as if it were exported with `export.cached_scoring`; its graphs are not captured."""
    runs = []

    def compile_to(graph: nn.Module, *_: object) -> None:
        runs.append(torch.no_grad()(lambda inputs: as_tuple(graph(*inputs))))

    compile_programs(model, compile_to)
    cached = CachedPrograms(model.pipeline, CacheSpec.of(model), *runs)
    methods = {"prefill": cached.prefill, "extend": cached.extend, "score": cached.score}
    return SimpleNamespace(**{**vars(package), "cached": cached}, **methods)


def as_tuple(output: Any) -> tuple[Tensor, ...]:
    return tuple(item.detach() for item in (output if isinstance(output, list | tuple) else (output,)))


def captured_package(model: Model, batches: list[Batch]) -> SimpleNamespace:
    """A package for `Predictor` whose program was captured from the first batch."""
    return package_of(model, batches, captured(model, batches[0]))


def package_of(model: Model, batches: list[Batch], program: Callable[..., Tensor]) -> SimpleNamespace:
    """A package for `Predictor` with a program that agrees with the model on all batches."""
    pipeline = model.pipeline
    with torch.no_grad():
        for batch in batches:
            torch.testing.assert_close(
                program(*inputs_of(batch, pipeline)), model.score(batch), **close(pipeline)
            )
    ranker = pipeline.model.HasField("ranker")
    return SimpleNamespace(
        pipeline=pipeline,
        items=None if ranker else catalogue(model, batches[0], pipeline),
        description=SimpleNamespace(
            device="cpu", outputs=[task.name for task in pipeline.model.ranker.tasks]
        ),
        run=lambda batch: program(*inputs_of(batch, pipeline)).detach(),
        cached=None,
    )


def assert_predicted(model: Model, batches: list[Batch], rows: pa.Table, answers: pa.Table) -> None:
    """Answers to the rows of the test split are what the model says of its batches."""
    ranker = model.pipeline.model.HasField("ranker")
    with torch.no_grad():
        actual = {
            row: output
            for batch in batches
            for row, output in zip(batch.rows.row.tolist(), per_row(model, batch), strict=True)
        }
    assert len(rows) == len(answers) == len(actual) > 0
    items = None if ranker else Items(model, batches[0])
    for row, (given, answer) in enumerate(zip(rows.to_pylist(), answers.to_pylist(), strict=True)):
        for column in model.pipeline.data.key_columns:
            assert given[column] == answer[column]
        if items is None:
            assert_scores(model.pipeline, actual[row], given, answer)
        else:
            items.assert_best(actual[row], given, answer)


def per_row(model: Model, batch: Batch) -> list[Tensor]:
    """Predictions of a row's candidates, or its query, or its scores of all items."""
    scores = model.score(batch)
    ranker = model.pipeline.model.HasField("ranker")
    return list(scores.split(batch.num_candidates.tolist()) if ranker else scores)


def assert_scores(pipeline: pb.Pipeline, expected: Tensor, given: dict, answer: dict) -> None:
    """Every candidate is scored; evaluation keeps the first ones of a row."""
    names = [task.name for task in pipeline.model.ranker.tasks]
    assert {len(answer[name]) for name in names} == {len(given["candidate_item_id"])}
    kept = pipeline.data.max_candidates
    predicted = torch.tensor([answer[name][:kept] for name in names]).T
    torch.testing.assert_close(predicted.reshape(-1, len(names)), expected, **close(pipeline))


class Items:
    """The vectors of all items by their original ids."""

    def __init__(self, model: Model, batch: Batch):
        declared = model_of(model.pipeline)
        self.item, self.scored = declared.item_feature, declared.scores_items
        self.top_k = model.pipeline.predict.top_k
        self.close = close(model.pipeline)
        vocabulary = mappings(model.pipeline)[self.item]
        self.ids = vocabulary.ids.to_pylist()
        # Row 0 of the table stands for unknown items and is no vector.
        self.places = torch.from_numpy(vocabulary.map(vocabulary.ids)) - 1
        with torch.no_grad():
            self.vectors = model.item_vectors(batch)[self.places].double().numpy()

    def assert_best(self, query: Tensor, given: dict, answer: dict) -> None:
        """The best of all that the row has not seen, with their scores."""
        seen = set(given[f"uih_{self.item}"])
        if self.scored:
            of_items = query[self.places].double().numpy()
        else:
            of_items = self.vectors @ query.double().numpy()
        scores = dict(zip(self.ids, of_items, strict=True))
        best = sorted((score for item, score in scores.items() if item not in seen), reverse=True)[
            : self.top_k
        ]
        assert len(set(answer[self.item]) - seen) == len(answer[self.item]) == self.top_k
        np.testing.assert_allclose(answer["score"], best, **self.close)
        np.testing.assert_allclose([scores[item] for item in answer[self.item]], best, **self.close)
        if self.scored:
            codes = dict(zip(self.ids, self.vectors.tolist(), strict=True))
            assert answer["codes"] == [codes[item] for item in answer[self.item]]
