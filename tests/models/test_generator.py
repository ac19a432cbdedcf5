"""The generator: its losses and ranks, no future in the past, bundles that do not fit, a resumed run."""

import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from recsys import config
from recsys import protos as pb
from recsys.config import checks
from recsys.data.codes import codes_of_table
from recsys.data.schema.vocabulary import mappings
from recsys.errors import DataError
from recsys.inference.eager import EagerPackage
from recsys.inference.predictor import Predictor
from recsys.models import CodeGenerator, build_model
from recsys.scoring.signature import inputs_of
from tests.integration.parity import captured
from tests.integration.runs import command, evaluate, records
from tests.models.test_no_host_sync import no_waiting
from tests.modules.pipelines import batch_of, generator_pipeline, random_row, random_rows, with_another_future
from tests.tools.bundles import movielens_codes, write_codes

SIZES = [(3, 1), (0, 1), (6, 2), (2, 0), (1, 1)]
CODES = np.array([[n % 3, n % 4] for n in range(20)])  # items n and n + 12 share codes
SHORT = (
    "train.num_epochs=",
    "train.schedule.warmup_steps=0",
    "train.evaluation={every_steps: 4 max_batches: 1}",
    "train.checkpoint={every_steps: 4}",
    "train.log_every_steps=1",
    "data.num_workers=0",
    "data.batch_size=16",
    "data.eval_batch_size=16",
)
ENCODER = (
    "model.generator.preprocessor=",
    "model.generator.mixer=",
    "model.generator.encoder={num_layers: 1 num_heads: 2 dropout: 0.2 targets_per_row: 3}",
    "model.generator.decoder.num_layers=1",
    "data.max_history_len=20",
)


@pytest.fixture
def folder(tmp_path):
    return tmp_path


@pytest.fixture
def pipeline(folder):
    return generator_pipeline(folder, CODES)


def built(pipeline):
    """The model, with weights that are not those of the start."""
    torch.manual_seed(0)
    model = build_model(pipeline).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model


@pytest.fixture
def model(pipeline):
    return built(pipeline)


def test_rows_of_the_table_have_the_codes_of_their_items(pipeline, folder, model):
    codes, sizes = codes_of_table(pipeline, folder / "bundle")
    assert isinstance(model, CodeGenerator) and sizes == (4, 4, 2)
    ids = pq.read_table(folder / "bundle" / "codes.parquet").to_pylist()
    by_id = {row["item_id"]: (*row["codes"], row["digit"]) for row in ids}
    original = mappings(pipeline)["item_id"].original(np.arange(1, 21)).to_pylist()
    assert [tuple(code) for code in codes.tolist()] == [by_id[item] for item in original]
    assert model.codes[0].tolist() == [-1, -1, -1] and (model.codes[1:].numpy() == codes).all()


def test_items_have_no_table(model):
    assert not any("item_id_table" in name for name in model.state_dict())


def test_losses_are_those_of_the_next_items_codes(model, pipeline):
    rows = random_rows(pipeline, SIZES)
    batch = batch_of(pipeline, rows)
    outputs = model(batch)
    expected, start = 0.0, 0
    for row in rows:
        items = row.values["uih_item_id"]
        for place, item in enumerate(items[1:]):
            if item:
                state = outputs.states[start + place][None]
                expected += model.decode(state, model.codes[item][None]).item()
        start += len(items)
    losses = model.objective(outputs, batch)
    assert losses.sums.item() == pytest.approx(expected, rel=1e-5)
    assert losses.counts.item() == sum(item > 0 for row in rows for item in row.values["uih_item_id"][1:])


def add_ids(pipeline):
    """Changes a config to codes in parallel, and ids with a weight that is not that of the start."""
    pipeline.model.generator.parallel.temperature = 0.07
    pipeline.model.generator.ids.temperature = 0.05
    pipeline.model.generator.ids.weight = 0.3


@pytest.fixture
def hybrid(pipeline):
    """Codes in parallel and ids, with weights that are not those of the start."""
    add_ids(pipeline)
    return built(pipeline)


