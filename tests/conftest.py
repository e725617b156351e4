"""Settings for all tests."""

import prometheus_releases
import pytest
from hypothesis import settings
from prometheus_releases import Program

# A busy machine is slow; a law holds at any speed.
settings.register_profile("kvwatch", deadline=None)
settings.load_profile("kvwatch")


def pytest_report_header() -> str:
    """Which releases of promtool judge the rules."""
    return prometheus_releases.header()


@pytest.fixture(params=prometheus_releases.found("promtool"), ids=str)
def promtool(request: pytest.FixtureRequest) -> Program:
    """Each release of promtool in turn."""
    assert isinstance(request.param, Program)
    return request.param
