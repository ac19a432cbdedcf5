import pytest
import torch

from recsys.modules.stochastic_depth import StochasticDepth, linear_schedule
from recsys.ops import SequenceLayout


def test_a_sample_goes_around_or_is_scaled_up_as_a_whole():
    lengths = torch.tensor([3, 0, 1, 5] * 500)
    factor = StochasticDepth(0.75)(SequenceLayout(lengths))
    assert factor.shape == (9 * 500, 1)
    values = [sample.unique().tolist() for sample in factor.split(lengths.tolist())]
    assert all(value in ([0.0], [4.0]) for value in values if value)
    assert [len(value) for value in values] == [1, 0, 1, 1] * 500


def test_each_sample_is_drawn_by_itself_and_the_mean_is_that_of_evaluation():
    samples, probability = 40_000, 0.3
    factor = StochasticDepth(probability)(SequenceLayout(torch.ones(samples, dtype=torch.int64)))
    left_out = (factor == 0).float().mean().item()
    # Five standard deviations of a binomial share.
    assert abs(left_out - probability) < 5 * (probability * (1 - probability) / samples) ** 0.5
    assert abs(factor.mean().item() - 1) < 5 * (probability / (1 - probability) / samples) ** 0.5
    neighbours = torch.corrcoef(torch.stack([factor[1:, 0], factor[:-1, 0]]))[0, 1]
    assert abs(neighbours) < 5 / samples**0.5


@pytest.mark.parametrize(("probability", "training"), [(0.0, True), (0.5, False)])
def test_evaluation_and_probability_0_draw_nothing(probability, training):
    before = torch.get_rng_state()
    depth = StochasticDepth(probability).train(training)
    assert depth(SequenceLayout(torch.tensor([2, 1]))) is None
    assert torch.equal(torch.get_rng_state(), before)


def test_probabilities_grow_in_equal_steps_to_that_of_the_last_layer():
    # Huang et al.: layer l of L survives with 1 - l / L * (1 - p_L), p_L = 0.6.
    assert linear_schedule(0.4, 4) == pytest.approx(
        [1 - (1 - number / 4 * (1 - 0.6)) for number in (1, 2, 3, 4)]
    )
    assert linear_schedule(0.4, 1) == [0.4]