def parts_of_hybrid(hybrid, states):
    """log P(item) by codes and by ids, float64 [B, V] each, from tokens that are put together by hand."""
    weights = {name: value.double().numpy() for name, value in hybrid.state_dict().items()}
    codes, table = hybrid.codes[1:].numpy(), weights["embed_codes.table.weight"]
    sizes = hybrid.decode.sizes
    starts = np.cumsum([0, *sizes[:-1]])

    def log_softmax(states, rows, temperature):
        cosines = states @ rows.T / np.linalg.norm(rows, axis=1)
        logits = cosines / np.linalg.norm(states, axis=1, keepdims=True) / temperature
        return logits - np.log(np.exp(logits).sum(1, keepdims=True))

    states, of_codes = states.double().numpy(), 0.0
    for level, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        linear = states @ weights["decode.weight"][level] + weights["decode.bias"][level]
        head = states + linear / (1 + np.exp(-linear))
        of_codes = of_codes + log_softmax(head, table[start : start + size], 0.07)[:, codes[:, level]]
    tokens = table[codes + starts].mean(1) + weights["ids.table.weight"][1:]
    return of_codes, log_softmax(states, tokens, 0.05)


def test_scores_of_a_hybrid_mix_codes_and_ids_and_its_losses_add_up(hybrid, pipeline):
    batch = batch_of(pipeline, [row for row in random_rows(pipeline, SIZES) if row.uih_timestamps])
    outputs = hybrid(batch)
    last = outputs.states[batch.uih_lengths.cumsum(0) - 1].detach()
    of_codes, of_ids = parts_of_hybrid(hybrid, last)
    expected = 0.3 * of_ids + 0.7 / len(hybrid.decode.sizes) * of_codes
    with torch.no_grad():
        np.testing.assert_allclose(hybrid.score(batch).numpy(), expected, rtol=1e-4)
    # The first event of the first row has the second as its target.
    of_codes, of_ids = (part[0] for part in parts_of_hybrid(hybrid, outputs.states[:1].detach()))
    target = batch.ids["uih_item_id"].values()[1].item()
    loss = -of_codes[target - 1] / len(hybrid.decode.sizes) - of_ids[target - 1]
    assert target and outputs.losses[0].item() == pytest.approx(loss, rel=1e-4)


def test_other_weights_of_ids_have_the_gains_of_their_own_scores(hybrid, pipeline):
    pipeline.predict.top_k = 7
    batch = batch_of(pipeline, random_rows(pipeline, [(3, 3), (1, 4), (6, 4), (2, 2)]))
    with torch.no_grad():
        compared = hybrid.weight_gains(batch)
        assert list(compared)[::10] == [f"ndcg@7/weight_{weight}" for weight in ("0.00", "0.50", "1.00")]
        for name in list(compared)[::10]:
            hybrid.id_weight = float(name[-4:])
            ranks = hybrid.ranks(hybrid(batch), batch).tolist()
            gain = sum(1 / np.log2(1 + rank) for rank in ranks if rank <= 7)
            assert compared[name].tolist() == pytest.approx([gain, len(ranks)])
    gains = [sums[0].item() for sums in compared.values()]
    assert len(set(gains)) > 3, "weights matter for these rows"


def read_codes(pipeline):
    """Changes a config to an encoder, with a token for each code."""
    pipeline.model.generator.ClearField("preprocessor")
    pipeline.model.generator.ClearField("mixer")
    shape = {"num_heads": 2, "head_dim": 3, "ff_dim": 8}
    pipeline.model.generator.encoder.CopyFrom(pb.CodeEncoder(**shape, dropout=0.5))
    pipeline.model.generator.decoder.CopyFrom(pb.CodeDecoder(**shape))


@pytest.fixture
def reading_codes(pipeline):
    """An encoder, with weights that are not those of the start."""
    read_codes(pipeline)
    return built(pipeline)


