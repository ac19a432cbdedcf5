"""Every registered postprocessor keeps its contract and computes its formula."""

import math
from datetime import datetime, timedelta, timezone

import pytest
import torch

import recsys.modules.postprocessors  # noqa: F401  (registers)
from recsys import protos as pb
from recsys.config import registry
from recsys.modules.postprocessors import (
    L2NormPostprocessor,
    LayerNormPostprocessor,
    TimestampLayerNormPostprocessor,
)

POSTPROCESSORS = registry.registered(pb.Postprocessor)
NOW = 1_700_000_000


def times(count):
    return torch.randint(NOW, NOW + 10**6, (count,))


@pytest.fixture(params=sorted(POSTPROCESSORS))
def postprocessor(request):
    component = POSTPROCESSORS[request.param]
    return component.cls(component.config, embedding_dim=6)


def test_shape_and_type_are_kept(postprocessor):
    for dtype in (torch.float32, torch.bfloat16):
        out = postprocessor(torch.randn(5, 6, dtype=dtype), times(5))
        assert out.shape == (5, 6) and out.dtype == dtype
    assert postprocessor(torch.randn(0, 6), times(0)).shape == (0, 6)


def test_tokens_do_not_know_each_other(postprocessor):
    values, now = torch.randn(5, 6), times(5)
    alone = torch.cat([postprocessor(values[i : i + 1], now[i : i + 1]) for i in range(5)])
    torch.testing.assert_close(postprocessor(values, now), alone)


def test_gradient(postprocessor):
    values, now = torch.randn(3, 6, dtype=torch.float64, requires_grad=True), times(3)
    assert torch.autograd.gradcheck(lambda x: postprocessor.double()(x, now), (values,))


def test_every_parameter_gets_a_gradient(postprocessor):
    out = postprocessor(torch.randn(3, 6), times(3))
    if not out.requires_grad:
        assert list(postprocessor.parameters()) == []
        return
    out.backward(torch.randn(3, 6))
    assert all(p.grad.any() for p in postprocessor.parameters())


def test_a_zero_token_has_finite_output_and_gradient(postprocessor):
    values = torch.zeros(1, 6, requires_grad=True)
    out = postprocessor(values, times(1))
    out.backward(torch.randn(1, 6))
    assert out.isfinite().all() and values.grad.isfinite().all()


def test_export_for_any_number_of_tokens(postprocessor):
    tokens = torch.export.Dim("tokens")
    shapes = {"values": {0: tokens}, "timestamps": {0: tokens}}
    example = (torch.randn(4, 6), times(4))
    graph = torch.export.export(postprocessor, example, dynamic_shapes=shapes).module()
    for n in (1, 9):
        values, now = torch.randn(n, 6), times(n)
        torch.testing.assert_close(graph(values, now), postprocessor(values, now))


def test_l2_norm_by_hand():
    norm = L2NormPostprocessor(pb.L2NormPostprocessor(), embedding_dim=2)
    values = torch.tensor([[3.0, 4.0], [0.0, -0.1]])
    torch.testing.assert_close(norm(values, times(2)), torch.tensor([[0.6, 0.8], [0.0, -1.0]]))


def test_l2_norm_divides_short_tokens_by_eps():
    norm = L2NormPostprocessor(pb.L2NormPostprocessor(eps=0.5), embedding_dim=2)
    torch.testing.assert_close(norm(torch.tensor([[0.06, 0.08]]), times(1)), torch.tensor([[0.12, 0.16]]))


def test_l2_norm_refuses_to_divide_by_zero():
    with pytest.raises(ValueError, match="eps: 0.0 is given"):
        L2NormPostprocessor(pb.L2NormPostprocessor(eps=0), embedding_dim=2)


def test_layer_norm_by_hand():
    norm = LayerNormPostprocessor(pb.LayerNormPostprocessor(eps=3.0), embedding_dim=2)
    with torch.no_grad():
        norm.norm.weight.copy_(torch.tensor([2.0, 1.0]))
        norm.norm.bias.copy_(torch.tensor([0.0, 10.0]))
    # Mean 4, variance 1: (3 - 4) / sqrt(1 + 3) and (5 - 4) / 2.
    torch.testing.assert_close(norm(torch.tensor([[3.0, 5.0]]), times(1)), torch.tensor([[-1.0, 10.5]]))


def test_l2_length_is_taken_in_float32():
    norm = L2NormPostprocessor(pb.L2NormPostprocessor(), embedding_dim=300)
    # 300 squares of 1: a bfloat16 sum stops at 256.
    out = norm(torch.ones(1, 300, dtype=torch.bfloat16), times(1))
    assert math.isclose(out[0, 0].item(), 1 / math.sqrt(300), rel_tol=4e-3)


def timestamp_norm(**fields):
    return TimestampLayerNormPostprocessor(pb.TimestampLayerNormPostprocessor(**fields), embedding_dim=3)


@pytest.mark.parametrize("minutes", [0, 480, -210])
def test_time_of_day_and_of_the_week_are_those_of_the_calendar(minutes):
    norm = timestamp_norm(utc_offset_minutes=minutes).double()
    moments = times(20)
    values = torch.randn(20, 3, dtype=torch.float64)
    rows = []
    for moment, value in zip(moments.tolist(), values, strict=True):
        local = datetime.fromtimestamp(moment, timezone(timedelta(minutes=minutes)))
        day = (local.hour * 3600 + local.minute * 60 + local.second) / 86400
        # 1970-01-01 was a Thursday, weekday 3.
        week = ((local.weekday() - 3) % 7 + day) / 7
        waves = [f(2 * math.pi * turn) for turn in (day, week) for f in (math.sin, math.cos)]
        shifted = value + norm.project.weight @ torch.tensor(waves, dtype=torch.float64)
        centred = shifted - shifted.mean()
        rows.append(centred / (centred.square().mean() + 1e-6).sqrt())
    # Angles are float32.
    torch.testing.assert_close(norm(values, moments), torch.stack(rows), rtol=1e-5, atol=1e-5)


def test_neighbouring_seconds_are_neighbours_and_told_apart():
    cyclic = timestamp_norm().cyclic(torch.tensor([NOW, NOW + 1, NOW + 7 * 86400]))
    assert 0 < (cyclic[0] - cyclic[1]).norm() < 1e-3
    assert torch.equal(cyclic[0], cyclic[2])


def test_time_before_1970_turns_on():
    day = timestamp_norm().cyclic(torch.tensor([-3600, 23 * 3600]))[:, :2]
    torch.testing.assert_close(day[0], day[1])
