"""Settings for all tests."""

import signal
from collections.abc import Iterator

import prometheus_releases
import pytest
from fake_server import FakeServer, fake_server
from hypothesis import settings
from prometheus_releases import Program

# A busy machine is slow; a law holds at any speed.
settings.register_profile("kvwatch", deadline=None)
settings.load_profile("kvwatch")

# Under nohup and behind `&` a process starts with Ctrl-C ignored, and so do its children: the tests that interrupt
# commands would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> str:
    """Which releases of promtool judge the rules."""
    return prometheus_releases.header()


@pytest.fixture(params=prometheus_releases.found("promtool"), ids=str)
def promtool(request: pytest.FixtureRequest) -> Program:
    """Each release of promtool in turn."""
    assert isinstance(request.param, Program)
    return request.param


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    """A server of its own for each test."""
    with fake_server() as made:
        yield made
