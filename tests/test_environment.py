"""`recsys.environment` on this machine, compared with other tools."""

import gc
import importlib.metadata
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest

from recsys import environment, protos


@pytest.mark.parametrize(
    ("torch", "fbgemm"), [("2.11.0", "1.6.0"), ("2.12.1+cu130", "1.7.0"), ("2.13.0+cpu", "1.8.0")]
)
def test_tested_rows(torch, fbgemm):
    assert environment.tested_row(torch).fbgemm == fbgemm


@pytest.mark.parametrize("torch", ["2.1.0", "2.14.0", "2", "nightly"])
def test_a_torch_outside_the_table_has_no_row(torch):
    assert environment.tested_row(torch) is None


def test_versions_are_those_of_the_loaded_libraries():
    import numpy
    import torch

    actual = environment.versions()
    # The CUDA wheel's metadata leaves out what torch itself adds: 2.13.0 and 2.13.0+cu130.
    assert actual["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert actual["numpy"] == numpy.__version__
    assert actual["python"] == sys.version.split()[0]
    assert all(isinstance(version, str) and version for version in actual.values())


def test_protos_that_were_not_compiled_again_are_noticed(tmp_path, monkeypatch):
    (tmp_path / "protos").mkdir()
    files = [tmp_path / "protos" / name for name in ("a.proto", "b.proto")]
    for file in files:
        file.write_text("message A {}")
    monkeypatch.setattr(protos, "SOURCES", environment.protos_fingerprint(files), raising=False)
    assert not environment.protos_differ(tmp_path)
    files[1].write_text("message B {}")
    assert environment.protos_differ(tmp_path)
    files[1].write_text("message A {}")
    files[1].rename(tmp_path / "protos" / "c.proto")
    assert environment.protos_differ(tmp_path)
    # Installed from a wheel there is nothing to compare with; older compilations do not say.
    assert not environment.protos_differ(tmp_path / "protos")
    monkeypatch.delattr(protos, "SOURCES")
    assert not environment.protos_differ(tmp_path)


def test_the_cpu_build_of_fbgemm_is_named_so(monkeypatch):
    known = {"fbgemm-gpu-cpu": "1.7.0", "fbgemm-gpu": "1.7.0+cpu"}

    def version(name):
        if name not in known:
            raise importlib.metadata.PackageNotFoundError(name)
        return known[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert environment.versions()["fbgemm-gpu"] == "1.7.0+cpu"
    del known["fbgemm-gpu-cpu"]
    known["fbgemm-gpu"] = "1.8.0"
    assert environment.versions()["fbgemm-gpu"] == "1.8.0"
    assert "torch" not in environment.versions()


def test_the_driver_is_asked_for_its_version(tmp_path):
    source = tmp_path / "nvml.c"
    source.write_text(
        "#include <string.h>\nint nvmlInit_v2(void) { return 0; }\nint nvmlShutdown(void) { return 0; }\n"
        'int nvmlSystemGetDriverVersion(char *text, unsigned n) { strncpy(text, "570.86", n); return 0; }\n'
    )
    compiler = shutil.which("cc") or pytest.skip("no C compiler")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", tmp_path / "libnvidia-ml.so.1", source], check=True)
    done = subprocess.run(
        [sys.executable, "-c", "from recsys import environment; print(environment.driver_version())"],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "570.86"


def executable(folder, name, prints=""):
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{prints}'\n")
    path.chmod(0o755)
    return str(path)


def test_the_compiler_is_cxx_then_gcc_then_clang(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert environment.find_cxx() is None
    clang = executable(tmp_path, "clang++")
    assert environment.find_cxx() == clang
    gcc = executable(tmp_path, "g++")
    assert environment.find_cxx() == gcc
    monkeypatch.setenv("CXX", "clang++")
    assert environment.find_cxx() == clang
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert environment.find_cxx() is None, "a compiler that the user named is not replaced silently"


def test_ptxas_is_the_one_that_the_user_named(tmp_path, monkeypatch):
    named = executable(tmp_path, "my-ptxas", prints="Cuda compilation tools, release 13.5, V13.5.12")
    monkeypatch.setenv("TRITON_PTXAS_PATH", named)
    assert environment.find_ptxas() == named
    assert environment.tool_version(named) == "13.5"
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(tmp_path / "missing"))
    assert environment.find_ptxas() is None


def test_a_packaged_ptxas_is_preferred_unless_it_is_old_or_the_user_named_one(tmp_path, monkeypatch):
    for folder, version in (("cu12", "12.8"), ("cu13", "13.5"), ("cu9", "9.2")):
        (tmp_path / "nvidia" / folder / "bin").mkdir(parents=True)
        executable(tmp_path / "nvidia" / folder / "bin", "ptxas", prints=f"release {version}, V{version}.1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: nvidia)
    nvidia = SimpleNamespace(submodule_search_locations=[str(tmp_path / "nvidia")])
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/the/users")
    environment.prefer_packaged_ptxas()
    assert os.environ["TRITON_PTXAS_PATH"] == "/the/users"
    monkeypatch.delenv("TRITON_PTXAS_PATH")
    environment.prefer_packaged_ptxas()
    assert os.environ["TRITON_PTXAS_PATH"] == str(tmp_path / "nvidia" / "cu13" / "bin" / "ptxas")
    monkeypatch.delenv("TRITON_PTXAS_PATH")
    (tmp_path / "nvidia" / "cu13" / "bin" / "ptxas").unlink()
    environment.prefer_packaged_ptxas()
    assert "TRITON_PTXAS_PATH" not in os.environ


def test_versions_of_compilers(tmp_path):
    gcc = executable(tmp_path, "g++", prints="g++ (Debian 12.2.0-14+deb12u1) 12.2.0")
    assert environment.tool_version(gcc) == "12.2.0"
    clang = executable(tmp_path, "clang++", prints="Debian clang version 14.0.6")
    assert environment.tool_version(clang) == "14.0.6"
    assert environment.tool_version(executable(tmp_path, "mute")) == ""


FAKE_TORCHREC = """
import logging
logging.warning("_fbgemm_torch_compat_table has no entry for 1.6.0 of FBGEMM;\\n"
                "cannot determine compatibility with PyTorch 2.11.0")
logging.warning("library loading might crash!")
logging.getLogger("torchrec.x").warning("another logger")
"""


def test_the_wrong_warning_is_dropped_and_others_are_kept(tmp_path):
    (tmp_path / "torchrec.py").write_text(FAKE_TORCHREC)
    code = (
        "import logging; from recsys.environment import import_torchrec_quietly as load; "
        "assert load() is load(); root = logging.getLogger(); print(root.handlers, root.filters)"
    )
    # The fake module shadows the installed torchrec, since PYTHONPATH comes before site-packages.
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "cannot determine compatibility" not in done.stderr
    assert done.stderr.count("library loading might crash!") == 1
    assert done.stderr.count("another logger") == 1
    assert done.stdout.strip() == "[] []", "the import leaves no handler and no filter behind"


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("raise OSError('libnvidia-ml.so.1: cannot open shared object file')", "libnvidia-ml.so.1: cannot"),
        ("import no_such_fbgemm", "No module named 'no_such_fbgemm'"),
        ("raise AttributeError('no attribute fbgemm')", "no attribute fbgemm"),
    ],
)
def test_a_broken_installation_ends_a_command_with_exit_code_5_and_the_remedy(tmp_path, source, cause):
    (tmp_path / "torchrec.py").write_text(source)
    command = ["-m", "recsys.train", "--config", "tests/integration/tiny.config", "--run-dir", tmp_path / "r"]
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 5
    assert "Traceback" not in done.stderr
    assert f"torchrec cannot be imported ({cause}" in done.stderr
    assert "python -m recsys.install" in done.stderr and "python -m recsys.doctor" in done.stderr


def test_an_export_says_nothing_about_its_libraries_and_what_others_say(recwarn):
    import torch

    with environment.quiet_export():
        torch.export.export(torch.nn.Linear(2, 2), (torch.zeros(3, 2),)).run_decompositions()
        assert not [item for item in recwarn if item.category is FutureWarning]
        warnings.warn("another one", FutureWarning, stacklevel=1)
    assert [str(item.message) for item in recwarn if item.category is FutureWarning] == ["another one"]


def test_an_export_does_not_speak_of_a_cuda_toolkit_without_a_gpu(caplog):
    compiler = logging.getLogger("torch.utils.cpp_extension")
    with environment.quiet_export():
        compiler.warning("No CUDA runtime is found, using CUDA_HOME='%s'", "/usr/local/cuda")
        compiler.warning("something else")
    compiler.warning("No CUDA runtime is found, using CUDA_HOME='%s'", "/opt/cuda")
    assert [record.args for record in caplog.records] == [(), ("/opt/cuda",)]


def test_handlers_that_the_application_set_are_used(tmp_path, caplog, monkeypatch):
    (tmp_path / "torchrec.py").write_text(FAKE_TORCHREC)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torchrec", raising=False)
    before = logging.getLogger().handlers[:]
    environment.import_torchrec_quietly()
    del sys.modules["torchrec"]
    assert [record.message for record in caplog.records] == ["library loading might crash!", "another logger"]
    assert logging.getLogger().handlers == before


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_rests_during_the_import_only(enabled, monkeypatch):
    seen = []
    monkeypatch.delitem(sys.modules, "torchrec", raising=False)
    monkeypatch.setattr(environment.importlib, "import_module", lambda name: seen.append(gc.isenabled()))
    (gc.enable if enabled else gc.disable)()
    try:
        environment.import_torchrec_quietly()
        assert (seen, gc.isenabled()) == ([False], enabled)
    finally:
        gc.enable()


@pytest.mark.parametrize("leaves_out", [True, False])
def test_later_collections_leave_an_import_out_if_they_leave_out_what_precedes_it(leaves_out, monkeypatch):
    made = []
    monkeypatch.delitem(sys.modules, "torchrec", raising=False)
    monkeypatch.setattr(
        environment.importlib, "import_module", lambda name: made.extend([] for _ in range(100))
    )
    was_frozen = gc.get_freeze_count() > 0
    (gc.freeze if leaves_out else gc.unfreeze)()
    before = gc.get_freeze_count()
    try:
        environment.import_torchrec_quietly()
        assert gc.get_freeze_count() >= before + 100 if leaves_out else gc.get_freeze_count() == 0
        assert len(made) == 100
    finally:
        (gc.freeze if was_frozen else gc.unfreeze)()


def test_a_second_import_leaves_the_garbage_collector_alone(monkeypatch):
    """To count what collections leave out takes 50 ms where that is a million objects."""
    environment.import_torchrec_quietly()
    touched = []
    for name in ("disable", "freeze", "unfreeze", "get_freeze_count"):
        monkeypatch.setattr(environment.gc, name, lambda name=name: touched.append(name))
    environment.import_torchrec_quietly()
    assert not touched
