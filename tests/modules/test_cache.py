"""Rows that are copied into a cache: the same bits, wherever they come from."""

import pytest
import torch

from recsys.modules.cache import copied, copy_rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize(("heads", "width"), [(4, 16), (3, 5), (1, 8), (2, 1)])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_columns_of_a_joined_projection(dtype, heads, width, count):
    joined = torch.randn(count, 4 * heads * width).mul(100).to(dtype)
    for part in joined.split(heads * width, dim=1):
        given = part.unflatten(1, (heads, width))
        room = torch.zeros(count + 3, heads, width, dtype=dtype)
        actual = copy_rows(given, room[:count])
        assert count == 0 or actual.data_ptr() == room.data_ptr()
        assert torch.equal(room[:count], given) and not room[count:].any()
        copy = copied(given)
        assert torch.equal(copy, given) and copy.is_contiguous()
        assert count == 0 or copy.untyped_storage().nbytes() == copy.nbytes


def test_tensors_of_any_shape():
    for given in (
        torch.arange(7),
        torch.randn(6, 4, 8)[::2].transpose(1, 2),
        torch.randn(3, 1, 4).expand(3, 2, 4),
        torch.randn(9, 8)[1:, 1:5],
        torch.randn(4, 8)[:, ::2],
    ):
        assert torch.equal(copied(given), given)
        assert torch.equal(copy_rows(given, torch.zeros_like(given).contiguous()), given)


def test_special_values_keep_their_bits():
    given = torch.tensor([[float("nan"), float("inf"), -0.0, 1e-45]] * 2)[:, None]
    assert torch.equal(copied(given).view(torch.int32), given.view(torch.int32))
