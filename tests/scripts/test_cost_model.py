"""The estimates are those of a count by hand, and of the figures on paper that the docs compare with."""

import re
import shlex
from pathlib import Path

import pytest

import recsys.config as config
from recsys import protos as pb
from scripts import bench_scaling, cost_model
from tests.scripts.test_bench_scaling import SMALL

CLUSTER = cost_model.Cluster(
    tflops=1.0,
    gpus_per_host=4,
    link_gb_per_s=100.0,
    network_gb_per_s=10.0,
    latency_us=30.0,
    message_us=10.0,
    unexplained_ms=2.0,
    straggler=1.5,
)


@pytest.mark.parametrize(
    ("width", "optimizer", "precision", "gb"),
    [
        (128, "row_wise_adagrad", pb.FP32, 516),
        (128, "row_wise_adagrad", pb.FP16, 260),
        (512, "row_wise_adagrad", pb.FP32, 2052),
        (128, "adam", pb.FP32, 3 * 512),
        (128, "sgd", pb.FP16, 256),
    ],
)
def test_a_billion_rows_have_the_bytes_on_paper(width, optimizer, precision, gb):
    feature = f'name: "x" sides: [USER] id {{hash {{num_buckets: 999999999}} embedding_dim: {width}}}'
    pipeline = config.load(bench_scaling.BASE, [f"features=[{{{feature}}}]"])
    # One more row is for unknown ids.
    assert cost_model.table_bytes(pipeline, optimizer, precision) == pytest.approx(gb * 1e9)


@pytest.mark.parametrize("gpus", [1, 3, 4, 12])
def test_an_all_to_all_sends_an_equal_part_to_each_gpu(gpus):
    hosts = [gpu // CLUSTER.gpus_per_host for gpu in range(gpus)]
    inside = sum(host == 0 for host in hosts[1:]) * 6e9 / gpus
    outside = sum(host != 0 for host in hosts[1:]) * 6e9 / gpus
    expected = max(inside / 100e9, outside / 10e9) + (30e-6 + 10e-6 * (gpus - 1) if gpus > 1 else 0)
    assert cost_model.all_to_all(6e9, CLUSTER, gpus) == pytest.approx(expected)


def test_the_latency_of_4096_gpus_is_that_on_paper():
    assert cost_model.all_to_all(0, CLUSTER, 4096) == pytest.approx(0.041, rel=0.01)


@pytest.mark.parametrize(("gpus", "seconds"), [(1, 0.0), (2, 0.01), (4, 0.015), (1000, 0.04995)])
def test_an_all_reduce_sends_each_byte_twice_but_for_its_own_part(gpus, seconds):
    """Two GPUs send one half of 1 GB and then the other; the cards of a host have 40 GB/s together."""
    latency = 30e-6 if gpus > 1 else 0.0
    assert cost_model.all_reduce(1e9, CLUSTER, gpus) == pytest.approx(seconds + latency)


def test_a_step_waits_for_what_the_backward_pass_does_not_hide():
    work = cost_model.Work(
        tokens=1, flop=2e9, id_bytes=0, embedding_bytes=1e8, gradient_bytes=10**9, dense_bytes=0
    )
    time = cost_model.step_time(work, CLUSTER, 4)
    assert time.compute == pytest.approx(0.003)
    assert time.all_to_all == pytest.approx(2 * (0.75e8 / 100e9 + 60e-6))
    # 15.03 ms of all-reduce beside 2 ms of backward pass, and 2 ms of anything else.
    assert time.total == pytest.approx(0.003 + time.all_to_all + 0.01503 - 0.002 + 0.002)
    hidden = cost_model.step_time(cost_model.dataclasses.replace(work, gradient_bytes=10**8), CLUSTER, 4)
    assert hidden.total == pytest.approx(0.003 + time.all_to_all + 0.002)
    assert cost_model.step_time(work, CLUSTER, 1).total == pytest.approx(0.003)


def test_the_docs_show_what_is_printed(capsys):
    text = Path("docs/scaling.md").read_text(encoding="utf-8")
    command, shown = re.findall(r"^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[:2]
    cost_model.main(shlex.split(command)[2:])
    assert capsys.readouterr().out == shown


def test_what_is_printed_is_what_a_batch_has(capsys):
    flags = [flag for change in SMALL for flag in ("--set", change)]
    flags += ["--set", "data.train.synthetic.min_candidates=8", "--set", "model.precision=BF16"]
    flags += ["--gpus", "2", "4096", "--activation-bytes", "1e6", "--stall-s", "10", "--restart-s", "300"]
    cost_model.main(["--config", str(bench_scaling.BASE), *flags])
    said = capsys.readouterr().out
    # 4 rows of 1 contextual token, 8 events of 2 tokens, and 8 candidates.
    tokens = 4 * (1 + 2 * 8 + 8)
    assert f"a step of a GPU: 4 rows, {tokens} tokens" in said
    numbers = 4 * (1 + 8 + 8) * 128
    assert f"{numbers / 128 * 8 / 1e6:.2f} MB of ids, {4 * numbers / 1e6:.1f} MB of embeddings" in said
    assert re.search(rf"\n +2 +\S+ +\S+ +{tokens * 1e6 / 1e9:.2f} ", said)
    # With a failure in 12 hours, stalls of 10 s and restarts of 5 minutes lose 2.8 %.
    assert re.search(r"\n4,096 +12\.2 +\d+ +2\.8\d%", said)
