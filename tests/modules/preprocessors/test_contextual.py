import math

import torch

from recsys.modules.preprocessors import ContextualPreprocessor
from tests.modules.pipelines import RANKER, batch_of, pipeline_of, random_rows

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
    return module(embeddings, batch), nested


def token_by_token(module, pipeline, rows, nested):
    """[contextual | history | targets] of every row, written from the description of the parts."""
    positional = module.positional
    tokens, times, candidates = [], [], []
    for n, row in enumerate(rows):
        events, targets = len(row.uih_timestamps), len(row.candidate_timestamps)
        for index, name in enumerate(("gender", "age")):
            project = module.contextual.project[f"{name}_token"]
            value = project.weight @ nested[name][n][0] + project.bias
            tokens.append(
                value * math.sqrt(8) + positional.position.weight[index] + positional.time.weight[5]
            )
            times.append((row.request_time, row.request_time))
        for i in range(events):
            item = [
                nested["uih_item_id"][n][i],
                nested["uih_tags"][n][i],
                module.content.missing["uih_price"],
            ]
            value = module.content.project(torch.cat(item))
            click, like, three, ten = module.action.weight
            value = value + (row.uih_actions[i] % 2) * click + (row.uih_actions[i] // 8 % 2) * like
            value = value + (row.uih_watch_time[i] >= 3) * three + (row.uih_watch_time[i] >= 10) * ten
            age = row.request_time - row.uih_timestamps[i]
            place = 2 + events - i
            tokens.append(
                value * math.sqrt(8)
                + positional.position.weight[place]
                + positional.time.weight[min(4, math.isqrt(age // 60))]
            )
            later = [*row.uih_timestamps, row.request_time]
            times.append((row.uih_timestamps[i], later[i + 1]))
        for i in range(targets):
            names = ("item_id", "tags", "price")
            content = module.content.project(torch.cat([nested[f"candidate_{name}"][n][i] for name in names]))
            candidates.append(content)
            tokens.append(
                (content + module.target_action) * math.sqrt(8)
                + positional.position.weight[2]
                + positional.time.weight[0]
            )
            times.append((row.candidate_timestamps[i], row.candidate_timestamps[i]))
    return torch.stack(tokens), times, torch.stack(candidates)


def test_equals_the_description_token_by_token():
    pipeline = pipeline_of(RANKER)
    rows, module = random_rows(pipeline, SIZES), build(pipeline)
    prepared, nested = run(module, pipeline, rows)
    tokens, times, candidates = token_by_token(module, pipeline, rows, nested)
    sequence = prepared.sequence
    torch.testing.assert_close(sequence.values, tokens)
    torch.testing.assert_close(prepared.candidates, candidates)
    assert sequence.timestamps.tolist() == [own for own, _ in times]
    assert sequence.next_timestamps.tolist() == [after for _, after in times]


def test_layout_rule_counts_user_features():
    pipeline = pipeline_of(RANKER)
    rule = ContextualPreprocessor.layout_rule(pipeline.model.ranker.preprocessor.contextual, pipeline)
    assert (rule.num_contextual, rule.targets) == (2, True)


def test_without_user_features_actions_and_positions_tokens_are_contents():
    pipeline = pipeline_of(RANKER)
    del pipeline.features[:2]
    contextual = pipeline.model.ranker.preprocessor.contextual
    contextual.ClearField("action")
    contextual.ClearField("positional")
    rows, module = random_rows(pipeline, [(2, 1), (0, 2)]), build(pipeline)
    prepared, nested = run_without_user(module, pipeline, rows)
    item = [torch.cat([nested[f"uih_{name}"][0], nested[f"uih_{name}"][1]]) for name in ("item_id", "tags")]
    history = module.content.project(torch.cat([*item, module.content.missing["uih_price"].expand(2, 1)], dim=1))
    targets = prepared.candidates + module.target_action
    expected = torch.cat([history, targets[:1], targets[1:]])
    torch.testing.assert_close(prepared.sequence.values, expected)


def run_without_user(module, pipeline, rows):
    batch = batch_of(pipeline, rows)
    columns = {
        f"{side}_{name}": WIDTHS[name] for side in ("uih", "candidate") for name in ("item_id", "tags")
    }
    counts = {name: [len(row.values[name]) for row in rows] for name in columns}
    embeddings = {name: torch.randn(sum(counts[name]), width) for name, width in columns.items()}
    return module(embeddings, batch), {name: value.split(counts[name]) for name, value in embeddings.items()}


def test_dropout_is_for_training():
    pipeline = pipeline_of(RANKER)
    pipeline.model.ranker.preprocessor.contextual.dropout = 1.0
    rows, module = random_rows(pipeline, SIZES), build(pipeline)
    assert run(module, pipeline, rows)[0].sequence.values.count_nonzero() == 0
    module.eval()
    assert run(module, pipeline, rows)[0].sequence.values.count_nonzero() > 0
