"""Signals are counted and announced once; a second one has its default effect."""

import signal

import pytest

from recsys.training.signals import HANDLED, catching_signals


def test_a_signal_is_noted_and_the_handlers_come_back():
    before = [signal.getsignal(number) for number in HANDLED]
    received = {2: 0, 15: 0}
    with catching_signals(received):
        signal.raise_signal(signal.SIGTERM)
        assert received == {2: 0, 15: 1}
    assert [signal.getsignal(number) for number in HANDLED] == before


def test_whoever_sent_it_hears_that_it_was_noted(capfd):
    for announce, shown in ((True, 1), (False, 0)):
        with catching_signals({2: 0, 15: 0}, announce=announce):
            signal.raise_signal(signal.SIGINT)
        assert capfd.readouterr().err.count("signal 2: stopping after this step; a second one stops") == shown


def test_the_second_interrupt_interrupts():
    received = {2: 0, 15: 0}
    with pytest.raises(KeyboardInterrupt), catching_signals(received):
        signal.raise_signal(signal.SIGINT)
        assert received[2] == 1
        signal.raise_signal(signal.SIGINT)
