"""Every mixer keeps its contract; a new one is found through the registry and only needs an example here."""

import dataclasses

import pytest
import torch
from google.protobuf import text_format
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from recsys import protos as pb
from recsys.config import registry
from recsys.modules import linear_layer, mixers  # noqa: F401
from recsys.modules.sequence import JaggedSequence
from recsys.ops import LinearAttention
from tests.modules.mixers.sequences import WIDTH, part, random_sequence

EXAMPLES = {
    "hstu": """num_layers: 2 num_heads: 2 qk_dim: 4 v_dim: 3 scale_len: 3
        bias { num_positions: 20 num_time_buckets: 40 } mask { contextual_reads_history: false }""",
    "sasrec": "num_layers: 2 num_heads: 2 feed_forward_dim: 7 mask { contextual_reads_history: false }",
    "sasrec, rotary": """num_layers: 2 num_heads: 1 feed_forward_dim: 7 rotary { shortest_tokens: 3 }
        mask { contextual_reads_history: false }""",
    "linear": "num_layers: 2 num_heads: 2 qk_dim: 4 v_dim: 3 feed_forward_dim: 5",
    "linear, retention": "num_layers: 2 num_heads: 2 qk_dim: 4 v_dim: 3 form: RETENTION",
    "linear, delta": "num_layers: 2 num_heads: 2 qk_dim: 4 v_dim: 3 form: DELTA",
    "hybrid": """mixers { linear { num_layers: 1 num_heads: 2 qk_dim: 4 v_dim: 3 } }
        mixers { hstu { num_layers: 1 num_heads: 2 qk_dim: 4 v_dim: 3 scale_len: 3
            mask { contextual_reads_history: false } } }""",
}
"""Messages by the name of their field, behind which may stand what sets one apart from others."""

SHAPES = [(5, 3), (0, 2), (0, 0), (6, 0), (1, 4)]


def test_every_mixer_has_an_example():
    # A mixture takes several sequences and gives targets only: see test_mixture.
    assert {name.partition(",")[0] for name in EXAMPLES} == set(registry.registered(pb.Mixer)) - {"mixture"}


@pytest.fixture(params=EXAMPLES)
def mixer(request):
    name = request.param.partition(",")[0]
    message = text_format.Parse(f"{name} {{ {EXAMPLES[request.param]} }}", pb.Mixer())
    chosen = registry.pick(message)
    module = chosen.cls(chosen.config, embedding_dim=WIDTH).double().eval()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return module


def test_a_sample_is_mixed_alike_alone_and_in_a_batch(mixer):
    sequence = random_sequence(SHAPES)
    together = mixer(sequence).values.split(sequence.layout.lengths.tolist())
    for number, expected in enumerate(together):
        torch.testing.assert_close(mixer(part(sequence, SHAPES, number)).values, expected)


def test_a_long_batch_mate_changes_nothing(mixer):
    shapes = [(3, 2), (60, 5)]
    sequence = random_sequence(shapes)
    expected = mixer(part(sequence, shapes, 0)).values
    torch.testing.assert_close(mixer(sequence).values[: len(expected)], expected)


def test_layout_and_times_pass_through(mixer):
    sequence = random_sequence(SHAPES)
    mixed = mixer(sequence)
    assert mixed.layout is sequence.layout
    assert mixed.timestamps is sequence.timestamps
    assert mixed.next_timestamps is sequence.next_timestamps
    assert not torch.equal(mixed.values, sequence.values)


def test_history_does_not_see_later_events_or_targets(mixer):
    # One sample: 2 contextual tokens, 6 events, 3 targets.
    sequence = random_sequence([(6, 3)])
    before = mixer(sequence).values
    for cut in range(3, 8):
        values = sequence.values.clone()
        values[cut:] += torch.randn(len(values) - cut, WIDTH, dtype=values.dtype)
        times = sequence.timestamps.clone()
        times[cut:] += 1000
        after = mixer(dataclasses.replace(sequence, values=values, timestamps=times)).values
        torch.testing.assert_close(after[:cut], before[:cut], rtol=0, atol=0)
        assert not torch.isclose(after[cut:], before[cut:]).all(1).any()


