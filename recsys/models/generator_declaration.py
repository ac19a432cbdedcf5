"""`CodeGeneratorDeclaration`: facts about generators that configs need before a model is built."""

from collections.abc import Iterator

from recsys import protos as pb
from recsys.config.checks.values import BELOW_ONE, COUNT, limit
from recsys.config.checks.walk import Finding
from recsys.config.registry import declare
from recsys.models.retriever_declaration import NextItemDeclaration

limit(pb.CodeGenerator, required=("item_feature", "bundle", "preprocessor", "mixer"))
limit(pb.CodeDecoder, {"num_layers": COUNT, "num_heads": COUNT, "ff_dim": COUNT, "dropout": BELOW_ONE})


@declare(pb.CodeGenerator)
class CodeGeneratorDeclaration(NextItemDeclaration):
    """Declares `CodeGenerator`, which scores items by the probabilities of their codes."""

    scores_items = True
    embeds_items = False

    @property
    def outputs(self) -> list[str]:
        """The output: for each row the log-probability of every item."""
        return ["log_probability"]

    def findings(self) -> Iterator[Finding]:
        """Checks heads and the table of the item, after the checks of all next-item families."""
        yield from super().findings()
        width, heads = self.pipeline.model.embedding_dim, self.config.decoder.num_heads
        if heads > 0 and width % heads:
            problem = f"{heads} is given; model.embedding_dim, which is {width}, must be a multiple of it"
            yield Finding(f"{self.path}.decoder.num_heads", problem)
        tables = {feature.name: feature.id.table or feature.name for feature in self.pipeline.features}
        for index, feature in enumerate(self.pipeline.features):
            if feature.name != self.item_feature and feature.HasField("id"):
                if tables[feature.name] == tables.get(self.item_feature):
                    problem = "the items of a generator have codes and no table; name another one"
                    yield Finding(f"features[{index}].id.table", problem)
