from __future__ import annotations

import json
from pathlib import Path

import pytest

from eke.data.extras import require
from eke.errors import MissingExtraError


def test_gives_the_module() -> None:
    assert require("json", "anything") is json


def test_names_package_extra_and_feature() -> None:
    with pytest.raises(MissingExtraError) as error:
        require("no_such_package_at_all.part", "flying")
    assert error.value.package == "no_such_package_at_all"
    assert "flying needs the package 'no_such_package_at_all'" in str(error.value)


def test_a_broken_package_is_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_one.py").write_text("import another_that_is_not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="another_that_is_not_there"):
        require("broken_one", "flying")