def test_an_encoder_predicts_every_event_from_those_before_it_alone(reading_codes, pipeline):
    """The losses of whole rows are those of the scores of rows that end before the event."""
    rows = random_rows(pipeline, SIZES)
    outputs = reading_codes(batch_of(pipeline, rows))
    cuts = [(row, end) for row in rows for end in range(1, len(row.uih_timestamps) + 1)]
    ended = [row.with_events(range(end)) for row, end in cuts]
    with torch.no_grad():
        scores = reading_codes.score(batch_of(pipeline, ended))
    counted = 0
    for number, (row, end) in enumerate(cuts):
        items = row.values["uih_item_id"]
        has_target = end < len(items) and items[end] > 0
        assert outputs.has_target[number].item() == has_target
        if has_target:
            expected = -scores[number, items[end] - 1].item() / 3
            assert outputs.losses[number].item() == pytest.approx(expected, rel=1e-5)
            counted += 1
    assert counted > 5


def test_a_step_of_an_encoder_predicts_some_events_and_may_have_none(reading_codes, pipeline):
    reading_codes.encode.targets_per_row = 2
    batch = batch_of(pipeline, random_rows(pipeline, SIZES))
    # In evaluation the newest two of each row: of events 0 to 2, 3 to 8, and 9 and 10.
    assert reading_codes(batch).has_target.nonzero()[:, 0].tolist() == [0, 1, 6, 7, 9]
    reading_codes.train()
    for rows, count in ((SIZES, 5), ([(1, 0), (0, 0)], 0)):
        batch = batch_of(pipeline, random_rows(pipeline, rows))
        losses = reading_codes.objective(reading_codes(batch), batch)
        assert losses.counts.item() == count
    losses.sums.sum().backward()
    assert all(parameter.grad is not None for parameter in reading_codes.parameters())


def test_a_step_of_an_encoder_reads_no_number_of_the_device(reading_codes, pipeline):
    batch = batch_of(pipeline, random_rows(pipeline, SIZES))
    batch.ids.length_per_key()
    reading_codes.to("meta").train()
    batch = batch.to(torch.device("meta"))
    reading_codes.objective(reading_codes(batch), batch).sums.sum().backward()
    assert reading_codes.flops(batch) > 0


@pytest.mark.gpu
def test_an_encoder_on_cuda_computes_what_it_computes_on_a_cpu_and_does_not_wait(reading_codes, pipeline):
    searching = with_beam(reading_codes, pipeline, 5)
    batch = batch_of(pipeline, random_rows(pipeline, SIZES))
    batch.ids.length_per_key()
    with torch.no_grad():
        losses, best = searching(batch).losses, searching.score(batch)
        searching, batch = searching.cuda(), batch.to(torch.device("cuda"))
        searching(batch)  # kernels are compiled
        with no_waiting():
            losses_on_cuda = searching(batch).losses
        best_on_cuda = searching.score(batch)
    torch.testing.assert_close(losses_on_cuda.cpu(), losses)
    assert torch.equal(best_on_cuda.items.cpu(), best.items)
    torch.testing.assert_close(best_on_cuda.scores.cpu(), best.scores)


def test_what_an_encoder_does_not_read_is_refused(pipeline):
    """Besides what it takes the place of: other features, and heads that read one state."""
    generator = pipeline.model.generator
    generator.encoder.num_heads = 3
    generator.parallel.SetInParent()
    pipeline.features.add(name="price").sides.append(pb.HISTORY)
    said = {finding.path: finding.text for finding in checks.family_findings(pipeline)}
    for name in ("preprocessor", "mixer"):
        assert "remove one of the two" in said[f"model.generator.{name}"]
    assert "must be a multiple of it unless head_dim is given" in said["model.generator.encoder.num_heads"]
    assert "use `decoder`" in said["model.generator.parallel"] and "nothing else" in said["features[1]"]
    generator.ClearField("encoder")
    generator.ClearField("mixer")
    said = {finding.path: finding.text for finding in checks.family_findings(pipeline)}
    assert "give it, or an encoder" in said["model.generator.mixer"] and "features[1]" not in said


def test_ids_without_parallel_codes_are_refused(pipeline):
    pipeline.model.generator.ids.SetInParent()
    said = {finding.path: finding.text for finding in checks.family_findings(pipeline)}
    assert "add it" in said["model.generator.ids"]


