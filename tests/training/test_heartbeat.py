"""Ranks that are silent or stuck are named; ranks that wait, compile or have ended are not."""

from dataclasses import replace

import pytest
from torch.distributed.distributed_c10d import _get_default_store

from recsys import typed_json
from recsys.errors import LostProcessError
from recsys.training.distributed import process_group
from recsys.training.heartbeat import APART, BEATS, ENDED, READING, TOGETHER, Beat, Heartbeat, Verdict, Watch


def beat(number: int, *, step: int = 7, place: str = TOGETHER, beats_there: int = 0) -> Beat:
    return Beat(number, step, place, beats_there, "pid 5 on host")


def watched(*rounds: dict[int, Beat]) -> list[Verdict | None]:
    """Verdicts of a watching rank, one for each look at the beats of all ranks."""
    watch = Watch(60)
    return [watch.look(beats) for beats in rounds]


def test_a_rank_without_a_beat_is_named_with_the_step_it_was_last_seen_at():
    last = beat(3, step=5, place=READING)
    seen = watched(*({0: beat(n), 1: last, 2: beat(n)} for n in range(BEATS + 1)))
    assert seen[:-1] == [None] * BEATS
    assert seen[-1].ranks == [1]
    assert seen[-1].message.startswith(
        "rank 1 (pid 5 on host) has not answered for 60 s and was last seen at step 5, reading a batch; the "
        "run was in step 7 and resumes"
    )


def test_a_rank_that_answers_again_is_not_late():
    silent = [{0: beat(n), 1: beat(3)} for n in range(BEATS)]
    assert watched(*silent, {0: beat(30), 1: beat(4)}, *silent) == [None] * (2 * BEATS + 1)


def test_a_rank_that_has_ended_is_not_late():
    ended = beat(3, place=ENDED, beats_there=BEATS)
    assert watched(*({0: beat(n, beats_there=n), 1: ended} for n in range(2 * BEATS))) == [None] * 2 * BEATS


@pytest.mark.parametrize("late", [{"place": READING}, {"place": APART, "step": 6}, {"step": 6}])
def test_a_rank_that_is_stuck_elsewhere_is_named_once_others_wait_for_it(late):
    waits, stuck = beat(1, beats_there=BEATS), beat(1, beats_there=BEATS, **late)
    (seen,) = watched({0: waits, 1: stuck})
    assert seen.ranks == [1] and "has not come for 60 s" in seen.message
    assert watched({0: replace(waits, beats_there=BEATS - 1), 1: stuck}) == [None]
    assert watched({0: waits, 1: replace(stuck, beats_there=BEATS - 1)}) == [None]


def test_ranks_that_compute_the_same_step_for_long_are_left_alone():
    """Kernels may be compiled in it. A rank that is stuck there ends at the time-out of the collective."""
    assert watched({rank: beat(1, beats_there=5 * BEATS) for rank in range(3)}) == [None]


def test_a_rank_is_watched_from_the_first_moment_on():
    """A small model's steps may be over before the first tenth of the time-out."""
    with process_group() as processes, Heartbeat(replace(processes, world_size=2), 600):
        store = _get_default_store()
        assert store.check(["heartbeat/0"])
        first = typed_json.parse(store.get("heartbeat/0"), Beat)
    assert (first.number, first.place) == (0, APART)


def test_places_are_those_of_the_main_thread():
    with process_group() as processes:
        heartbeat = Heartbeat(processes, 60)
    items = heartbeat.reading(iter([1, 2]))
    with heartbeat.at(TOGETHER):
        assert [heartbeat._place, next(items), heartbeat._place] == [TOGETHER, 1, TOGETHER]
        moves = heartbeat._moves
        assert [*heartbeat.at(READING)(lambda: [heartbeat._place, heartbeat._moves])()] == [
            READING,
            moves + 1,
        ]
    assert heartbeat._place == APART and heartbeat._moves == moves + 3


def test_a_collective_that_breaks_is_an_error_about_ranks():
    raised = "[/gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer. This is typically"
    expected = (
        r"^rank 0 waited .*\(\[/gloo/transport/tcp/pair.cc:537\] Read error: Connection reset by peer\)"
    )
    with pytest.raises(LostProcessError, match=expected), process_group():
        raise RuntimeError(raised)
    with pytest.raises(RuntimeError, match="^shapes differ"), process_group():
        raise RuntimeError("shapes differ")
