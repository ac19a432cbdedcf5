"""`CodeGeneratorDeclaration`: facts about generators that configs need before a model is built."""

from collections.abc import Iterator

from recsys import protos as pb
from recsys.config.checks.values import BELOW_ONE, COUNT, POSITIVE, SHARE, limit
from recsys.config.checks.walk import Finding
from recsys.config.declarations import Choice
from recsys.config.registry import declare
from recsys.models.retriever_declaration import NextItemDeclaration

limit(pb.CodeGenerator, required=("item_feature", "bundle"))
limit(pb.ParallelCodes, {"temperature": POSITIVE})
limit(pb.ItemIds, {"temperature": POSITIVE, "weight": SHARE})
limit(pb.Decoding, {"beam_size": COUNT})
_LAYERS = {**dict.fromkeys(("num_layers", "num_heads", "ff_dim", "head_dim"), COUNT), "dropout": BELOW_ONE}
limit(pb.CodeDecoder, _LAYERS)
limit(pb.CodeEncoder, {**_LAYERS, "targets_per_row": COUNT})

EXACT_ITEMS = 100
"""Catalogues of up to this many items are scored whole unless the config says otherwise: up to there it costs
no more than a beam of 50, see experiments/2026-11-27-generators."""


@declare(pb.CodeGenerator)
class CodeGeneratorDeclaration(NextItemDeclaration):
    """Declares `CodeGenerator`, which scores items by the probabilities of their codes."""

    embeds_items = False
    may_change = (
        *NextItemDeclaration.may_change,
        "bundle",
        "decoding",
        "ids.weight",
        "encoder.targets_per_row",
    )

    @property
    def code_bundle(self) -> str:
        """The folder with the codes of the items."""
        return self.config.bundle

    @property
    def num_found(self) -> int | None:
        """Width of the beam that finds the best items; None if the model scores all of them."""
        decoding = self.config.decoding
        return decoding.beam_size if decoding.method == pb.Decoding.BEAM else None

    @property
    def scores_items(self) -> bool:
        """Whether the model answers with the scores of all items."""
        return not self.finds_items

    @property
    def outputs(self) -> list[str]:
        """The output: for each row the log-probability of every item, or of those that a beam has found."""
        return ["log_probability"]

    @property
    def protocol(self) -> dict[str, str]:
        """The rules that say which items can be found: seen ones, listed ones, and the width of the beam."""
        beam = {"beam_size": str(self.num_found)} if self.finds_items else {}
        ids = {"id_weight": f"{self.config.ids.weight:g}"} if self.mixes_scores else {}
        items = {"items": self.config.decoding.items} if self.config.decoding.items else {}
        return super().protocol | beam | ids | items

    @property
    def mixes_scores(self) -> bool:
        """Whether scores mix probabilities of ids and codes with a weight."""
        return self.config.HasField("ids")

    def choices(self) -> Iterator[Choice]:
        """Derives what all next-item families derive, and beam search from the width of a beam."""
        yield from super().choices()
        decoding, path = self.config.decoding, f"{self.path}.decoding"
        if decoding.HasField("beam_size"):
            yield Choice(decoding, path, "method", pb.Decoding.BEAM, f"{path}.beam_size")
        yield Choice(decoding, path, "beam_size", decoding.beam_size, "default")

    def choices_by_size(self) -> Iterator[Choice]:
        """Derives the method of decoding from the number of items."""
        decoding, path = self.config.decoding, f"{self.path}.decoding"
        if self.config.HasField("parallel"):
            yield Choice(decoding, path, "method", pb.Decoding.EXACT, f"{self.path}.parallel")
        for feature in self.pipeline.features:
            if feature.name == self.item_feature and feature.id.vocabulary.HasField("size"):
                small = feature.id.vocabulary.size <= EXACT_ITEMS
                method = pb.Decoding.EXACT if small else pb.Decoding.BEAM
                yield Choice(decoding, path, "method", method, "number of items")

    def findings(self) -> Iterator[Finding]:
        """Checks heads, the beam, and the table of the item, besides what all next-item families check."""
        yield from super().findings()
        yield from self._beam()
        yield from self._heads()
        yield from self._encoder() if self.config.HasField("encoder") else self._mixed()
        if self.config.HasField("ids") and not self.config.HasField("parallel"):
            problem = "ids mix with the scores of all items, which only `parallel` has at little cost; add it"
            yield Finding(f"{self.path}.ids", problem)
        tables = {feature.name: feature.id.table or feature.name for feature in self.pipeline.features}
        for index, feature in enumerate(self.pipeline.features):
            if feature.name != self.item_feature and feature.HasField("id"):
                if tables[feature.name] == tables.get(self.item_feature):
                    what = "the items of a generator have codes and no table; name another one"
                    yield Finding(f"features[{index}].id.table", what)

    def warnings(self) -> Iterator[Finding]:
        """Yields settings without effect."""
        yield from super().warnings()
        decoding = self.config.decoding
        if decoding.method == pb.Decoding.EXACT and decoding.HasField("beam_size"):
            yield Finding(f"{self.path}.decoding.beam_size", "without effect: the method is EXACT")

    def _heads(self) -> Iterator[Finding]:
        width = self.pipeline.model.embedding_dim
        for name in ("encoder", "decoder"):
            part = getattr(self.config, name)
            heads = part.num_heads
            if heads > 0 and width % heads and not part.HasField("head_dim"):
                problem = f"{heads} is given; model.embedding_dim, which is {width}, must be a multiple of it"
                yield Finding(f"{self.path}.{name}.num_heads", f"{problem} unless head_dim is given")

    def _mixed(self) -> Iterator[Finding]:
        for name in ("preprocessor", "mixer"):
            if not self.config.HasField(name):
                yield Finding(f"{self.path}.{name}", "not set; give it, or an encoder that reads codes")

    def _encoder(self) -> Iterator[Finding]:
        """An encoder reads codes and nothing else, and gives no state that heads could read."""
        for name in ("preprocessor", "mixer"):
            if self.config.HasField(name):
                yield Finding(f"{self.path}.{name}", "the encoder takes its place; remove one of the two")
        if self.config.HasField("parallel"):
            problem = "heads read one state, and an encoder has a token for each code; use `decoder`"
            yield Finding(f"{self.path}.parallel", problem)
        for index, feature in enumerate(self.pipeline.features):
            if feature.name != self.item_feature:
                problem = "the encoder reads the codes of items and nothing else; remove the feature"
                yield Finding(f"features[{index}]", problem)

    def _beam(self) -> Iterator[Finding]:
        size, path = self.num_found, f"{self.path}.decoding"
        if size is None:
            return
        if self.config.HasField("parallel"):
            what = "BEAM is given, but codes without an order have no prefixes; use EXACT"
            yield Finding(f"{path}.method", what)
        if self.pipeline.predict.top_k > size:
            what = f"{self.pipeline.predict.top_k} is given; a beam finds {path}.beam_size = {size} items"
            yield Finding("predict.top_k", f"{what}: make the beam larger or use method: EXACT")
        for index, metric in enumerate(self.config.metrics):
            k = getattr(getattr(metric, metric.WhichOneof("metric") or "", None), "k", 0)
            if k > size:
                what = f"k is {k}; a beam finds {path}.beam_size = {size} items"
                yield Finding(
                    f"{self.path}.metrics[{index}]", f"{what}: make the beam larger or use method: EXACT"
                )