@pytest.mark.parametrize("kind", ["in order", "parallel", "hybrid", "reading_codes"])
def test_scores_rank_the_candidates(model, pipeline, kind, request):
    """By sorting all scores of `score`."""
    if kind == "parallel":
        pipeline.model.generator.parallel.SetInParent()
        model = build_model(pipeline).eval()
    elif kind != "in order":
        model = request.getfixturevalue(kind)
    rows = random_rows(pipeline, SIZES)
    batch = batch_of(pipeline, rows)
    ranks, scores = model.ranks(model(batch), batch), model.score(batch)
    expected = []
    for row, of_items in zip(rows, scores, strict=True):
        for item in row.values["candidate_item_id"]:
            seen = set(row.values["uih_item_id"])
            others = [k for k in range(1, 21) if k != item and k not in seen]
            better = sum(bool(of_items[k - 1] >= of_items[item - 1]) for k in others)
            expected.append(21 if item == 0 or item in seen else 1 + better)
    assert ranks.tolist() == expected


def with_beam(model, pipeline, size):
    """The same weights, which search with a beam."""
    changed = pb.Pipeline()
    changed.CopyFrom(pipeline)
    changed.model.generator.decoding.method = pb.Decoding.BEAM
    changed.model.generator.decoding.beam_size = changed.predict.top_k = size
    del changed.model.generator.metrics[:]
    searching = build_model(changed).eval()
    searching.load_state_dict(model.state_dict())
    return searching


def test_ranks_of_a_beam_are_exact_as_far_as_it_reaches(model, pipeline):
    """A beam of 20 finds all 20 items; one of 3 keeps the best 3 prefixes, and finds nothing at rank 4."""
    batch = batch_of(pipeline, random_rows(pipeline, [(3, 3), (0, 4), (6, 4), (2, 0), (1, 4)]))
    exact = model.ranks(model(batch), batch)
    assert len(set(exact.tolist())) > 8
    wide = with_beam(model, pipeline, 20)
    assert torch.equal(wide.ranks(wide(batch), batch), exact)
    narrow = with_beam(model, pipeline, 3)
    ranks = narrow.ranks(narrow(batch), batch)
    answer = narrow.score(batch)
    best = answer.items
    assert torch.equal(narrow.answer_ranks((answer.scores, best), None, batch), ranks)
    targets = [(row, item) for row, n in enumerate(batch.num_candidates.tolist()) for item in range(n)]
    items = batch.ids["candidate_item_id"].values().tolist()
    for (row, _), item, rank in zip(targets, items, ranks.tolist(), strict=True):
        kept = best[row].tolist()
        assert rank == (1 + kept.index(item - 1) if item - 1 in kept and item else 21)
    assert set(ranks.tolist()) <= {1, 2, 3, 21}


@pytest.mark.parametrize("kind", ["in order", "beam", "parallel", "hybrid", "reading_codes"])
def test_only_listed_items_are_found_and_ranked(model, pipeline, folder, kind, request):
    """Against the scores of all items, from which the unlisted ones are taken by hand."""
    if kind == "parallel":
        pipeline.model.generator.parallel.SetInParent()
        model = build_model(pipeline).eval()
    elif kind not in ("in order", "beam"):
        model = request.getfixturevalue(kind)
    listed = [101, 104, 105, 107, 111, 113, 118]
    pq.write_table(pa.table({"item_id": [*listed, 999, None]}), folder / "stock.parquet")
    changed = pb.Pipeline()
    changed.CopyFrom(pipeline)
    changed.model.generator.decoding.items = str(folder / "stock.parquet")
    limited = build_model(changed).eval()
    limited.load_state_dict(model.state_dict())
    searching = with_beam(limited, changed, 10) if kind == "beam" else limited
    batch = batch_of(pipeline, random_rows(pipeline, [(3, 9), (0, 9), (6, 9), (2, 0), (1, 9)]))
    scores, expected = model.score(batch), []
    numbers = mappings(pipeline)["item_id"].map(pa.array(listed)).tolist()
    seen = [set(items.tolist()) for items in batch.seen.split(batch.seen_layout.lengths.tolist())]
    targets = iter(batch.ids["candidate_item_id"].values().tolist())
    for row, count in enumerate(batch.num_candidates.tolist()):
        for item in (next(targets) for _ in range(count)):
            others = [k for k in numbers if k != item and k not in seen[row]]
            better = sum(bool(scores[row, k - 1] >= scores[row, item - 1]) for k in others)
            expected.append(1 + better if item in numbers and item not in seen[row] else 21)
    assert len(set(expected)) > 3 and 21 in expected
    assert searching.ranks(searching(batch), batch).tolist() == expected
    if kind != "beam":
        of_listed = limited.score(batch)
        assert torch.equal(
            of_listed > -torch.inf, torch.isin(torch.arange(1, 21), torch.tensor(numbers))[None].expand(5, -1)
        )
        torch.testing.assert_close(limited.answer_ranks((of_listed,), None, batch).tolist(), expected)
    table = pa.table(
        {
            "uih_item_id": [[104, 102], []],
            "uih_timestamps": [[1, 2], []],
            "uih_actions": [[1, 1], []],
            "request_time": [10**6] * 2,
        }
    )
    answers = Predictor(EagerPackage(searching)).table(table).to_pydict()["item_id"]
    assert [sorted(items) for items in answers] == [[k for k in listed if k != 104], listed]


