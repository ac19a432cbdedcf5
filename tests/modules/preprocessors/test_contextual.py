import math

import pytest
import torch

from recsys import protos as pb
from recsys.data.batch import LayoutRule
from recsys.modules.embedding import EmbeddingGroup
from recsys.modules.gated_mlp import RowContext
from recsys.modules.preprocessors import ContextualPreprocessor
from recsys.modules.user_tokens import JoinedTokens
from recsys.ops import SequenceLayout
from tests.modules.pipelines import RANKER, RANKERS, batch_of, contextual, pipeline_of, random_rows

SIZES = [(3, 2), (0, 1), (5, 0), (1, 4), (0, 0)]
WIDTHS = {"gender": 4, "item_id": 8, "tags": 4}


def build(pipeline):
    config = pipeline.model.ranker.preprocessor.contextual
    module = ContextualPreprocessor(config, pipeline=pipeline)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


def run(module, pipeline, rows):
    """The module's answer, and the vectors that it got: column -> row -> [entries, width]."""
    batch = batch_of(pipeline, rows)
    embeddings, nested = {}, {}
    for name, width in WIDTHS.items():
        columns = [name] if name == "gender" else [f"uih_{name}", f"candidate_{name}"]
        for column in columns:
            counts = [1 if column == "gender" else len(row.values[column]) for row in rows]
            embeddings[column] = torch.randn(sum(counts), width)
            nested[column] = embeddings[column].split(counts)
    for column in ("age", "candidate_price"):
        values = [[row.values[column]] if column == "age" else row.values[column] for row in rows]
        nested[column] = [torch.tensor(row)[:, None] for row in values]
        embeddings[column] = torch.cat(nested[column])
    return module(embeddings, batch), nested


def encoded(module, value, place, bucket):
    return (
        value * math.sqrt(8)
        + module.positional.position.weight[place]
        + module.positional.time.weight[bucket]
    )


def contextual_tokens(module, nested, n):
    """The contextual tokens of row n, before positions: one a feature, or all features cut into tokens."""
    if isinstance(module.contextual, JoinedTokens):
        first, _, last = module.contextual.project
        joined = torch.cat([nested["gender"][n][0], nested["age"][n][0]])
        hidden = torch.nn.functional.silu(first.weight @ joined + first.bias)
        return (last.weight @ hidden + last.bias).split(8)
    layers = [module.contextual.project[f"{name}_token"] for name in ("gender", "age")]
    values = [nested["gender"][n][0], nested["age"][n][0]]
    return [layer.weight @ value + layer.bias for layer, value in zip(layers, values, strict=True)]


