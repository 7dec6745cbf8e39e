"""Names of models as people write them: those that must find their shape and type, and those that must not."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeinfer.errors import CheckpointError, ModelNotFoundError, UsageError
from edgeinfer.graph import builtin_shapes, other_names
from edgeinfer.models.describe import describe
from edgeinfer.models.spoken import FILE_TYPES, spoken
from tests.helpers.command_line import edgeinfer

PAIRS = [(line.split("\t")[0], line.split("\t")[1]) for table in ("model_names.tsv", "model_names_blind.tsv")
         for line in (Path(__file__).parents[1] / "data" / table).read_text(encoding="utf-8").splitlines()[1:]]
"""Names and shapes. Those of the blind table were written, with what they mean, by someone who had seen neither the
rules nor the tables before (lists 1 and 2), or who had added to both by then (3); docs/measurements/estimator.md has
the shares that were right at first.
"""
REFUSED = "-"
"""Answer of the table to a name that no model has, that several have, or with a type that is not known."""


def found(typed: str) -> str:
    """Return the shape that a name means."""
    meant = spoken(typed)
    return meant.shape.name if meant.shape and not meant.unknown_type else REFUSED


def test_names_as_people_write_them() -> None:
    right = [found(typed) == name for typed, name in PAIRS]
    wrong = [(typed, found(typed)) for typed, name in PAIRS if found(typed) not in (name, REFUSED)]
    assert wrong == [] and len(PAIRS) >= 200 and sum(right) >= 0.95 * len(PAIRS)
    assert set(other_names().values()) <= set(builtin_shapes())
    for name in builtin_shapes():
        assert found(name) == found(name.upper().replace("-", " ")) == name


@pytest.mark.parametrize(("typed", "kind"), [
    ("llama 3.2 1b instruct Q4_K_M", "q4k"), ("llama-3.2-1b Q8_0", "int8"), ("llama3.2:1b-instruct-q6_K", "q6"),
    ("llama 3.2 1b 4-bit", "q4"), ("llama 3.2 1b fp16", "f16"), ("llama 3.2 1b", "q4"), ("llama-3.2-1b IQ4_XS", "iq4k"),
    ("bitnet-2b", "q2"), ("bitnet-b1.58-2B-4T-gguf:i2_s", "q2"), ("bitnet 2b i2_s", "q2"), ("bitnet 2b4t int8", "int8"),
])
def test_a_type_in_the_name_is_the_type_of_the_weights(typed: str, kind: str) -> None:
    found = describe(typed)
    assert found.quantisation.weights == kind and "does not run" not in found.source


@pytest.mark.parametrize(("typed", "said", "kind"), [
    ("llama 3.2 1b Q5", "as a Q5_K_M file (for Q5)", "q5k"), ("llama 3.2 1b Q6", "as a Q6_K file (for Q6)", "q6"),
    ("llama 3.2 1b 6bit", "as a Q6_K file (for 6BIT)", "q6"), ("llama-3.2-1b 5-bit", "as a Q5_K_M file (for 5-BIT)",
    "q5k"), ("Llama-3.2-1B-Instruct-AWQ", "in q4 (for AWQ)", "q4"), ("llama-3.2-1b-gptq", "in q4 (for GPTQ)", "q4"),
    ("Llama-3.2-1B-Instruct-FP8", "in f16 (for FP8)", "f16"),
])
def test_bits_without_a_type_and_types_of_checkpoints(typed: str, said: str, kind: str) -> None:
    found = describe(typed)
    assert found.source == f"built-in shape, as meta-llama/Llama-3.2-1B, {said}"
    assert found.quantisation.weights == kind


@pytest.mark.parametrize("typed", ["llama-3.2-1b-GPTQ-Int8", "llama-3.2-1b-8bit-gptq"])
def test_bits_beside_a_method_are_those_of_the_weights(typed: str) -> None:
    assert describe(typed).quantisation.weights == "int8"


@pytest.mark.parametrize(("typed", "name"), [
    ("lama 3.3 70b", "llama-3.1-70b"), ("quen2.5 7b", "qwen2.5-7b"), ("mitsral 7b v0.3", "mistral-7b-v0.3"),
    ("gemmma 2 9b", "gemma-2-9b"), ("Mistrall 7b v0.2", "mistral-7b"), ("flacon 7b q8", "falcon-7b"),
    ("lama", REFUSED), ("Molmo-7B", REFUSED), ("llava 7b", REFUSED), ("minstral 8b", REFUSED), ("amistral 7b", REFUSED),
    ("qwom 7b", REFUSED), ("SmolVLM 1.7B", REFUSED), ("zamba 7b", REFUSED),
])
def test_one_slip_in_a_word_is_mended_beside_a_size(typed: str, name: str) -> None:
    assert found(typed) == name


@pytest.mark.parametrize(("typed", "name"), [
    ("mistral:7b", "mistral-7b-v0.3"), ("mistral:7b-instruct-q4_0", "mistral-7b-v0.3"), ("mistral 7b", "mistral-7b"),
    ("mistral:7b-instruct-v0.2-q4_0", "mistral-7b"), ("deepseek-r1:8b", "qwen3-8b"), ("deepseek r1 8b", REFUSED),
    ("DeepSeek-R1-UD-IQ1_S", "deepseek-v3"), ("unsloth/DeepSeek-R1-GGUF", "deepseek-v3"), ("deepseek-r1", REFUSED),
])
def test_a_tag_or_a_file_means_another_model_than_its_words(typed: str, name: str) -> None:
    assert found(typed) == name


@pytest.mark.parametrize(("kind", "gigabytes"), list(zip(FILE_TYPES, (3.83, 3.86, 4.08, 3.64, 4.65, 4.78, 5.53, 7.16),
                                                    strict=True)))
def test_bytes_are_those_of_published_files(kind: str, gigabytes: float) -> None:
    """Sizes of llama.cpp's files of Llama-2-7B."""
    assert describe(f"llama-2-7b {kind}").weight_bytes / 1e9 == pytest.approx(gigabytes, rel=0.035)


