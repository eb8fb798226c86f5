"""A fleet for the tests of a module, whole again before each of them. A module may set its `FLEET` options."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.fault_fleet import Fleet, fleet_of


@pytest.fixture(scope="module")
def module_fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with fleet_of(tmp_path_factory.mktemp("fleet"), **getattr(request.module, "FLEET", {})) as fleet:
        yield fleet


@pytest.fixture
def fleet(module_fleet: Fleet) -> Iterator[Fleet]:
    yield module_fleet
    module_fleet.tidy()
