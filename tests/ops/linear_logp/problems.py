"""Inputs of `linear_logp`, and its formulas over one score after the other."""

import math

import torch
from torch import Tensor

IGNORED = -100


def problem(rows, candidates, width, *, dtype=torch.float64, bias=True, ids=True, seed=0):
    """Arguments by name. Row 0 and candidate 0, the last ones, ignored rows, and many accidental hits."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    target = torch.randint(candidates, (rows,), generator=generator)
    target[3::5] = IGNORED
    target[1::7], target[2::7] = 0, candidates - 1
    given = {"hidden": normal(rows, width), "weight": normal(candidates, width), "target": target}
    given["temperature"] = torch.tensor(0.7, dtype=torch.float64).to(normal(1).dtype)
    if bias:
        given["bias"] = normal(candidates)
    if ids:
        given["candidate_ids"] = torch.randint(max(1, candidates // 2), (candidates,), generator=generator)
        given["target_ids"] = torch.randint(max(1, candidates // 2), (rows,), generator=generator)
        counted = target != IGNORED
        given["target_ids"][counted] = given["candidate_ids"][target[counted]]
    return given


def by_hand(given) -> tuple[Tensor, Tensor]:
    """logp and lse, differentiable; scores summed one product after the other."""
    found = []
    bias = given.get("bias", torch.zeros(len(given["weight"]), dtype=torch.float64))
    for i, true in enumerate(given["target"].tolist()):
        scores = {}
        for j, row in enumerate(given["weight"]):
            same = "target_ids" in given and given["target_ids"][i] == given["candidate_ids"][j]
            if j == true or not same:
                product = sum(a * b for a, b in zip(given["hidden"][i], row, strict=True))
                scores[j] = (product + bias[j]) / given["temperature"]
        top = max((score.item() for score in scores.values()), default=-math.inf)
        if scores:
            lse = top + torch.log(sum(torch.exp(score - top) for score in scores.values()))
        else:
            lse = torch.tensor(-math.inf, dtype=torch.float64)
        if true == IGNORED:
            found.append((torch.zeros_like(lse), lse.detach()))
        else:
            found.append((scores[true] - lse, lse))
    logp, lse = zip(*found, strict=True)
    return torch.stack(logp), torch.stack(lse)


def leaves_of(given) -> list[Tensor]:
    """The floating point tensors of a problem, with gradients enabled."""
    names = ("hidden", "weight", "bias", "temperature")
    return [given[name].requires_grad_() for name in names if isinstance(given.get(name), Tensor)]


def cotangents(rows, dtype=torch.float64, device="cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, generator=generator, dtype=torch.float64).to(device, dtype) for _ in range(2)]


def gradients(outputs, leaves) -> list[Tensor]:
    """Gradients for random cotangents of logp and lse, which differ."""
    some = outputs[0]
    given = cotangents(some.shape[0], some.dtype, some.device)
    return list(torch.autograd.grad(list(outputs), leaves, given))
