"""Gives every test fixed seeds and one thread, and defines the markers `gpu`, `interpreted` and `slow`."""

import fcntl
import gc
import os
import random
import signal
from pathlib import Path

import hypothesis
import numpy
import pytest
import torch

from tests.tools.scheduling import SchedulingByServer, server_of

hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None)
hypothesis.settings.load_profile("fixed")

# PyTorch and TorchRec make more than a million objects. Full collections look at all of them, which took a
# quarter of the CPU time of many tests: they are rare, and leave out what precedes the first test.
gc.set_threshold(50_000, 20, 100)

# The stack trace of each node takes a sixth of the time in which a graph is captured. No test reads it.
torch.fx.config.do_not_emit_stack_traces = True

LONG_FILES = (
    "test_export_predict.py",
    "test_ready_configs.py",
    "test_hopper_compile.py",
    "test_hopper_emulated.py",
    "test_triton_compile.py",
    "test_compiled.py",
    "test_cached_signature.py",
    "test_signature.py",
    "test_generator.py",
    "test_combinations.py",
    "test_commands.py",
    "test_prefill.py",
    "test_export.py",
    "test_cached_stack.py",
    "test_fit.py",
    "test_layer_groups.py",
    "test_bench_cpu.py",
    "test_wheel.py",
    "test_docs.py",
    "test_architecture.py",
    "test_doctor.py",
)
"""Files that take longest, the longest first. They start after the files that share a server, which all run
in one worker, and before all others, so that no worker is left alone with one of them at the end."""


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA device; skipped where there is none")
    config.addinivalue_line("markers", "interpreted: runs in the process of Triton's interpreter")
    config.addinivalue_line("markers", "slow: longer than CI can afford; runs with --slow")
    # Workers of pytest-xdist share the cores, and each has one of the GPUs.
    worker, gpus = os.environ.get("PYTEST_XDIST_WORKER"), os.environ.get("CUDA_VISIBLE_DEVICES")
    if worker and gpus:
        listed = gpus.split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = listed[int(worker.removeprefix("gw")) % len(listed)]
    torch.set_num_threads(1)
    # Processes started in the background may ignore Ctrl-C, and so would their children.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config, items):
    skip_gpu = pytest.mark.skip(reason="no CUDA device")
    skip_slow = pytest.mark.skip(reason="slow: run with --slow")
    skip_interpreted = pytest.mark.skip(reason="runs in the process of Triton's interpreter")
    is_interpreter = os.environ.get("TRITON_INTERPRET") == "1"
    for item in items:
        if "interpreted" in item.keywords and not is_interpreter:
            item.add_marker(skip_interpreted)
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(skip_gpu)
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(skip_slow)
    if "PYTEST_XDIST_WORKER" in os.environ:
        # To say of each test that it is skipped takes as much time as a short test.
        left_out = [item for item in items if item.get_closest_marker("skip") is not None]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.get_closest_marker("skip") is None]
    items.sort(key=lambda item: _start_order(item.path))


def _start_order(path: Path) -> int:
    """Returns the place of a test file among those that start: the smallest number is the first."""
    if server_of(path) is not None:
        return -1
    return LONG_FILES.index(path.name) if path.name in LONG_FILES else len(LONG_FILES)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return SchedulingByServer(config, log) if config.option.dist == "loadfile" else None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Lets one worker after the other import a file: only the first one compiles it, and what it imports."""
    if not isinstance(collector, pytest.Module):
        return (yield)
    with collector.path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        return (yield)


def pytest_collection_finish(session):
    gc.freeze()


@pytest.fixture(autouse=True)
def fixed_seeds():
    """Gives a test the same random numbers whatever ran before it."""
    random.seed(0)
    numpy.random.seed(0)
    # `torch.manual_seed` also notes the seed, with a stack trace, for each kind of device that is not there.
    seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
    seed(0)


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a config to x.config in a new working folder and returns its name."""
    monkeypatch.chdir(tmp_path)

    def to_file(text: str) -> str:
        (tmp_path / "x.config").write_text(text, encoding="utf-8")
        return "x.config"

    return to_file