def test_a_list_of_items_that_does_not_fit_is_refused(pipeline, folder):
    path = folder / "stock.parquet"
    pipeline.model.generator.decoding.items = str(path)
    with pytest.raises(
        DataError, match="stock.parquet: no such file; correct model.generator.decoding.items"
    ):
        build_model(pipeline)
    path.write_text("item_id")
    with pytest.raises(DataError, match="stock.parquet: cannot be read as parquet .*decoding.items names it"):
        build_model(pipeline)
    for table, message in (
        ({"id": [101]}, "no column 'item_id'; it has id"),
        ({"item_id": ["a"]}, "item_id is string, the ids of .* are integers"),
        ({"item_id": [1, 2]}, "none of its 2 ids is in"),
    ):
        pq.write_table(pa.table(table), path)
        with pytest.raises(DataError, match=f"stock.parquet: {message}"):
            build_model(pipeline)


def test_the_recall_of_beams_is_their_share_of_the_exactly_best_items(model, pipeline):
    searching = with_beam(model, pipeline, 3)

    batch = batch_of(pipeline, random_rows(pipeline, [*SIZES, (6, 0), (4, 0), (5, 0)]))
    seen = [set(row.tolist()) for row in batch.seen.split(batch.seen_layout.lengths.tolist())]
    hits = wanted = 0
    for row, (scores, items) in enumerate(
        zip(model.score(batch).tolist(), searching.score(batch).items.tolist(), strict=True)
    ):
        best = sorted((k for k in range(20) if k + 1 not in seen[row]), key=lambda k, s=scores: -s[k])[:3]
        hits, wanted = hits + len({*best} & {*items[:3]}), wanted + len(best)
    assert 0 < hits < wanted
    counts = {name: pair.tolist() for name, pair in searching.exact_recall(batch).items()}
    names = [f"recall@3/beam_{width}" for width in (3, 20, 50, 200, 512)]
    assert counts == {names[0]: [hits, wanted], **dict.fromkeys(names[1:], [wanted, wanted])}


def test_the_graph_of_a_beam_is_captured_with_every_size_dynamic(pipeline, folder):
    """And finds what the model finds, in rows and histories of other numbers; none but listed items."""
    pipeline.model.generator.mixer.hstu.num_layers = 1
    listed = range(100, 115)
    pq.write_table(pa.table({"item_id": listed}), folder / "stock.parquet")
    pipeline.model.generator.decoding.items = str(folder / "stock.parquet")
    numbers = mappings(pipeline)["item_id"].map(pa.array(listed)).tolist()
    searching = with_beam(built(pipeline), pipeline, 6)
    program = captured(searching, batch_of(pipeline, random_rows(pipeline, SIZES)))
    for sizes in (SIZES, [(6, 1)], [(1, 0), (0, 0), (5, 2)]):
        batch = batch_of(pipeline, random_rows(pipeline, sizes, seed=3))
        with torch.no_grad():
            scores, items = program(*inputs_of(batch, searching.pipeline))
            expected = searching.score(batch)
        assert torch.equal(items, expected.items)
        torch.testing.assert_close(scores, expected.scores)
        for row, of_row in zip(batch.seen.split(batch.seen_layout.lengths.tolist()), items, strict=True):
            assert not set((row - 1).tolist()) & set(of_row.tolist()) - {-1}
            assert set(of_row.tolist()) <= {number - 1 for number in numbers} | {-1}