def test_a_target_does_not_see_other_targets(mixer):
    sequence = random_sequence([(4, 3)])
    order = [*range(6), 8, 6]  # the third target first, the second one gone
    neighbor = random_sequence([(4, 2)])
    neighbor = dataclasses.replace(
        neighbor,
        values=sequence.values[order],
        timestamps=sequence.timestamps[order],
        next_timestamps=sequence.next_timestamps[order],
    )
    torch.testing.assert_close(mixer(neighbor).values, mixer(sequence).values[order])


def test_a_target_reads_its_history(mixer):
    sequence = random_sequence([(4, 1)])
    for event in range(2, 6):
        values = sequence.values.clone()
        values[event, 0] += 1  # not all alike: the norm in front would take it away
        change = mixer(sequence.with_values(values)).values[-1] - mixer(sequence).values[-1]
        assert change.norm() > 1e-4


def test_every_parameter_and_token_gets_a_gradient(mixer):
    sequence = random_sequence(SHAPES)
    values = sequence.values.clone().requires_grad_()
    mixed = mixer(sequence.with_values(values)).values
    (mixed * torch.randn_like(mixed)).sum().backward()
    assert [name for name, p in mixer.named_parameters() if p.grad is None or not p.grad.any()] == []
    assert values.grad.any(1).all()


def test_no_tokens_at_all(mixer):
    sequence = random_sequence([(0, 0), (0, 0)], contextual=0)
    assert mixer(sequence).values.shape == (0, WIDTH)


def test_bfloat16_products_stay_close(mixer):
    mixer.float()
    sequence = random_sequence(SHAPES, dtype=torch.float32)
    exact = mixer(sequence).values
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = mixer(sequence).values
    assert rounded.dtype == torch.float32
    assert (rounded - exact).norm() / exact.norm() < 0.03


@pytest.mark.gpu
def test_bfloat16_products_stay_close_on_a_gpu(mixer):
    # Autocast computes more operations in float32 there than on a CPU.
    mixer.float()
    sequence = random_sequence(SHAPES, dtype=torch.float32)
    exact = mixer(sequence).values
    columns = [column.cuda() for column in (sequence.values, sequence.timestamps, sequence.next_timestamps)]
    moved = JaggedSequence(columns[0], sequence.layout.to("cuda"), *columns[1:])
    with torch.autocast("cuda", dtype=torch.bfloat16):
        rounded = mixer.cuda()(moved).values
        rounded.sum().backward()
    assert rounded.dtype == torch.float32
    assert (rounded.cpu() - exact).norm() / exact.norm() < 0.03


def test_dropout_is_for_training(mixer):
    for module in mixer.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    sequence = random_sequence(SHAPES)
    torch.testing.assert_close(mixer(sequence).values, mixer(sequence).values, rtol=0, atol=0)
    mixer.train()
    assert not torch.equal(mixer(sequence).values, mixer(sequence).values)


def products_of_the_recurrence(q, k, v, log_decay, layout, *, beta=None, initial_state=None, backend):
    """The matrix products of `linear_attention` in its recurrent form: its chunks multiply more than that."""
    q, k, v = (tensor.flatten(0, 1)[:, None] for tensor in (q, k, v))
    added = k.transpose(1, 2) @ v
    if beta is not None:
        _ = k @ added
    return LinearAttention((q @ added).unflatten(0, (layout.total_len, -1))[:, :, 0], added)


def test_flops_are_those_of_the_matrix_products(mixer, monkeypatch):
    monkeypatch.setattr(linear_layer, "linear_attention", products_of_the_recurrence)
    # Contextual tokens only, the same number in each sample: all pairs are visible and nothing is padded.
    sequence = random_sequence([(0, 0)] * 3, contextual=5)
    # The counter looks into attention that is made of products, not into a fused one.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        mixer(sequence)
    assert mixer.flops(sequence.layout) == counter.get_total_flops()
