"""One small synthetic place, written once and read by every test of the results."""

import pytest

from tests.results.synthetic import write_synthetic
from vflash_analysis.results.sources import load_records
from vflash_analysis.stats import Bootstrap


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    return write_synthetic(
        tmp_path_factory.mktemp("records"),
        seeds=(1, 2),
        budgets=(100, 200),
        sizes=(100,),
        n_clips=2,
        n_anchors=16,
    )


@pytest.fixture(scope="session")
def records(place):
    return load_records([place])


@pytest.fixture(scope="session")
def boot():
    return Bootstrap(n_samples=60)
