import torch
from hypothesis import given
from hypothesis import strategies as st

from recsys.modules.sequence import JaggedSequence, following
from recsys.ops import SequenceLayout


@given(st.lists(st.lists(st.integers(-9, 9), max_size=4), min_size=1, max_size=5))
def test_following_is_the_next_entry_of_the_same_list(lists):
    last = [100 + i for i in range(len(lists))]
    expected = [
        entries[i + 1] if i + 1 < len(entries) else last[n]
        for n, entries in enumerate(lists)
        for i in range(len(entries))
    ]
    values = torch.tensor(sum(lists, []), dtype=torch.int64)
    lengths = torch.tensor([len(entries) for entries in lists])
    assert following(values, lengths, torch.tensor(last)).tolist() == expected


def test_history_and_targets_are_the_tokens_of_their_kind_in_order():
    layout = SequenceLayout(torch.tensor([4, 2, 3]), torch.tensor([1, 0, 2]), num_contextual=1)
    # c h h t | c h | c t t
    values = torch.arange(9.0)[:, None]
    sequence = JaggedSequence(values, layout, torch.zeros(9, dtype=torch.int64), torch.arange(10, 19))
    assert sequence.history().flatten().tolist() == [1, 2, 5]
    assert sequence.targets().flatten().tolist() == [3, 7, 8]
    assert sequence.history_times().tolist() == [11, 12, 15]
    assert sequence.target_times().tolist() == [13, 17, 18]
    assert sequence.with_values(values + 1).targets().flatten().tolist() == [4, 8, 9]
