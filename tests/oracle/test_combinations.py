"""Everything that a ranker can be combined of, against one brute-force model written from the specification.

The default suite runs a part of the product in which any three values come together, `--slow` all of it.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from recsys import checks
from recsys import protos as pb
from recsys.models import Model
from tests.modules.pipelines import RANKERS, Row, random_rows
from tests.oracle import models
from tests.oracle.combinations import AXES, SIZES, Combination, covering, name, pipeline, product
from tests.oracle.ranker import BruteForceRanker

PRODUCT = product()
COVERING = covering(PRODUCT, 3)
FORMS: dict[str, Callable[[Model, pb.Pipeline, list[Row]], Tensor]] = {"full": models.logits}
"""Ways from a model and rows to logits of their candidates."""


def compare(written: pb.Pipeline, form: str, rows: list[Row], tolerance: float = 1e-9) -> None:
    model = models.build(written)
    with torch.no_grad():
        found = FORMS[form](model, written, rows)
        expected = BruteForceRanker(written, model.state_dict())(rows)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def rows_of(written: pb.Pipeline, sizes: str = "targets", seed: int = 0) -> list[Row]:
    """Rows whose candidates were asked for some time before and some time behind the row's request."""
    return [
        row.changed(candidate_timestamps=[t - 900 for t in row.candidate_timestamps])
        for row in random_rows(models.resolved(written), SIZES[sizes], seed)
    ]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("combination", COVERING, ids=name)
def test_a_combination_is_what_the_specification_says(combination: Combination, form: str):
    written = pipeline(combination)
    compare(written, form, rows_of(written))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("form", FORMS)
def test_every_combination_is_what_the_specification_says(form: str, sizes: str):
    for number, combination in enumerate(PRODUCT):
        written = pipeline(combination)
        compare(written, form, rows_of(written, sizes, seed=number))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("combination", COVERING[:4], ids=name)
def test_no_targets_have_no_logits(combination: Combination, form: str):
    written = pipeline(combination)
    compare(written, form, rows_of(written, "no targets"))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ranker", RANKERS)
def test_other_encoders_are_what_the_specification_says(ranker: str, form: str):
    written = models.written(*RANKERS[ranker])
    rows = random_rows(models.resolved(written), [(3, 2), (0, 1), (6, 4), (2, 0), (1, 3), (0, 0)])
    # The angle of the timestamp postprocessor is float32.
    compare(written, form, rows, tolerance=1e-6 if ranker == "all" else 1e-9)


@pytest.mark.parametrize("combination", COVERING[:6], ids=name)
def test_every_weight_gets_the_gradient_of_the_formulas(combination: Combination):
    written = pipeline(combination)
    rows, model = rows_of(written), models.build(written)
    found = models.logits(model, written, rows)
    cotangent = torch.randn_like(found)
    found.backward(cotangent)
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
        found = checks.findings(models.resolved(pipeline(combination)))
        assert [one for one in found if one.path.startswith("model")] == []
