"""The Triton kernels of `linear_logp` on a GPU: numbers, repeatability, sizes in any order, graphs."""

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from recsys import protos as pb
from recsys.modules.losses.softmax import IGNORED as NO_TARGET
from recsys.modules.losses.softmax import SoftmaxLoss
from recsys.ops import explain, last_backend, linear_logp, linear_lse
from recsys.ops.linear_logp import OP
from tests.ops import harness
from tests.ops.linear_logp.problems import IGNORED, cotangents, gradients, leaves_of, problem

pytestmark = pytest.mark.gpu

DEVICE = "cuda"

on_hopper = harness.needs_hopper
BACKENDS = ["triton", pytest.param("sm90", marks=on_hopper)]


def on_device(given):
    return {
        name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in given.items()
    }


def is_float(value):
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def results(given, backend, dtype=None):
    """Both outputs and all gradients, for random cotangents."""
    given = {
        name: value.detach().to(dtype or value.dtype) if is_float(value) else value
        for name, value in given.items()
    }
    leaves = leaves_of(given)
    out = linear_logp(**given, backend=backend)
    assert last_backend("linear_logp") == backend
    return [*(one.detach() for one in out), *gradients(out, leaves)]


def rounded_scores(given):
    """Outputs and gradients of a loss that holds its scores, in the type of hidden."""
    given = {name: value.detach() for name, value in given.items()}
    leaves = leaves_of(given)
    scores = given["hidden"] @ given["weight"].T
    scores = (scores + given["bias"] if "bias" in given else scores) / given["temperature"]
    target = given["target"]
    if "target_ids" in given:
        hit = given["target_ids"][:, None] == given["candidate_ids"]
        hit &= torch.arange(hit.shape[1], device=DEVICE) != target[:, None]
        scores = scores.masked_fill(hit, -torch.inf)
    counted = target != IGNORED
    lse = torch.logsumexp(scores, 1)
    logp = scores.gather(1, target.clamp(min=0)[:, None])[:, 0] - lse
    lse = torch.where(counted, lse, lse.detach())
    out = [torch.where(counted, logp, 0).float(), lse.float()]
    return [*(one.detach() for one in out), *gradients(out, leaves)]


def assert_near(given, backend="triton"):
    """Not further from float64 than twice what PyTorch is that holds its scores in the same type."""
    got, theirs = results(given, backend), rounded_scores(given)
    want = results(given, "reference", torch.float64)
    for ours, other, exact in zip(got, theirs, want, strict=True):
        left = exact.isfinite()
        assert torch.equal(ours.isfinite(), left)
        ours, other, exact = (torch.where(left, one.double(), 0) for one in (ours, other, exact))
        other = torch.where(other.isfinite(), other, exact)
        allowed = 2 * (other - exact).norm() + 1e-3 * exact.norm() + 1e-4
        assert (ours - exact).norm() <= allowed


# (dtype, width, bias, ids): each is compiled for once, whatever the sizes.
VARIANTS = [
    (torch.bfloat16, 64, False, False),
    (torch.bfloat16, 50, True, True),
    (torch.float16, 128, False, True),
    (torch.float32, 50, True, False),
    (torch.float32, 128, True, True),
]


@pytest.mark.parametrize(("dtype", "width", "bias", "ids"), VARIANTS)
@hypothesis.settings(max_examples=15)
@hypothesis.given(rows=st.integers(1, 3000), candidates=st.integers(1, 5000))
def test_random_sizes(dtype, width, bias, ids, rows, candidates):
    given = problem(rows, candidates, width, dtype=dtype, bias=bias, ids=ids)
    given["hidden"] = given["hidden"] / width**0.5
    assert_near(on_device(given))


ON_HOPPER = [(torch.bfloat16, 64), (torch.float16, 72), (torch.bfloat16, 128), (torch.bfloat16, 256)]
ON_HOPPER += [(torch.float16, 264), (torch.bfloat16, 512), (torch.bfloat16, 50), (torch.float16, 100)]


@on_hopper
@pytest.mark.parametrize(("dtype", "width"), ON_HOPPER)
@hypothesis.settings(max_examples=15)
@hypothesis.given(rows=st.integers(1, 3000), candidates=st.integers(1, 5000))
def test_random_sizes_on_hopper(dtype, width, rows, candidates):
    given = problem(rows, candidates, width, dtype=dtype, bias=False, ids=False)
    given["hidden"] = given["hidden"] / width**0.5
    assert_near(on_device(given), "sm90")


