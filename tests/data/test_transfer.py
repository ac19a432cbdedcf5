import torch

from recsys import config
from recsys.data.loader import Loader
from recsys.data.transfer import to_device
from recsys.models import layout_rule

QUICKSTART = "configs/quickstart.config"


def test_copies_equal_the_tensors_and_share_one_piece_of_memory():
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(2, (7, 6), generator=generator)
    tensors = [
        bits.bool()[:, 0],  # neither contiguous nor of even size
        torch.randn(3, 5, generator=generator).T,
        bits,
        torch.empty(0, dtype=torch.int64),
        torch.tensor(2.5, dtype=torch.float64),
        torch.randn(9, generator=generator).half(),
        torch.arange(3, dtype=torch.uint8),
        torch.tensor(7).expand(1),  # a stride of 0
        torch.arange(20)[5:9],
    ]
    copies = to_device(tensors, torch.device("cpu"))
    for tensor, copy in zip(tensors, copies, strict=True):
        assert copy.dtype == tensor.dtype
        assert torch.equal(copy, tensor)
    assert len({copy.untyped_storage().data_ptr() for copy in copies}) == 1


def test_every_tensor_of_a_batch_takes_its_own_place():
    pipeline = config.prepare(QUICKSTART, ["data.num_workers=0"]).pipeline
    batch = next(Loader.open(pipeline, "train", layout_rule(pipeline), shuffle=True).epoch(0))
    moved = batch.to(torch.device("meta"))
    there, here = [], []
    moved._map(lambda x: there.append(x) or x)
    batch._map(lambda x: here.append(x) or x)
    assert len(here) > 20
    assert all(tensor.is_meta for tensor in there)
    assert [(x.dtype, x.shape) for x in there] == [(x.dtype, x.shape) for x in here]
    assert moved.ids.length_per_key() == batch.ids.length_per_key()
    assert moved.layout.host_copy is batch.layout.host_copy
