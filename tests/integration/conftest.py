"""Runs and packages that several files share."""

import os

import pytest

from tests.integration.exports import shared


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory):
    """The temporary folder of the whole test run."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def ranker(shared_folder):
    return shared(shared_folder, "ranker")


@pytest.fixture(scope="session")
def retriever(shared_folder):
    return shared(shared_folder, "retriever")