def token_by_token(module, pipeline, rows, nested):
    """[contextual | history | targets] of every row, written from the description of the parts."""
    placement = pipeline.model.ranker.preprocessor.contextual.action_placement
    interleaved = placement == pb.ContextualPreprocessor.INTERLEAVED
    tokens, times, candidates = [], [], []
    for n, row in enumerate(rows):
        events, targets = len(row.uih_timestamps), len(row.candidate_timestamps)
        contextual = contextual_tokens(module, nested, n)
        for index, value in enumerate(contextual):
            tokens.append(encoded(module, value, index, 5))
            times.append((row.request_time, row.request_time))
        history = []
        for i in range(events):
            item = [nested["uih_item_id"][n][i], nested["uih_tags"][n][i]]
            content = module.content.project(torch.cat([*item, module.content.missing["uih_price"]]))
            click, like, three, ten = module.action.weight
            action = (row.uih_actions[i] % 2) * click + (row.uih_actions[i] // 8 % 2) * like
            action = action + (row.uih_watch_time[i] >= 3) * three + (row.uih_watch_time[i] >= 10) * ten
            time, after = row.uih_timestamps[i], [*row.uih_timestamps, row.request_time][i + 1]
            if interleaved:
                history += [(content, time, time), (action, time, after)]
            else:
                history.append((content + action, time, after))
        for i, (value, time, after) in enumerate(history):
            bucket = min(4, math.isqrt((row.request_time - time) // 60))
            tokens.append(encoded(module, value, len(contextual) + len(history) - i, bucket))
            times.append((time, after))
        for i in range(targets):
            names = ("item_id", "tags", "price")
            content = module.content.project(torch.cat([nested[f"candidate_{name}"][n][i] for name in names]))
            candidates.append(content)
            tokens.append(encoded(module, content + module.target_action, len(contextual), 0))
            times.append((row.candidate_timestamps[i], row.candidate_timestamps[i]))
    return torch.stack(tokens), times, torch.stack(candidates)


@pytest.fixture
def dtype(request):
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(torch.float32)


# Terms that cancel, those of joined tokens, leave more rounding in float32 than is allowed, on some CPUs.
@pytest.mark.usefixtures("dtype")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("plain", torch.float32), ("interleaved", torch.float32), ("joined", torch.float64)],
    indirect=["dtype"],
)
def test_equals_the_description_token_by_token(name):
    pipeline = pipeline_of(*RANKERS[name])
    rows, module = random_rows(pipeline, SIZES), build(pipeline)
    prepared, nested = run(module, pipeline, rows)
    tokens, times, candidates = token_by_token(module, pipeline, rows, nested)
    sequence = prepared.sequence
    torch.testing.assert_close(sequence.values, tokens)
    torch.testing.assert_close(prepared.candidates, candidates)
    assert sequence.timestamps.tolist() == [time for time, _ in times]
    assert sequence.next_timestamps.tolist() == [after for _, after in times]


@pytest.mark.parametrize("interleaved", [False, True])
def test_contextualized_parts_get_the_features_of_their_row(interleaved):
    changes = RANKERS["contextualized"][1:]
    if interleaved:
        changes = (*changes, contextual("action_placement: INTERLEAVED"))
    pipeline = pipeline_of(RANKER, *changes)
    preprocessor = pipeline.model.ranker.preprocessor.contextual
    preprocessor.ClearField("positional")
    rows, module = random_rows(pipeline, SIZES), build(pipeline)
    prepared, nested = run(module, pipeline, rows)
    batch = batch_of(pipeline, rows)
    expected = []
    for n, row in enumerate(rows):
        users = torch.cat([nested["gender"][n], nested["age"][n]], dim=1)
        events, targets = len(row.uih_timestamps), len(row.candidate_timestamps)

        def of_row(count, users=users):
            return RowContext(users, SequenceLayout(torch.tensor([count])))

        missing = module.content.missing["uih_price"].expand(events, 1)
        joined = torch.cat([nested["uih_item_id"][n], nested["uih_tags"][n], missing], dim=1)
        content = module.content.project(joined, of_row(events))
        actions = torch.tensor(row.uih_actions, dtype=torch.int64)
        action = module.action(actions, torch.tensor(row.uih_watch_time), of_row(events))
        expected += contextual_tokens(module, nested, n)
        for item, done in zip(content, action, strict=True):
            expected += [item, done] if interleaved else [item + done]
        names = ("candidate_item_id", "candidate_tags", "candidate_price")
        joined = torch.cat([nested[name][n] for name in names], dim=1)
        expected += list(module.content.project(joined, of_row(targets)) + module.target_action)
    assert len(expected) == batch.layout.total_len
    torch.testing.assert_close(prepared.sequence.values, torch.stack(expected))


@pytest.mark.parametrize(
    ("name", "num_contextual", "tokens_per_event"),
    [("plain", 2, 1), ("interleaved", 2, 2), ("joined", 3, 1), ("all", 1, 2)],
)
def test_layout_rule(name, num_contextual, tokens_per_event):
    pipeline = pipeline_of(*RANKERS[name])
    rule = ContextualPreprocessor.layout_rule(pipeline.model.ranker.preprocessor.contextual, pipeline)
    assert rule == LayoutRule(num_contextual, True, tokens_per_event)
    # 6 events and 4 candidates at most.
    assert pipeline.model.max_seq_len == num_contextual + 6 * tokens_per_event + 4


def test_tokens_of_actions_need_an_encoder():
    pipeline = pipeline_of(*RANKERS["interleaved"])
    pipeline.model.ranker.preprocessor.contextual.ClearField("action")
    with pytest.raises(ValueError, match="INTERLEAVED makes a token of each action; set `action`"):
        build(pipeline)


def test_without_user_features_actions_and_positions_tokens_are_contents():
    pipeline = pipeline_of(RANKER)
    del pipeline.features[:2]
    contextual = pipeline.model.ranker.preprocessor.contextual
    contextual.ClearField("action")
    contextual.ClearField("positional")
    rows, module = random_rows(pipeline, [(2, 1), (0, 2)]), build(pipeline)
    prepared, nested = run_without_user(module, pipeline, rows)
    item = [torch.cat([nested[f"uih_{name}"][0], nested[f"uih_{name}"][1]]) for name in ("item_id", "tags")]
    missing = module.content.missing["uih_price"].expand(2, 1)
    history = module.content.project(torch.cat([*item, missing], dim=1))
    targets = prepared.candidates + module.target_action
    expected = torch.cat([history, targets[:1], targets[1:]])
    torch.testing.assert_close(prepared.sequence.values, expected)


def run_without_user(module, pipeline, rows):
    batch = batch_of(pipeline, rows)
    columns = {
        f"{side}_{name}": WIDTHS[name] for side in ("uih", "candidate") for name in ("item_id", "tags")
    }
    counts = {name: [len(row.values[name]) for row in rows] for name in columns}
    vectors = {name: torch.randn(sum(counts[name]), width) for name, width in columns.items()}
    prices = torch.tensor([price for row in rows for price in row.values["candidate_price"]])
    inputs = vectors | {"candidate_price": prices[:, None]}
    return module(inputs, batch), {name: value.split(counts[name]) for name, value in vectors.items()}


def test_dropout_is_for_training():
    pipeline = pipeline_of(RANKER)
    pipeline.model.ranker.preprocessor.contextual.dropout = 1.0
    rows, module = random_rows(pipeline, SIZES), build(pipeline)
    assert run(module, pipeline, rows)[0].sequence.values.count_nonzero() == 0
    module.eval()
    assert run(module, pipeline, rows)[0].sequence.values.count_nonzero() > 0


@pytest.mark.parametrize("form", ["channels", "interleaved channels"])
def test_a_channel_is_the_sequence_of_a_row_that_has_only_its_events(form):
    pipeline = pipeline_of(*RANKERS[form])
    rows = random_rows(pipeline, [(6, 2), (0, 1), (4, 3), (3, 0)])
    plain = pipeline_of(*RANKERS["interleaved" if form.startswith("interleaved") else "plain"])
    torch.manual_seed(0)
    module = build(pipeline)
    alone = build(plain)
    alone.load_state_dict(module.state_dict())
    embed = EmbeddingGroup(pipeline)
    batch = batch_of(pipeline, rows)
    together = module(embed(batch), batch)
    assert together.sequence.layout is batch.channel_layout

    kept = {
        "click": [[i for i, a in enumerate(row.uih_actions) if a & 1][-4:] for row in rows],
        "like or long": [
            [
                i
                for i, (a, s) in enumerate(zip(row.uih_actions, row.uih_watch_time, strict=True))
                if a & 10 or s >= 10
            ]
            for row in rows
        ],
        "all": [list(range(len(row.uih_actions))) for row in rows],
    }
    assert 0 < sum(map(len, kept["click"])) < sum(map(len, kept["all"]))
    for name, part in zip(batch.channel_events, together.sequence.split(), strict=True):
        only = batch_of(
            plain, [row.with_events(events) for row, events in zip(rows, kept[name], strict=True)]
        )
        expected = alone(embed(only), only)
        torch.testing.assert_close(part.values, expected.sequence.values)
        assert part.layout.lengths.tolist() == expected.sequence.layout.lengths.tolist()
        assert torch.equal(part.timestamps, expected.sequence.timestamps)
        assert torch.equal(part.next_timestamps, expected.sequence.next_timestamps)
        torch.testing.assert_close(together.candidates, expected.candidates)


@pytest.mark.parametrize("form", ["channels", "interleaved channels"])
def test_channels_share_what_was_encoded(form):
    """However many channels there are, each event, candidate and user is encoded once."""
    calls = []
    counted = {}
    for texts in (RANKERS[form], RANKERS["interleaved" if form.startswith("interleaved") else "plain"]):
        pipeline = pipeline_of(*texts)
        module, batch = build(pipeline), batch_of(pipeline, random_rows(pipeline, SIZES))
        calls.clear()
        for name, part in module.named_modules():
            if isinstance(part, torch.nn.Linear):
                part.register_forward_hook(
                    lambda _, inputs, __, name=name: calls.append((name, inputs[0].shape))
                )
        module(EmbeddingGroup(pipeline)(batch), batch)
        counted[len(batch.channel_events)] = sorted(calls)
    assert len(counted) == 2 and counted[0]
    assert counted[3] == counted[0]