@pytest.mark.parametrize(("typed", "said", "kind"), [
    ("llama-3.2-1b-instruct-UD-Q4_K_XL.gguf", "as a Q4_K_M file (for UD-Q4_K_XL)", "q4k"),
    ("llama 3.2 1b IQ4_KSS", "as a IQ4_XS file (for IQ4_KSS)", "iq4k"),
    ("llama3.2:1b-instruct-q3_K_M", "as a Q3_K_M file, held in q4", "q4"),
    ("Llama-3.2-1B-UD-IQ1_S", "as a IQ1_S file (for UD-IQ1_S), held in q4", "q4"),
    ("llama 3.2 1b Q2_K", "as a Q2_K file, held in q4", "q4"),
])
def test_files_that_mix_types_and_those_that_are_held_in_q4(typed: str, said: str, kind: str) -> None:
    found = describe(typed)
    assert found.source == f"built-in shape, as meta-llama/Llama-3.2-1B, {said}"
    assert found.quantisation.weights == kind


def test_a_fine_tune_is_the_model_whose_version_and_size_it_has() -> None:
    assert spoken("Someones-Qwen3-8B-Roleplay-v4").shape is builtin_shapes()["qwen3-8b"]
    for typed in ("Qwen3-8B-DFlash-Draft", "Qwen3-30B-A3B-REAP-25B", "Llama-3.1-8B-Embedding", "v3-Qwen-32B",
                  "qwen3 8b or qwen3 14b"):  # another kind of model, size or family
        assert spoken(typed).shape is None, typed


def test_what_is_refused() -> None:
    for typed, sentence in (("llama 3.1 8b exl2", "states exl2, which cannot be described without its file"),
                            ("gemma 3 5b", "did you mean 'gemma-3-"),
                            ("llama-3.1-8b q4 q8", "states two types of weights, Q4 and Q8; leave one out."),
                            ("phi-3-medium-128k", "longer context, 128k, of which no shape is built in; give"),
                            ("qwen2.5 32b 1m", "or take 'qwen2.5-32b' for up to 131072 positions."),
                            ("8b", "did you mean 'llama-3-8b', 'llama-3.1-8b' or "), ("70b", "did you mean 'llama-"),
                            ("UD-Q4_K_XL", "is a type of weights without a model; write one before it, such as")):
        with pytest.raises((ModelNotFoundError, UsageError)) as caught:
            describe(typed)
        assert sentence in str(caught.value)
    assert "two types" in edgeinfer("recommend", "llama-3.1-8b q4 q8", "--all-devices").err
    done = edgeinfer("plan", "llama-3.2-1b Q8_0", "--weights", "q4")
    assert done.code == 2 and "states Q8_0, and --weights q4; leave one of them out" in done.err


def test_a_hub_id_without_the_hub_is_the_shape_of_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    known = describe("bartowski/Llama-3.2-1B-Instruct-GGUF")
    assert known.parameters == describe("llama-3.2-1b").parameters
    assert known.source == ("built-in shape, as meta-llama/Llama-3.2-1B; no config.json of "
                            "bartowski/Llama-3.2-1B-Instruct-GGUF was had")
    with pytest.raises(CheckpointError, match="is not in the hub's cache"):
        describe("some/model")


@pytest.mark.parametrize("typed", [one for one, name in PAIRS if name == REFUSED and "/" not in one
                                   and not (spoken(one).unknown_type or spoken(one).refused)])
def test_refusals_have_three_near_names(typed: str) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        describe(typed)
    assert str(caught.value).count("'") == 8
