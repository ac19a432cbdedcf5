"""Times and buckets of tokens by kernels against the operations of the modules: interpreted, on a GPU."""

import random
from types import SimpleNamespace

import pytest
import torch

from recsys import protos as pb
from recsys.modules.positional import PositionalEncoder
from recsys.modules.preprocessors.views import _times
from recsys.ops import SequenceLayout
from tests.tools.assembled import assemble
from tests.tools.interpreter import INTERPRETED, interpreted, mend_interpreter, run_interpreted, starts_it

SCALES = {"SQRT": pb.PositionalEncoder.SQRT, "LOG": pb.PositionalEncoder.LOG}


@pytest.fixture
def few_lanes(monkeypatch):
    """Several programs."""
    from recsys.modules import token_kernels

    mend_interpreter(monkeypatch)
    monkeypatch.setattr(token_kernels, "LANES", 16)


def random_batch(chance: random.Random, per_event: int) -> tuple[SequenceLayout, SimpleNamespace]:
    contextual, rows = chance.choice([0, 1, 3]), range(chance.randint(0, 5))
    events = [chance.choice([0, 0, 1, 7, 40]) for _ in rows]
    candidates = [chance.choice([0, 0, 1, 5, 30]) for _ in rows]
    lengths = [
        contextual + per_event * num_events + num_candidates
        for num_events, num_candidates in zip(events, candidates, strict=True)
    ]
    layout = SequenceLayout(
        torch.tensor(lengths, dtype=torch.int64), torch.tensor(candidates, dtype=torch.int64), contextual
    )
    generator = torch.Generator().manual_seed(chance.randrange(1000))
    times = [
        torch.randint(10**9, 10**9 + 10**6, (n,), generator=generator)
        for n in (sum(events), sum(candidates), len(rows))
    ]
    batch = SimpleNamespace(
        layout=layout, uih_timestamps=times[0], candidate_timestamps=times[1], request_time=times[2]
    )
    batch.uih_lengths = torch.tensor(events, dtype=torch.int64)
    return layout, batch


def assert_equal_times(seed: int, device: str = "cpu") -> None:
    from recsys.modules.token_kernels import times_of

    chance = random.Random(seed)
    for per_event in (1, 2):
        layout, batch = random_batch(chance, per_event)
        wanted = _times(batch, layout, batch.uih_timestamps, batch.uih_lengths, per_event)
        given = (
            item.to(device) for item in (batch.request_time, batch.uih_timestamps, batch.candidate_timestamps)
        )
        assert torch.equal(times_of(layout.to(device), *given, per_event).cpu(), wanted)


def assert_equal_buckets(seed: int, device: str = "cpu") -> None:
    from recsys.modules.token_kernels import TimeScale, buckets_of

    chance = random.Random(seed)
    layout, batch = random_batch(chance, 1)
    times = _times(batch, layout, batch.uih_timestamps, batch.uih_lengths, 1)
    times[:, 2] += 10**6  # most ages are above 0, some are not
    origin = chance.choice([pb.PositionalEncoder.START, pb.PositionalEncoder.END])
    scale, unit, buckets = (
        chance.choice([*SCALES.values()]),
        chance.choice([1, 60, 3600]),
        chance.choice([0, 2, 50]),
    )
    rows = chance.choice([1, 9, 200])
    encoder = PositionalEncoder(
        pb.PositionalEncoder(
            num_positions=rows, origin=origin, num_time_buckets=buckets, time_scale=scale, time_unit=unit
        ),
        embedding_dim=4,
    )
    wanted = [encoder.positions(layout)]
    if buckets:
        wanted.append(encoder.time_buckets(layout, times[:, 2] - times[:, 0]))
    chosen = TimeScale(buckets, unit, scale == pb.PositionalEncoder.LOG) if buckets else None
    moved = times.to(device)
    from_start = origin == pb.PositionalEncoder.START
    actual = buckets_of(
        layout.to(device), moved[:, 0], moved[:, 2], rows, from_start=from_start, scale=chosen
    )
    assert len(actual) == len(wanted)
    for got, want in zip(actual, wanted, strict=True):
        assert torch.equal(got.cpu(), want), (scale, unit, buckets)


@interpreted
@pytest.mark.parametrize("seed", range(30))
def test_the_same_times_and_buckets(few_lanes, seed):
    assert_equal_times(seed)
    assert_equal_buckets(seed)


@starts_it
def test_the_kernels_in_the_interpreter():
    run_interpreted(__file__)


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled in the interpreter")
@pytest.mark.parametrize(
    ("name", "constants"),
    [
        ("times_kernel", {"PER_EVENT": 2}),
        ("buckets_kernel", {"FROM_START": False, "TIMED": True, "LOGARITHMIC": False}),
        ("buckets_kernel", {"FROM_START": True, "TIMED": True, "LOGARITHMIC": True}),
    ],
)
def test_they_fit_into_the_registers(name, constants, tmp_path):
    pytest.importorskip("triton", reason="Triton is not installed (pip install triton==3.6.0)")
    from recsys.modules import token_kernels

    kernel = getattr(token_kernels, name)
    assert assemble(kernel, {}, {**constants, "LANES": 512}, tmp_path).spills == 0


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(40))
def test_the_same_on_a_gpu(seed):
    assert_equal_times(seed, "cuda")
    assert_equal_buckets(seed, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("unit", [3600.0, 0.5])
def test_the_encoder_on_a_gpu(unit):
    """Through its forward pass, whether its unit is one for the kernel or not."""
    layout, batch = random_batch(random.Random(3), 1)
    times = _times(batch, layout, batch.uih_timestamps, batch.uih_lengths, 1)
    encoder = PositionalEncoder(
        pb.PositionalEncoder(num_positions=50, num_time_buckets=20, time_unit=unit), embedding_dim=16
    )
    values = torch.randn(layout.total_len, 16, generator=torch.Generator().manual_seed(0))
    wanted = encoder(values, layout, times[:, 0], times[:, 2])
    moved = times.cuda()
    actual = encoder.cuda()(values.cuda(), layout.to("cuda"), moved[:, 0], moved[:, 2])
    torch.testing.assert_close(actual.cpu(), wanted)