@pytest.mark.parametrize(
    ("dtype", "width"), [(torch.bfloat16, 128), (torch.float16, 50), (torch.float32, 64)]
)
@pytest.mark.parametrize(
    ("backend", "ids"), [("triton", False), ("triton", True), pytest.param("sm90", False, marks=on_hopper)]
)
def test_normalised_rows(dtype, width, backend, ids):
    if backend == "sm90" and dtype == torch.float32:
        pytest.skip("16 bits only")
    given = on_device(problem(300, 2000, width, dtype=dtype, bias=ids, ids=ids))
    given["hidden"][3] = 0
    given["l2_normalize"] = True
    got, want = results(given, backend), results(given, "reference", torch.float64)
    for ours, exact in zip(got, want, strict=True):
        left = exact.isfinite()
        ours, exact = (torch.where(left, one.double(), 0) for one in (ours, exact))
        unit = 2.0**-9 if dtype.itemsize == 2 else 2.0**-18
        assert (ours - exact).norm() <= 4 * unit * exact.norm() + 1e-4


@pytest.mark.parametrize(
    ("dtype", "full"), [(torch.bfloat16, True), (torch.bfloat16, False), (torch.float32, True)]
)
def test_sums_alone(dtype, full):
    """No row has its target among the candidates; with ids, biases and norms, and without."""
    given = on_device(problem(300, 2000, 50, dtype=dtype, bias=full, ids=full))
    given.pop("target")
    found = []
    for backend, wide in (("triton", dtype), ("reference", torch.float64)):
        one = {name: value.detach().to(wide) if is_float(value) else value for name, value in given.items()}
        leaves = leaves_of(one)
        lse = linear_lse(**one, l2_normalize=full, backend=backend)
        assert last_backend("linear_logp") == backend
        found.append([lse.detach(), *torch.autograd.grad(lse, leaves, cotangents(300, lse.dtype, DEVICE)[0])])
    unit = 2.0**-9 if dtype.itemsize == 2 else 2.0**-18
    for ours, exact in zip(*found, strict=True):
        assert (ours.double() - exact).norm() <= 4 * unit * exact.norm() + 1e-4


def loss_problem(dtype, drawn):
    """The arguments that a retriever passes to its loss."""
    generator = torch.Generator().manual_seed(5)

    def normal(count):
        return torch.randn(count, 50, generator=generator).to(DEVICE, dtype).requires_grad_()

    targets = torch.randint(1000, (700,), generator=generator)
    targets[::9] = NO_TARGET
    given = {"queries": normal(700), "items": normal(400 if drawn else 1000), "targets": targets.to(DEVICE)}
    if drawn:
        given["positives"] = normal(700)
        given["item_ids"] = torch.randint(1000, (400,), generator=generator).to(DEVICE)
        given["log_weights"] = torch.randn(400, generator=generator).to(DEVICE)
    return given


@pytest.mark.parametrize("drawn", [False, True])
def test_the_loss_of_a_retriever_in_bfloat16(drawn):
    loss, given = SoftmaxLoss(pb.SoftmaxLoss(temperature=0.05)), loss_problem(torch.bfloat16, drawn)
    wide = {
        name: value.detach().double().requires_grad_() if is_float(value) else value
        for name, value in given.items()
    }
    found = []
    for one, backend in ((given, "triton"), (wide, "reference")):
        out = loss(**one, l2_normalize=True)
        assert last_backend("linear_logp") == backend
        leaves = [value for name, value in one.items() if is_float(value) and name != "log_weights"]
        cotangent = cotangents(700, out.dtype, DEVICE)[0]
        found.append([out.detach(), *torch.autograd.grad(out, leaves, cotangent)])
    assert found[0][0].dtype == torch.float32
    for ours, exact in zip(*found, strict=True):
        assert (ours.double() - exact).norm() <= 2.0**-7 * exact.norm()


@on_hopper
def test_auto_takes_the_fastest_that_can():
    def taken(given, **options):
        linear_logp(**given, **options)
        return last_backend("linear_logp")

    size = {"rows": 30, "candidates": 140_000, "width": 128, "dtype": torch.bfloat16}
    plain = on_device(problem(**size, bias=False, ids=False))
    before = OP.fallbacks.copy()
    assert taken(plain) == taken(plain, l2_normalize=True) == "sm90"
    small = on_device(problem(**(size | {"candidates": 130_000}), bias=False, ids=False))
    assert taken(small) == "triton"
    assert OP.fallbacks == before
    biased = on_device(problem(**size, bias=True, ids=False))
    assert taken(biased) == "triton"
    assert OP.fallbacks - before == {("sm90", "it adds no bias"): 1}
    assert "it adds no bias" in str(explain("linear_logp", **biased))
    assert taken(on_device(problem(30, 40, 64, dtype=torch.bfloat16, bias=False))) == "triton"
    for width, expected in ((64, "triton"), (65, "reference")):
        assert taken(on_device(problem(30, 40, width, dtype=torch.float32))) == expected
    wide = on_device(problem(30, 40, 520, dtype=torch.bfloat16, bias=False, ids=False))
    assert taken(wide) == "reference"


