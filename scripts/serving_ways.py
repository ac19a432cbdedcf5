"""The ways to score one batch of a ranking config, which `bench_serving.py` times."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

from recsys import protos as pb
from recsys.config import features
from recsys.data.batch import Batch
from recsys.data.loader import Loader
from recsys.errors import ConfigError
from recsys.models import Ranker, build_model, layout_rule
from recsys.ops import SequenceLayout
from recsys.scoring.cache import UserCache
from recsys.scoring.prefill import CachedModel


class Scoring:
    """A model and one batch, scored in several ways.

    Raises:
        ConfigError: a candidate feature is multi-valued.
    """

    def __init__(self, pipeline: pb.Pipeline, microbatch: int, device: torch.device):
        torch.manual_seed(0)
        self.model: Ranker = build_model(pipeline).eval()
        draw_weights(self.model)
        self.model.to(device)
        loader = Loader.open(pipeline, "train", layout_rule(pipeline))
        batch = next(iter(loader.epoch(0)))
        self.kept, self.microbatch, self.device = batch.to(device), microbatch, device
        starts = range(0, int(batch.num_candidates.max()), microbatch)
        self.slices = [piece(pipeline, batch, start, start + microbatch).to(device) for start in starts]
        self.cached_model = CachedModel(self.model)
        self.cache: UserCache | None = None

    @property
    def batch(self) -> Batch:
        """A fresh copy of the batch, without anything derived from its layouts."""
        return self.kept.to(self.device)

    def uncached(self) -> Tensor:
        """Returns scores [N, tasks], with the whole history for each piece of candidates."""
        return self._join([self.model.score(piece.to(self.device)) for piece in self.slices])

    def one_pass(self) -> Tensor:
        """Returns scores [N, tasks]."""
        return self.model.score(self.batch)

    def prefill(self) -> object:
        """Returns a new cache."""
        return self.cached_model.prefill(self.batch)

    def cached(self) -> Tensor:
        """Returns scores [N, tasks]."""
        self.cache = self.cached_model.prefill(self.batch)
        return self.pieces()

    def pieces(self) -> Tensor:
        """Returns scores [N, tasks] against the cache of `cached`."""
        new = (piece.to(self.device) for piece in self.slices)
        return self._join([self.cached_model.score(piece, self.cache) for piece in new])

    def _join(self, scores: list[Tensor]) -> Tensor:
        """Joins the scores of the pieces, which hold the same rows, row by row."""
        rows = self.kept.num_candidates.shape[0]
        return torch.cat([piece.unflatten(0, (rows, -1)) for piece in scores], dim=1).flatten(0, 1)


def draw_weights(model: Ranker) -> None:
    """Draws weights with which scores differ from each other and depend on the history, like learned ones:
    the scores of an untrained model are nearly equal, and so would be wrong ones.
    """
    width = model.pipeline.model.embedding_dim
    for table in model.embed.parameters():
        torch.nn.init.normal_(table, std=width**-0.5)  # tokens are these times sqrt(E)
    for part in (*model.preprocess.modules(), *model.head.modules()):
        if isinstance(part, torch.nn.Linear):
            torch.nn.init.normal_(part.weight, std=part.in_features**-0.5)
    first = next(part for part in model.head.modules() if isinstance(part, torch.nn.Linear))
    with torch.no_grad():
        first.weight *= width**0.5


def piece(pipeline: pb.Pipeline, batch: Batch, start: int, stop: int) -> Batch:
    """Candidates number `start` to `stop - 1` of each row; all rows have equally many."""
    columns = {column.name: column for column in features.columns(pipeline)}
    counts = batch.num_candidates
    total = int(counts[0])
    kept = min(stop, total) - start

    def cut(values: Tensor) -> Tensor:
        return values.view(len(counts), total)[:, start : start + kept].flatten()

    def layout(full: SequenceLayout) -> SequenceLayout:
        if full.parts:
            return SequenceLayout.join([layout(part) for part in full.parts])
        dropped = total - kept
        return SequenceLayout(
            full.lengths - dropped, full.num_targets - dropped, num_contextual=full.num_contextual
        )

    values, lengths, sizes = [], [], []
    for key in batch.ids.keys():
        values_of_key, lengths_of_key = batch.ids[key].values(), batch.ids[key].lengths()
        if columns[key].side == pb.CANDIDATE:
            if columns[key].multi_valued:
                raise ConfigError(
                    f"features: {key} is multi-valued; such candidate features are not supported here"
                )
            values_of_key, lengths_of_key = cut(values_of_key), lengths_of_key - (total - kept)
        values.append(values_of_key)
        lengths.append(lengths_of_key)
        sizes.append(len(values_of_key))
    numbers = {
        name: cut(values_of_key) if columns[name].side == pb.CANDIDATE else values_of_key
        for name, values_of_key in batch.numbers.items()
    }
    return replace(
        batch,
        layout=layout(batch.layout),
        channel_layout=batch.channel_layout and layout(batch.channel_layout),
        num_candidates=torch.full_like(counts, kept),
        ids=KeyedJaggedTensor(
            batch.ids.keys(), torch.cat(values), lengths=torch.cat(lengths), length_per_key=sizes
        ),
        numbers=numbers,
        candidate_timestamps=cut(batch.candidate_timestamps),
        labels={name: cut(values_of_key) for name, values_of_key in batch.labels.items()},
    )
