"""Tables whose rows are stored as float16."""

import torch

from recsys import config
from recsys.data.loader import Loader
from recsys.models import build_model, layout_rule
from recsys.training import checkpoint
from recsys.training.distributed import process_group
from recsys.training.run import load_model
from recsys.training.session import open_session
from tests.integration.runs import CONFIG, train

FP16 = ("model.embedding.table_precision=FP16", "train.num_steps=2", "train.sparse_optimizer={sgd {lr: 0.5}}")


def test_rows_are_updated_in_float32_and_rounded_to_the_nearest_float16(tmp_path):
    """SGD on a CPU: every row becomes half(float(row) - lr x gradient)."""
    pipeline = config.prepare(CONFIG, [*FP16, "train.schedule={constant {}}"]).pipeline
    with process_group() as processes:
        session = open_session(pipeline, tmp_path, processes)
        name = "model.embed.tables.dim_8.embeddings.hour_table.weight"
        rows = session.wrapped.state_dict()[name].local_shards()[0].tensor
        assert rows.dtype == torch.float16
        before = rows.float()
        gradients = []

        def keep(vectors):
            assert vectors["hour"].dtype == torch.float32
            vectors["hour"].register_hook(gradients.append)
            return vectors

        session.step.totals_of_vectors.transform = keep
        stream = session.batches()
        batch = next(stream)
        stream.close()
        session.optimizer.zero_grad()
        loss, _ = session.wrapped(batch)
        loss.backward()
        ids = batch.ids["hour"].values()
        expected = before.double().index_add_(0, ids, -0.5 * gradients[0].double()).half()
        # The kernel sums gradients in float32, so a sum near the middle of two numbers may round to either.
        assert (rows == expected).float().mean() > 0.99
        torch.testing.assert_close(rows, expected, rtol=1e-3, atol=1e-4)
        assert not torch.equal(rows.float(), before)
        del session


def test_a_model_that_is_not_sharded_scores_the_saved_rows_alike(tmp_path):
    assert train(tmp_path, *FP16) == 0
    pipeline = config.prepare(CONFIG, FP16).pipeline
    batch = next(iter(Loader.open(pipeline, "validation", layout_rule(pipeline)).epoch()))
    with process_group() as processes, torch.no_grad():
        loaded = load_model(pipeline, tmp_path, processes, "newest")
        expected = loaded.model.eval().score(batch)
        whole = build_model(pipeline).eval()
        checkpoint.load_weights(loaded.checkpoint, whole)
        assert whole.embed.tables["dim_16"].embeddings["item_id_table"].weight.dtype == torch.float16
        torch.testing.assert_close(whole.score(batch), expected, rtol=1e-6, atol=1e-7)
        del loaded