CAPTURED = ("in order", "hybrid")
"""Generators whose graphs of all scores are captured: an encoder of codes with the decoder of codes in order,
and tokens for items with codes in parallel and ids."""


def captured_pipeline(folder, kind):
    """The config of one of them, which finds listed items only."""
    pipeline = generator_pipeline(folder, CODES)
    if kind == "hybrid":
        add_ids(pipeline)
        pipeline.model.generator.mixer.hstu.num_layers = 1
    else:
        read_codes(pipeline)
        decoder = pipeline.model.generator.decoder
        decoder.num_layers, decoder.num_heads, decoder.ff_dim, decoder.dropout = 1, 2, 16, 0.1
    pq.write_table(pa.table({"item_id": range(100, 115)}), folder / "stock.parquet")
    pipeline.model.generator.decoding.items = str(folder / "stock.parquet")
    return pipeline


@pytest.mark.parametrize("kind", CAPTURED)
def test_the_graph_of_all_scores_is_captured_with_every_size_dynamic(folder, kind):
    pipeline = captured_pipeline(folder, kind)
    model = built(pipeline)
    program = captured(model, batch_of(pipeline, random_rows(pipeline, SIZES)))
    for sizes in (SIZES, [(6, 1)], [(1, 0), (0, 0), (5, 2)]):
        batch = batch_of(pipeline, random_rows(pipeline, sizes, seed=3))
        with torch.no_grad():
            torch.testing.assert_close(program(*inputs_of(batch, pipeline)), model.score(batch))


def test_predictions_hold_original_ids_codes_and_scores_of_unseen_items(model, pipeline):
    """The same by a beam and by all scores, of rows with ids that the model does not know."""
    histories = [[100, 119, 7, 103], [], list(range(100, 118))]
    counts = list(map(len, histories))
    table = pa.table(
        {
            "uih_item_id": histories,
            "uih_timestamps": [list(range(n)) for n in counts],
            "uih_actions": [[1] * n for n in counts],
            "request_time": [10**6] * 3,
        }
    )
    exact = Predictor(EagerPackage(model)).table(table).to_pydict()
    searching = Predictor(EagerPackage(with_beam(model, pipeline, 10)))
    assert searching.most_items == 10 and Predictor(EagerPackage(model)).most_items == 20
    answer = searching.table(table).to_pydict()
    assert answer["item_id"] == exact["item_id"] and answer["codes"] == exact["codes"]
    for row, items in enumerate(answer["item_id"]):
        assert len(items) == min(10, 20 - len({*histories[row]} & {*range(100, 120)}))
        assert answer["score"][row] == pytest.approx(exact["score"][row], abs=1e-5)
        rows = mappings(pipeline)["item_id"].map(pa.array(items, pa.int64()))
        assert answer["codes"][row] == model.codes[rows].tolist()


def undecided(pipeline, **vocabulary):
    """The config before anything about decoding was chosen."""
    changed = pb.Pipeline()
    changed.CopyFrom(pipeline)
    changed.model.generator.ClearField("decoding")
    for name, value in vocabulary.items():
        setattr(changed.features[0].id.vocabulary, name, value)
    return changed


def test_the_method_follows_from_the_size_of_the_catalogue_unless_it_is_given(pipeline):
    small, large = undecided(pipeline, size=100), undecided(pipeline, size=101)
    parallel, given = undecided(large), undecided(small)
    parallel.model.generator.parallel.SetInParent()
    given.model.generator.decoding.beam_size = 30
    for changed, method, size in (
        (small, pb.Decoding.EXACT, 50),
        (large, pb.Decoding.BEAM, 50),
        (parallel, pb.Decoding.EXACT, 50),
        (given, pb.Decoding.BEAM, 30),
    ):
        resolved = config.resolve(changed, read_files=False).pipeline
        assert resolved.model.generator.decoding == pb.Decoding(method=method, beam_size=size)
        assert config.resolve(resolved, read_files=False).pipeline == resolved


