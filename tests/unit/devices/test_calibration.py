"""The constants of the classes against published speeds: bounds, bands, and that the file holds what the fit gives."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from benchmarks import estimator_fit
from benchmarks.harness import replace_section
from benchmarks.published.fit import (
    fit_one_constant,
    in_sample,
    mean_miss,
    parameters_only,
    predict,
    predict_with_profile,
)
from benchmarks.published.others import judge_file, layers_of
from benchmarks.published.prompts import FILE, read_prompts
from benchmarks.published.rows import INLINE_ECC, read_rows
from edgeinfer.devices import CLASSES, classes

ROWS = read_rows()


@pytest.fixture(scope="module")
def groups() -> dict[str, estimator_fit.Group]:
    return {group.name: group for group in estimator_fit.judge(ROWS)}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "bound", "one_constant"), [
    ("apple", 0.06, 0.12), ("cuda-2024", 0.10, 0.30), ("cuda-2025", 0.10, 0.10), ("radeon", 0.10, 0.05),
    ("edge", 0.20, 0.20),
])
def test_mean_errors_stay_within_their_bounds(groups, name, bound, one_constant):
    """The simpler models miss by more, so the comparison can fail both ways."""
    found = groups[name].predictions
    assert mean_miss(item.miss for item in found) <= bound
    assert mean_miss(item.one_constant / item.row.tok_per_s - 1 for item in found) > one_constant
    assert mean_miss(item.parameters_only / item.row.tok_per_s - 1 for item in found) > 0.3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["apple", "cuda-2024", "cuda-2025", "radeon"])
def test_the_class_file_holds_the_fitted_constants(groups, name):
    group = groups[name]
    for key in group.free:
        assert classes()[group.base][key] == pytest.approx(group.fitted[key], rel=0.02), key
    assert classes()[group.base]["error"] >= estimator_fit.band(group.predictions)


def test_bands_hold_80_percent_of_the_rows_of_each_class():
    for name in {row.device_class for row in ROWS}:
        found = in_sample([row for row in ROWS if row.device_class == name and row.group != "apple-2024"])
        if name == "cuda-consumer":  # the rows of 2024 belong to an older program
            found = [item for item in found if item.row.group != "cuda-2024"]
        assert classes()[name]["error"] >= estimator_fit.band(found) - 0.005, name


def test_known_devices_are_better_than_their_classes():
    edge = [row for row in ROWS if row.group == "edge"]
    speeds = {row: predict_with_profile(row) for row in edge}
    assert all(speeds.values())
    misses = [speed / row.tok_per_s - 1 for row, speed in speeds.items()]
    assert mean_miss(misses) < mean_miss(item.miss for item in in_sample(edge)) / 2
    assert predict_with_profile(replace(edge[0], device="an unknown board")) is None


def test_bands_hold_80_percent_of_the_published_prompts(tmp_path):
    prompts = read_prompts()
    assert sum(abs(item.miss) <= item.band for item in prompts) >= 0.8 * len(prompts)
    assert mean_miss(item.miss for item in prompts) <= 0.25
    path = tmp_path / "prompts.tsv"
    first, second, *_ = FILE.read_text(encoding="utf-8").splitlines()
    path.write_text(f"{first}\n{second.replace('m4', 'sd8g3', 1)}\n", encoding="utf-8")
    with pytest.raises(ValueError, match="sd8g3 has no peak"):
        read_prompts(path)


def test_every_class_has_constants_with_a_source():
    assert set(CLASSES) | {"unknown"} == set(classes())
    for name, table in classes().items():
        assert 0 < table["f_kv"] <= table["f_w"] <= 1, name
        assert 0.10 <= table["error"] <= table["prefill_error"], name
        assert table["source"], name
        assert table["error_source"], name


@pytest.mark.slow
def test_leaving_a_device_out_really_leaves_it_out(groups):
    """Predictions differ from those of the constants that were fitted to all rows."""
    group = groups["apple"]
    table = {**classes()["apple-gpu"], **group.fitted}
    assert all(item.tok_per_s != predict(item.row, table) for item in group.predictions)


def test_rows_and_simple_models_by_hand():
    row = next(row for row in ROWS if row.device == "L40S" and "F16" in row.model)
    assert row.profile.bandwidth_gbs == 864 * INLINE_ECC
    assert parameters_only(row) == pytest.approx(220 / 8.03 * 0.6)
    assert fit_one_constant([row]) == pytest.approx(15.08 * 43.42 / 810)
    assert all(row.source and row.tok_per_s > 0 for row in ROWS)
    assert len(ROWS) == 78


@pytest.mark.slow
def test_the_document_has_every_row_and_its_misses(groups):
    text = estimator_fit.markdown(list(groups.values()))
    for row in ROWS:
        assert f"| {row.device} | {row.model} | {row.device_class} | {row.tok_per_s:.4g} |" in text
    assert "+142" in text
    document = (estimator_fit.ROOT / "docs" / "measurements" / "estimator.md").read_text(encoding="utf-8")
    assert text.strip() in document, "run python benchmarks/estimator_fit.py"


HEADER = "class\tdevice\tbandwidth_gbs\tmodel\tgb_read_per_token\ttok_per_s\tsource\n"


def test_other_rows_are_judged_by_profile_or_class(tmp_path, monkeypatch, capsys):
    path = tmp_path / "rows.tsv"
    path.write_text(HEADER + "apple-gpu\tM4 Pro\t273\tLlama-2-7B Q4_0\t3.82\t50\tx\n"
                    "gpu-2024\tRTX 4090\t1008\tLlama-3-8B F16\t15.08\t54.34\tx\n"
                    "edge\tA board\t10\t1B\t1.0\t5\tx\n", encoding="utf-8")
    apple, nvidia, board = judge_file(path)
    assert apple.how == "profile m4-pro"
    assert abs(apple.miss) < 0.1
    assert nvidia.how == "profile rtx4090, constants of 2024"
    assert abs(nvidia.miss) < 0.15
    assert board.how == "class unknown"
    monkeypatch.setattr("sys.argv", ["estimator_fit.py", "--rows", str(path)])
    assert estimator_fit.main() == 0
    assert "3 rows: mean absolute error" in capsys.readouterr().out


@pytest.mark.parametrize(("text", "words"), [
    ("class\tdevice\n", "has no column 'bandwidth_gbs'; it needs class, device"),
    (HEADER + "edge\tA board\tfast\t1B\t1.0\t5\tx\n", "has a figure that cannot be read"),
])
def test_other_files_are_refused_in_a_sentence(tmp_path, monkeypatch, capsys, text, words):
    path = tmp_path / "rows.tsv"
    path.write_text(text, encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["estimator_fit.py", "--rows", str(path)])
    assert estimator_fit.main() == 2
    assert words in capsys.readouterr().err


def test_layers_follow_the_size_in_a_name():
    names = ("Llama-2-7B Q4_0", "Llama-2-13B", "0.5B Q2_K", "TinyLlama-1.1B", "Mystery")
    assert [layers_of(name) for name in names] == [32, 40, 24, 22, 32]


def test_a_section_is_replaced_alone(tmp_path):
    path = tmp_path / "page.md"
    path.write_text("# Title\n", encoding="utf-8")
    replace_section(path, "one", "first")
    replace_section(path, "two", "second")
    replace_section(path, "one", "third")
    assert path.read_text(encoding="utf-8") == (
        "# Title\n\n<!-- one: begin -->\nthird\n<!-- one: end -->\n\n<!-- two: begin -->\nsecond\n<!-- two: end -->\n"
    )


@pytest.mark.slow
def test_the_command_writes_the_section(groups, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(estimator_fit, "judge", lambda rows: list(groups.values()) if rows == ROWS else [])
    monkeypatch.setattr("sys.argv", ["estimator_fit.py", "--output", str(tmp_path / "out.md")])
    assert estimator_fit.main() == 0
    assert "## Against published speeds" in (tmp_path / "out.md").read_text(encoding="utf-8")
    assert "apple: " in capsys.readouterr().out


def test_the_band_is_a_quantile():
    row = ROWS[0]
    tables = [{**classes()["apple-gpu"], "f_w": share} for share in (0.5, 0.6, 0.7, 0.8, 0.9)]
    found = [estimator_fit.prediction(row, table, math.nan) for table in tables]
    assert estimator_fit.band(found) == sorted(abs(item.miss) for item in found)[3]
