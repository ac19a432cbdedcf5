"""`recsys.evaluate --package` measures what the compiled package answers, on real rows."""

import json
import re
import shutil

import pytest

from tests.integration.runs import ROOT, command

METRIC = re.compile(r"^(\S+) +(-?[\d.]+|nan)$", re.MULTILINE)


@pytest.mark.parametrize("family", ["ranker", "retriever"])
def test_a_package_has_the_metrics_of_its_run(family, request):
    exported = request.getfixturevalue(family)
    rows = ("--set", f'data.test={{parquet {{paths: "{exported.rows}"}}}}', "--set", "data.num_workers=0")
    command("evaluate", "--run-dir", exported.run, *rows, cwd=ROOT)
    run = (exported.run / "test_metrics.json").read_bytes()
    expected = json.loads(run)["metrics"]
    said = command("evaluate", "--package", exported.package, "--run-dir", exported.run, *rows, cwd=ROOT)
    actual = {name: float(value) for name, value in METRIC.findall(said)}
    assert actual and actual.keys() == {name for name in expected if name.partition("/")[0] != "loss"}
    for name, value in actual.items():
        assert value == pytest.approx(expected[name], abs=2e-5, rel=2e-5)
    assert float(said.split("largest difference from the evaluated model: ")[1].split()[0]) < 1e-5
    assert (exported.run / "test_metrics.json").read_bytes() == run


def test_wrong_calls_say_what_to_do(ranker, tmp_path):
    def refused(*flags: object, code: int = 2) -> str:
        return command("evaluate", *flags, code=code)

    package = ("--package", ranker.package)
    assert "--compare-exact: it needs the model of a run" in refused(*package, "--compare-exact")
    assert "a package has the weights of one state" in refused(*package, "--checkpoint", "newest")
    assert "a package carries its own config" in refused(*package, "--config", "configs/quickstart.config")
    assert "--verify-key: it is for a package" in refused("--run-dir", ranker.run, "--verify-key", "key.pub")
    assert "only data.train, data.validation" in refused(*package, "--set", "model.embedding_dim=8")
    large = ("--set", "data.eval_batch_size=5000")
    assert "5000 is more than the 4096 rows that the package accepts" in refused(*package, *large)
    assert "data.test is not set" in refused(*package, "--set", "data.test=", code=3)
    assert f"{tmp_path}: there is no package here" in refused("--package", tmp_path)
    broken = shutil.copytree(ranker.package, tmp_path / "broken")
    damaged = bytearray((broken / "model.pt2").read_bytes())
    damaged[-1] ^= 1
    (broken / "model.pt2").write_bytes(damaged)
    assert "model.pt2: its bytes differ" in refused("--package", broken, code=1)
