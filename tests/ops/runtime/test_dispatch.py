"""The choice of a backend, and the messages when it cannot run, with backends made up for the purpose."""

import logging
import subprocess
import sys
from types import ModuleType

import pytest
import torch

from recsys.ops import SequenceLayout, explain, hstu_attention, last_backend
from recsys.ops.runtime import dispatch
from recsys.ops.runtime.dispatch import SUPPORTED, Op, Support


@pytest.fixture
def op(monkeypatch):
    """An op of one number: `huge` is not installed, `fast` takes numbers up to 10, `reference` takes all.

    `foreign` would run, but is made for another machine.
    """

    def backend(name, supports):
        module = ModuleType(f"made_up.{name}")
        module.supports, module.run = supports, lambda number: f"{name} {number}"
        monkeypatch.setitem(sys.modules, f"made_up.{name}", module)

    package = ModuleType("made_up")
    package.made_up_op = lambda number, backend="auto": made.select(number, backend).run(number)
    monkeypatch.setitem(sys.modules, "made_up", package)
    backend(
        "fast",
        lambda facts: SUPPORTED if facts <= 10 else Support(False, f"it takes at most 10, got {facts}"),
    )
    backend("foreign", lambda facts: Support(True, auto=False))
    backend("reference", lambda facts: SUPPORTED)
    del sys.modules["made_up.reference"].supports  # it takes every call
    monkeypatch.setattr(dispatch, "_OPS", dict(dispatch._OPS))
    backends = ("huge", "foreign", "fast", "reference")
    made = Op("made_up_op", "made_up", backends=backends)
    return made


def test_auto_takes_the_first_that_can(op):
    assert op.select(3).run(3) == "fast 3"
    assert last_backend("made_up_op") == "fast"
    assert op.select(30).run(30) == "reference 30"
    assert last_backend("made_up_op") == "reference"


def test_a_fallback_is_logged_once_a_reason_and_counted(op, caplog):
    with caplog.at_level(logging.WARNING):
        for number in (30, 30, 40):
            op.select(number)
    messages = [record.getMessage() for record in caplog.records if "fast" in record.getMessage()]
    assert messages == [
        f"made_up_op: backend fast is not used: it takes at most 10, got {n}" for n in (30, 40)
    ]
    assert op.fallbacks["fast", "it takes at most 10, got 30"] == 2


def test_a_named_backend_runs_or_raises(op):
    assert op.select(3, "reference").run(3) == "reference 3"
    with pytest.raises(
        ValueError, match="'fast' of made_up_op cannot run this: it takes at most 10, got 30; backend="
    ):
        op.select(30, "fast")
    with pytest.raises(ValueError, match="'huge' of made_up_op cannot run this: it needs a package"):
        op.select(3, "huge")
    with pytest.raises(
        ValueError, match="made_up_op has no backend 'slow'; it has auto, huge, foreign, fast, reference"
    ):
        op.select(3, "slow")
    assert last_backend("made_up_op") == "reference"
    assert not op.fallbacks


def test_a_backend_for_other_machines_runs_when_named_and_is_no_fallback(op, caplog):
    assert op.select(3).run(3) == "fast 3"
    assert op.select(3, "foreign").run(3) == "foreign 3"
    assert not any(name == "foreign" for name, _ in op.fallbacks)
    assert not any("foreign" in record.getMessage() for record in caplog.records)


def test_explain_asks_every_backend(op):
    rows = dict(explain("made_up_op", 30).rows)
    assert rows["reference"] == SUPPORTED
    assert rows["fast"] == Support(False, "it takes at most 10, got 30")
    assert not rows["huge"].ok and "No module named 'made_up.huge'" in rows["huge"].reason
    assert str(explain("made_up_op", 3)).splitlines()[3:] == ["  fast       usable", "  reference  usable"]


def test_when_none_can_all_reasons_are_given(op, monkeypatch):
    monkeypatch.setattr(
        sys.modules["made_up.reference"],
        "supports",
        lambda facts: Support(False, "it is tired"),
        raising=False,
    )
    with pytest.raises(
        ValueError, match=r"(?s)no backend can run this call.*at most 10, got 30.*it is tired"
    ):
        op.select(30)


def test_the_debug_variable_stands_in_for_auto(op, monkeypatch):
    monkeypatch.setattr(dispatch, "FORCED_BACKEND", "reference")
    assert op.select(3).run(3) == "reference 3"
    assert op.select(3, "fast").run(3) == "fast 3"


def test_a_debug_variable_that_names_nothing_is_reported(op, monkeypatch, caplog):
    monkeypatch.setattr(dispatch, "FORCED_BACKEND", "refrence")
    assert op.select(3).run(3) == "fast 3"
    expected = "made_up_op: backend refrence is not used: RECSYS_BACKEND does not name a backend of this op"
    assert expected in [record.getMessage() for record in caplog.records]


def test_unknown_ops_are_named():
    for ask in (last_backend, explain):
        with pytest.raises(
            ValueError, match="no op 'attention'; there are .*hstu_attention.*softmax_attention"
        ):
            ask("attention")


def test_the_facts_of_a_real_op():
    q, v = torch.zeros(5, 2, 3, requires_grad=True), torch.zeros(5, 2, 4)
    layout = SequenceLayout(torch.tensor([5]))
    rows = explain("hstu_attention", q, q, v, layout, scale_len=1, backend="auto").rows
    assert [name for name, _ in rows] == ["sm90", "triton", "reference"]
    assert dict(rows)["reference"] == SUPPORTED
    assert explain(hstu_attention, q, q, v, layout, scale_len=1).rows == rows
    with pytest.raises(ValueError, match="v has 5 rows, the layout total_len = 4"):
        explain("hstu_attention", q[:4], q[:4], v, SequenceLayout(torch.tensor([4])), scale_len=1)
    hstu_attention(q, q, v, layout, scale_len=1)
    assert last_backend("hstu_attention") == "reference"


def test_importing_the_ops_needs_no_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "from recsys.ops.runtime import dispatch; print(dispatch.FORCED_BACKEND)"
    )
    environment = {"RECSYS_BACKEND": "reference", "PYTHONPATH": "."}
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert shown.stdout.strip() == "reference"
