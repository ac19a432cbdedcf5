"""All combinations of a ranker's parts against one brute-force model written from the specification.

The default suite runs a part of the product in which any three values come together, and `--slow` all of it.
Caches that grow are tried on a part in which any two do.
"""

import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from recsys import protos as pb
from recsys.config import checks
from recsys.models import Model
from recsys.scoring.prefill import CachedModel
from recsys.scoring.scorer import EagerModel, Scorer
from tests.modules.pipelines import RANKERS, Row, random_rows
from tests.oracle import models
from tests.oracle.combinations import AXES, SIZES, Combination, covering, name, pipeline, product
from tests.oracle.ranker import BruteForceRanker

PRODUCT = product()
COVERING, PAIRS = covering(PRODUCT, 3), covering(PRODUCT, 2)


def whole(model: Model, written: pb.Pipeline, rows: list[Row]) -> Tensor:
    """Contextual tokens, history and candidates at once."""
    return model.score(models.batch(written, rows))


def cached(model: Model, written: pb.Pipeline, rows: list[Row]) -> Tensor:
    """Contextual tokens and history first, then all candidates."""
    batch, cached_model = models.batch(written, rows), CachedModel(model)
    return cached_model.score(batch, cached_model.prefill(batch))


def in_microbatches(model: Model, written: pb.Pipeline, rows: list[Row]) -> Tensor:
    """As `cached`, with two candidates of a row at a time, which is a target group."""
    batch, program = models.batch(written, rows), EagerModel(model)
    scorer = Scorer(program, model.pipeline, cached_piece=2)
    return scorer.score_cached(batch, program.prefill(batch)).scores()


def extended(model: Model, written: pb.Pipeline, rows: list[Row]) -> Tensor:
    """A part of the history at an earlier time, the rest of it later, then all candidates."""
    middle = [(2 * len(row.uih_timestamps) + 2) // 3 for row in rows]
    before = [row.with_events(range(n)) for row, n in zip(rows, middle, strict=True)]
    before = [row.changed(request_time=row.request_time - 700) for row in before]
    since = [row.with_events(range(n, len(row.uih_timestamps))) for row, n in zip(rows, middle, strict=True)]
    cached_model = CachedModel(model)
    cache = cached_model.prefill(models.batch(written, before))
    cache = cached_model.extend(models.batch(written, since), cache)
    return cached_model.score(models.batch(written, rows), cache)


Form = Callable[[Model, pb.Pipeline, list[Row]], Tensor]
"""A way from a model and rows to predictions [N, tasks] for their candidates."""

FORMS: tuple[Form, ...] = (whole, cached, in_microbatches)

GROWING = {"reads": "contextual reads not", "biases": "positions only"}
GROWING_POSITIONS = ("no positions", "from the start, without ages")
"""With these a cache can be extended: nothing that is known of old tokens changes."""


def compare(written: pb.Pipeline, rows: list[Row], *forms: Form, tolerance: float = 1e-9) -> None:
    """The model in these forms (all when none is given) against the brute-force one, both in float64."""
    model = models.build(written)
    with torch.no_grad():
        actual = {form.__name__: form(model, written, rows) for form in forms or FORMS}
        logits = BruteForceRanker(written, model.state_dict())(rows)
        expected = models.predictions(written, logits)
        close = {"rtol": tolerance, "atol": tolerance}
        torch.testing.assert_close(models.logits(model, written, rows), logits, **close)
        for form, predicted in actual.items():
            torch.testing.assert_close(predicted, expected, **close, msg=partial(_named, form))


def _named(form: str, message: str) -> str:
    return f"{form}: {message}"


def rows_of(written: pb.Pipeline, sizes: str = "targets", seed: int = 0) -> list[Row]:
    """Rows whose candidates were asked for some time before and some time behind the row's request."""
    return [
        row.changed(candidate_timestamps=[t - 900 for t in row.candidate_timestamps])
        for row in random_rows(models.resolved(written), SIZES[sizes], seed)
    ]


@pytest.mark.parametrize("combination", COVERING, ids=name)
def test_a_combination_is_what_the_specification_says(combination: Combination):
    written = pipeline(combination)
    compare(written, rows_of(written))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", SIZES)
def test_every_combination_is_what_the_specification_says(sizes: str):
    for number, combination in enumerate(PRODUCT):
        written = pipeline(combination)
        compare(written, rows_of(written, sizes, seed=number))


@pytest.mark.parametrize("combination", COVERING[:4], ids=name)
def test_no_targets_have_no_logits(combination: Combination):
    written = pipeline(combination)
    compare(written, rows_of(written, "no targets"))


@pytest.mark.parametrize("ranker", RANKERS)
def test_other_encoders_are_what_the_specification_says(ranker: str):
    written = models.written(*RANKERS[ranker])
    rows = random_rows(models.resolved(written), [(3, 2), (0, 1), (6, 4), (2, 0), (1, 3), (0, 0)])
    # The angle of the timestamp postprocessor is float32.
    compare(written, rows, tolerance=1e-6 if ranker == "all" else 1e-9)


@pytest.mark.parametrize("place", range(len(PAIRS)), ids=[name(item) for item in PAIRS])
def test_a_cache_of_a_history_that_grew_is_that_of_the_whole(place: int):
    written = pipeline(PAIRS[place] | GROWING | {"positional": GROWING_POSITIONS[place % 2]})
    for channel in written.model.ranker.preprocessor.contextual.channels:
        # The reader's matter: a new event can push an old one out.
        channel.ClearField("max_events")
    compare(written, rows_of(written), extended)


def test_a_cache_that_cannot_grow_says_so():
    refused = 0
    for combination in PAIRS:
        written = pipeline(combination)
        for channel in written.model.ranker.preprocessor.contextual.channels:
            channel.ClearField("max_events")
        try:
            compare(written, rows_of(written), extended)
        except ValueError as error:
            assert re.search(r"^(a cache|events) cannot be (extended|appended)", str(error))
            refused += 1
    assert 0 < refused < len(PAIRS)


@pytest.mark.parametrize("combination", COVERING[:6], ids=name)
def test_every_weight_gets_the_gradient_of_the_formulas(combination: Combination):
    written = pipeline(combination)
    rows, model = rows_of(written), models.build(written)
    actual = models.logits(model, written, rows)
    cotangent = torch.randn_like(actual)
    actual.backward(cotangent)
    weights = {key: p.detach().clone().requires_grad_() for key, p in model.named_parameters()}
    BruteForceRanker(written, weights)(rows).backward(cotangent)
    for key, parameter in model.named_parameters():
        # A table that no token came to has none, on either side.
        zeros = torch.zeros_like(parameter)
        got, expected = (zeros if x.grad is None else x.grad for x in (parameter, weights[key]))
        assert torch.allclose(got, expected, rtol=1e-9, atol=1e-12), key


def test_the_product_is_whole_and_the_part_meets_all_values():
    assert len(PRODUCT) == 2 * 4 * 3 * 2 * 2 * 2
    assert len({name(combination) for combination in PRODUCT}) == len(PRODUCT)
    assert len(COVERING) < len(PRODUCT) / 2
    for axis in PRODUCT[0]:
        used = {combination[axis] for combination in COVERING}
        assert used == {combination[axis] for combination in PRODUCT}
    assert set(AXES) < set(PRODUCT[0])


def test_every_combination_is_a_config_without_faults():
    for combination in PRODUCT:
        findings_of_config = checks.findings(models.resolved(pipeline(combination)))
        assert [item for item in findings_of_config if item.path.startswith("model")] == []