@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("width", [256, 512])
def test_wide_rows(width, ids):
    given = problem(300, 2000, width, dtype=torch.bfloat16, ids=ids)
    given["hidden"] = given["hidden"] / width**0.5
    assert_near(on_device(given))


@pytest.mark.parametrize("backend", BACKENDS)
def test_sure_targets_keep_their_gradient(backend):
    """Scores 10 against two of 0: 1 - p = 9.08e-5, which bfloat16 has no place for."""
    hidden = torch.eye(2, 16, dtype=torch.bfloat16, device=DEVICE).requires_grad_()
    weight = 10 * torch.eye(3, 16, dtype=torch.bfloat16, device=DEVICE)
    weight[2] = 0
    logp = linear_logp(hidden, weight, torch.tensor([0, 1], device=DEVICE), backend=backend).logp
    (gradient,) = torch.autograd.grad(logp.sum(), hidden)
    rest = 2 / (torch.tensor(10.0).exp() + 2)
    torch.testing.assert_close(logp.cpu(), torch.log1p(-rest).expand(2), rtol=1e-3, atol=1e-6)
    expected = torch.tensor([[1, -0.5], [-0.5, 1]]) * 10 * rest
    torch.testing.assert_close(gradient[:, :2].float().cpu(), expected, rtol=6e-3, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_wrong_targets_are_nan_and_write_nothing(backend):
    given = on_device(problem(200, 300, 64, dtype=torch.bfloat16, bias=False, ids=False))
    right = results(given, backend)
    wrong = given | {"target": given["target"].clone()}
    ignored = (given["target"] == IGNORED).nonzero()[:, 0]
    for row, target in zip(ignored.tolist(), (-1, 300, 2**40, -(2**40), 301), strict=False):
        wrong["target"][row] = target
    found = results(wrong, backend)
    assert torch.equal(found[0].isnan(), wrong["target"] != given["target"])
    found[0] = torch.where(found[0].isnan(), 0, found[0])
    assert all(torch.equal(one, other) for one, other in zip(found, right, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_bits_each_time_for_all_sizes_and_one_artefact(backend):
    from recsys.ops.linear_logp import triton_kernels, triton_rows

    sizes = [(1, 3), (7, 512), (512, 4097), (2048, 100), (4097, 7)]
    batches = [on_device(problem(*size, 128, dtype=torch.bfloat16, bias=False, ids=False)) for size in sizes]
    expected = [results(given, backend) for given in batches]
    expected = [results(given, backend) for given in batches]
    kernels = [triton_kernels.forward_kernel, triton_kernels.backward_kernel]
    kernels += [triton_rows.finish_kernel, triton_rows.upstream_kernel]
    before = harness.artefacts(*kernels)
    rapid = [(i, results(batches[i], backend)) for n in range(40) for i in (4, n % 4, 0, 3, 1)]
    torch.cuda.synchronize()
    for i, got in rapid:
        assert all(torch.equal(one, other) for one, other in zip(got, expected[i], strict=True))
    assert harness.artefacts(*kernels) == before


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_waits_for_the_device(backend):
    given = on_device(problem(500, 900, 64, dtype=torch.bfloat16, bias=False, ids=False))
    results(given, backend)
    with harness.no_waiting():
        leaves = leaves_of(given)
        logp, lse = linear_logp(**given, backend=backend)
        torch.autograd.grad(logp.sum() + lse.sum(), leaves)


def test_memory_is_that_of_the_inputs():
    """Scores of 2048 x 200,000 would be 780 MiB in bfloat16."""
    hidden = torch.randn(2048, 64, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(200_000, 64, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    target = torch.randint(200_000, (2048,), device=DEVICE)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    linear_logp(hidden, weight, target, backend="triton").logp.sum().backward()
    beyond = torch.cuda.max_memory_allocated() - before - weight.grad.numel() * 2
    assert beyond < 64 * 2**20


def test_a_compiled_graph_serves_all_sizes():
    def head(hidden, weight, target, temperature):
        return linear_logp(hidden, weight, target, temperature=temperature)

    compiled = torch.compile(head, dynamic=True, fullgraph=True)
    for rows, candidates in ((50, 900), (9, 40), (3000, 333)):
        given = on_device(problem(rows, candidates, 64, dtype=torch.bfloat16, bias=False, ids=False))
        leaves = [given[name].requires_grad_() for name in ("hidden", "weight", "temperature")]
        arguments = [given[name] for name in ("hidden", "weight", "target", "temperature")]
        got = compiled(*arguments)
        assert last_backend("linear_logp") == "triton"
        want = head(*arguments)
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other)
        for one, other in zip(gradients(got, leaves), gradients(want, leaves), strict=True):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=1e-2)