def test_what_a_beam_cannot_do_is_said_before_the_model_is_built(pipeline):
    pipeline.model.generator.decoding.CopyFrom(pb.Decoding(method=pb.Decoding.BEAM, beam_size=4))
    pipeline.model.generator.parallel.SetInParent()
    said = {finding.path: finding.text for finding in checks.family_findings(pipeline)}
    assert "10 is given; a beam finds model.generator.decoding.beam_size = 4" in said["predict.top_k"]
    assert "k is 5" in said["model.generator.metrics[0]"] and len(said) == 3
    assert "no prefixes" in said["model.generator.decoding.method"]


def test_the_future_does_not_reach_the_past(model, pipeline):
    row, neighbor = random_row(pipeline, 6, 1), random_row(pipeline, 6, 1, seed=9)
    before = model(batch_of(pipeline, [row]))
    for cut in range(1, 6):
        after = model(batch_of(pipeline, [with_another_future(row, neighbor, cut)]))
        assert torch.equal(after.states[:cut], before.states[:cut])
        assert torch.equal(after.losses[: cut - 1], before.losses[: cut - 1])
        assert not torch.isclose(after.states[cut:], before.states[cut:]).all(1).any()


def test_a_bundle_without_an_item_of_the_vocabulary_is_refused(pipeline, folder):
    write_codes(folder / "less", list(range(100, 118)), CODES[:18], 4)
    with pytest.raises(DataError, match=r"no codes for 2 of 20 items .*recsys sid append"):
        codes_of_table(pipeline, folder / "less")


def test_a_bundle_with_ids_of_another_type_is_refused(pipeline, folder):
    write_codes(folder / "texts", [str(n) for n in range(100, 120)], CODES, 4)
    with pytest.raises(DataError, match="item ids are string"):
        codes_of_table(pipeline, folder / "texts")


def test_a_bundle_with_changed_codes_or_none_at_all_is_refused(pipeline, folder):
    with pytest.raises(DataError, match="no such folder; .*recsys sid fit"):
        codes_of_table(pipeline, folder / "nothing")
    (folder / "bundle" / "codes.parquet").write_bytes(b"?")
    with pytest.raises(DataError, match=r"codes.parquet.*\n.*recsys sid fit"):
        codes_of_table(pipeline, folder / "bundle")


def test_a_resumed_run_is_the_uninterrupted_one_and_evaluates_to_it(tmp_path):
    """With an encoder, whose steps draw the events to be predicted."""
    bundle = movielens_codes(tmp_path / "bundle")
    few = []
    for split, count in (("train", 80), ("validation", 32)):
        path = tmp_path / f"{split}.parquet"
        pq.write_table(pq.read_table(f"tests/data/movielens/{split}.parquet").slice(0, count), path)
        few.append(f'data.{split}={{parquet {{paths: "{path}"}}}}')

    def train(name, steps):
        flags = [f'model.generator.bundle="{bundle}"', f"train.num_steps={steps}", *ENCODER, *SHORT, *few]
        chosen = [part for flag in flags for part in ("--set", flag)]
        config = "configs/movielens_small_generator.config"
        command("train", "--config", config, "--run-dir", tmp_path / name, *chosen)

    train("whole", 8)
    train("cut", 4)
    train("cut", 8)
    for kind in ("train", "evaluation"):
        whole, cut = records(tmp_path / "whole", kind), records(tmp_path / "cut", kind)
        assert whole[8] == cut[8]
    newest = ("--split", "validation", "--checkpoint", "newest", "--set", "train.evaluation.max_batches=1")
    assert evaluate("--run-dir", str(tmp_path / "cut"), *newest) == 0
    shutil.rmtree(bundle)
    movielens_codes(bundle, seed=1)
    with pytest.raises(AssertionError, match="the bundle gives items other codes"):
        train("cut", 12)
    assert evaluate("--run-dir", str(tmp_path / "cut"), *newest) != 0
