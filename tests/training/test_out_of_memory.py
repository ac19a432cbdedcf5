"""A step that runs out of memory ends the run with a message and keeps the states before it."""

import torch

from recsys.training.trainer import Trainer
from tests.integration.runs import train


def test_the_message_names_what_the_memory_was_used_for(tmp_path, monkeypatch, capsys):
    step = Trainer._train

    def train_until_full(self, stream):
        if self._session.progress.step == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has ...")
        return step(self, stream)

    monkeypatch.setattr(Trainer, "_train", train_until_full)
    assert train(tmp_path, "model.embedding.placement=REPLICATED") == 1
    said = capsys.readouterr().err
    assert "step 4: cpu is out of memory, 2.50 GiB more were asked for" in said
    # One contextual token, 20 events and 5 candidates.
    assert "data.batch_size = 16 rows of at most model.max_seq_len = 26 tokens, so up to 416 tokens" in said
    assert "largest tables: item_id 0.00 GiB, tag 0.00 GiB, hour 0.00 GiB" in said
    assert [x.name for x in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]
