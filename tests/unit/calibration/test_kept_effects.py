"""Effects of errors beside the statistics that are kept."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from edgeinfer.calibration.effects import MEASURED, Effect
from edgeinfer.calibration.kept import EFFECTS_FILE, INDEX_FILE, VERSION, KeptStatistics
from edgeinfer.errors import DestinationError


def test_effects_are_kept_and_measured_again_where_they_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / INDEX_FILE).write_text(json.dumps({"version": VERSION, "files": {}}))
    kept = KeptStatistics(tmp_path)
    assert kept.effects is None
    effects = {"head": Effect(1.5), "embed": Effect(0.25, 0.5)}
    kept.keep_effects(effects)
    assert kept.effects == effects and [path.name for path in tmp_path.iterdir() if "." + "json." in path.name] == []
    for damaged in ("{", "[]", *(json.dumps({"measured": MEASURED, "effects": one}) for one in (3, {"head": 3},
                                                                                           {"head": ["much"]}))):
        (tmp_path / EFFECTS_FILE).write_text(damaged)
        assert kept.effects is None


def test_effects_of_another_number_of_tokens_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / INDEX_FILE).write_text(json.dumps({"version": VERSION, "files": {}}))
    KeptStatistics(tmp_path).keep_effects({"head": Effect(1.5)})
    monkeypatch.setattr("edgeinfer.calibration.kept.MEASURED", [*MEASURED[:1], 512, *MEASURED[2:]])
    assert KeptStatistics(tmp_path).effects is None
    (tmp_path / EFFECTS_FILE).write_text(json.dumps({"head": [1.5, 0.0]}))  # of a version that did not note the method
    assert KeptStatistics(tmp_path).effects is None


def test_a_full_disk_leaves_the_statistics_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / INDEX_FILE).write_text(json.dumps({"version": VERSION, "files": {}}))
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(DestinationError, match=r"could not be written \(No space left on device\); free some space"):
        KeptStatistics(tmp_path).keep_effects({"head": Effect(1.5)})
    assert [path.name for path in tmp_path.iterdir()] == [INDEX_FILE]
