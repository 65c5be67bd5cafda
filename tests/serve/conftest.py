"""Two servers for all tests of the folder, both of a model that they call tiny."""

import pytest
from serve_client import make_engine, running, served


@pytest.fixture(scope="session")
def engine():
    with running(make_engine()) as engine:
        yield engine


@pytest.fixture(scope="session")
def client(engine):
    with served(engine) as client:
        yield client


@pytest.fixture(scope="session")
def full():
    """The model with everything in it: states, sparse index, packed experts, images."""
    with running(make_engine(model="tiny")) as engine, served(engine) as client:
        yield client
