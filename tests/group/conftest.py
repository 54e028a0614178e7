"""What tests of groups share."""

from __future__ import annotations

from pathlib import Path

import graphs
import pytest

from devtools.checkpoints import TINY_TRANSFORMER, write_transformer


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / graphs.MODEL
    write_transformer(path, TINY_TRANSFORMER, seed=1)
    return path
