"""Problems for `linear_logp`, and its formulas over one score after the other."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from recsys.ops import linear_logp, linear_lse
from tests.ops.harness import Problem, normal

IGNORED = -100
FLOATS = ("hidden", "weight", "bias", "temperature")


def problem(rows, candidates, width, *, bias=True, ids=True, seed=0, **options) -> Problem:
    """Row 0 and candidate 0, the last ones, ignored rows, and many accidental hits."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(candidates, (rows,), generator=generator)
    target[3::5] = IGNORED
    target[1::7], target[2::7] = 0, candidates - 1
    tensors = {"hidden": normal(rows, width, seed=seed), "weight": normal(candidates, width, seed=seed + 1)}
    tensors["temperature"] = torch.tensor(0.7, dtype=torch.float64)
    if bias:
        tensors["bias"] = normal(candidates, seed=seed + 2)
    options |= {"target": target}
    if ids:
        candidate_ids = torch.randint(max(1, candidates // 2), (candidates,), generator=generator)
        target_ids = torch.randint(max(1, candidates // 2), (rows,), generator=generator)
        counted = target != IGNORED
        target_ids[counted] = candidate_ids[target[counted]]
        options |= {"candidate_ids": candidate_ids, "target_ids": target_ids}
    return Problem("linear_logp", linear_logp, tensors, options)


def without_target(given: Problem) -> Problem:
    """The problem of `linear_lse`."""
    options = {name: value for name, value in given.options.items() if name != "target"}
    return Problem("linear_logp", linear_lse, given.tensors, options)


def arguments_of(given: Problem) -> dict:
    """The arguments of a problem by name; its floating point tensors require gradients."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in given.tensors.items()}
    return leaves | given.options


def leaves_of(arguments: dict) -> list[Tensor]:
    """The floating point tensors among the arguments of an op."""
    return [arguments[name] for name in FLOATS if name in arguments]


def by_hand(
    hidden,
    weight,
    target=None,
    *,
    bias=None,
    temperature=1.0,
    candidate_ids=None,
    target_ids=None,
    l2_normalize=False,
):
    """logp and lse, or lse alone without a target; scores are summed one product after the other."""
    if l2_normalize:
        hidden, weight = F.normalize(hidden, dim=1, eps=1e-6), F.normalize(weight, dim=1, eps=1e-6)
    logp, lse = [], []
    for i, row in enumerate(hidden):
        true = None if target is None else target[i].item()
        scores = {}
        for j, candidate in enumerate(weight):
            if j == true or target_ids is None or target_ids[i] != candidate_ids[j]:
                product = sum(a * b for a, b in zip(row, candidate, strict=True))
                scores[j] = (product if bias is None else product + bias[j]) / temperature
        top = max((score.item() for score in scores.values()), default=0.0)
        total = sum((torch.exp(score - top) for score in scores.values()), row.new_zeros(()))
        lse.append(top + torch.log(total) if scores else row.new_tensor(-math.inf))
        if true == IGNORED:
            lse[-1] = lse[-1].detach()
        logp.append(row.new_zeros(()) if true in (None, IGNORED) else scores[true] - lse[-1])
    return torch.stack(lse) if target is None else (torch.stack(logp), torch.stack(lse))
