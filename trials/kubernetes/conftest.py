"""Shared by both files of checks: the programs that they call."""

import pytest
from tools import ROOT, MissingTool, Tools, prepare


@pytest.fixture(scope="session")
def tools() -> Tools:
    try:
        return prepare(ROOT / ".cache" / "deploy")
    except MissingTool as error:
        pytest.skip(str(error))
