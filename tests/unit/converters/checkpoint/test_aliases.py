"""Tensors that are stored once for several names: ties, and aliases in safetensors headers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.bundle import Bundle
from edgeinfer.converters import convert
from tests.helpers.bundles import tensor_bytes
from tests.helpers.checkpoints import make_checkpoint, raw_safetensors, read_tensors, refused, save_tensors

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LAYER = "model.layers.{}.self_attn.{}_proj.weight"


def save(directory: Path, tensors: dict[str, np.ndarray], metadata: Any, name: str = "model.safetensors") -> None:
    """One file with any metadata, truthful or not."""
    header: dict[str, Any] = {"__metadata__": metadata}
    data = b""
    for tensor, values in tensors.items():
        content = values.astype("<f4").tobytes()
        header[tensor] = {"dtype": "F32", "shape": values.shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    raw_safetensors(directory / name, header, data)


def weights(path: Path) -> dict[str, bytes]:
    with Bundle.open(path) as bundle:
        return {name: tensor_bytes(bundle, name).tobytes() for name in bundle.tensors}


def same_bundle(shared: Path, tensors: dict[str, np.ndarray]) -> None:
    """The conversion of a checkpoint is that of one which stores every name."""
    report = convert(shared, shared.parent / "shared", weights="int8")
    stored = sum(values.nbytes for values in read_tensors(shared).values())
    assert report.source_bytes == stored and report.remarks == ()
    for path in shared.glob("*.safetensors*"):
        path.unlink()
    save_tensors(shared, tensors)
    convert(shared, shared.parent / "whole", weights="int8")
    assert weights(shared.parent / "shared") == weights(shared.parent / "whole")


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"format": "pt", EMBEDDING: HEAD}])
def test_a_tied_model_stored_under_the_heads_name(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    source = make_checkpoint(tmp_path / "hf", tie_word_embeddings=True)
    tensors = read_tensors(source)
    save(source, {HEAD if name == EMBEDDING else name: values for name, values in tensors.items()}, metadata)
    same_bundle(source, tensors)


@pytest.mark.parametrize("kept", [EMBEDDING, HEAD])
def test_head_and_embedding_are_one_tensor_though_the_config_does_not_tie(tmp_path: Path, kept: str) -> None:
    source = make_checkpoint(tmp_path / "hf")
    tensors = read_tensors(source)
    tensors[EMBEDDING] = tensors[HEAD]
    left_out = HEAD if kept == EMBEDDING else EMBEDDING
    save(source, {name: v for name, v in tensors.items() if name != left_out}, {left_out: kept})
    same_bundle(source, tensors)


@pytest.mark.slow
def test_what_the_library_writes(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_model

    source = make_checkpoint(tmp_path / "hf", tie_word_embeddings=True)
    tensors = read_tensors(source)
    model = torch.nn.Module()
    for name, values in tensors.items():
        place = model
        *path, last = name.split(".")
        for part in path:
            if part not in dict(place.named_children()):
                place.add_module(part, torch.nn.Module())
            place = getattr(place, part)
        setattr(place, last, torch.nn.Parameter(torch.from_numpy(values)))
    model.lm_head = torch.nn.Module()
    model.lm_head.weight = model.model.embed_tokens.weight
    save_model(model, str(source / "model.safetensors"))
    assert (EMBEDDING in read_tensors(source)) != (HEAD in read_tensors(source))
    same_bundle(source, tensors)


def test_shared_projections_and_layers(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "hf", num_key_value_heads=4)
    tensors = read_tensors(source)
    aliases = {LAYER.format(1, part): LAYER.format(0, part) for part in "qkvo"}
    aliases |= {LAYER.format(layer, "v"): LAYER.format(0, "k") for layer in (0, 1)}
    aliases |= {name: name.replace("layers.1", "layers.0") for name in tensors if "layers.1.mlp" in name}
    for name, other in aliases.items():
        tensors[name] = tensors[other]
    save(source, {name: values for name, values in tensors.items() if name not in aliases}, aliases)
    same_bundle(source, tensors)


def test_an_alias_of_a_tensor_in_another_shard(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "hf")
    tensors = read_tensors(source)
    tensors[EMBEDDING] = tensors[HEAD]
    (source / "model.safetensors").unlink()
    rest = {name: values for name, values in tensors.items() if name not in (HEAD, EMBEDDING)}
    save(source, rest, {EMBEDDING: HEAD}, "a.safetensors")
    save(source, {HEAD: tensors[HEAD]}, {}, "b.safetensors")
    index = {name: "b.safetensors" if name == HEAD else "a.safetensors" for name in tensors}
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    same_bundle(source, tensors)


def test_a_name_that_is_stored_keeps_its_own_elements(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "hf")
    tensors = read_tensors(source)
    save(source, tensors, {EMBEDDING: HEAD, "some words": HEAD, "format": "pt"})
    same_bundle(source, tensors)


@pytest.mark.parametrize(
    ("metadata", "sentence"),
    [
        ({}, "SOURCE lacks the tensor lm_head.weight; if the head is the embedding, set tie_word_embeddings to true in "
         "config.json."),
        ({HEAD: "absent"}, "SOURCE lacks the tensor lm_head.weight, which model.safetensors calls another name of "
         "absent, and that is not stored there."),
        ({HEAD: "a", "a": HEAD}, "calls another name of a, and that is not stored there."),
        ({HEAD: HEAD}, "calls another name of lm_head.weight, and that is not stored there."),
        ({HEAD: "x" * 5000}, "calls another name of " + 80 * "x" + ", and that is not stored there."),
        ({HEAD: "model.norm.weight"}, "The tensor lm_head.weight in model.safetensors has shape [48], but config.json "
         "needs [300, 48]."),
        ({HEAD: 3}, "Cannot read model.safetensors: its __metadata__ is not a table of texts."),
        ({HEAD: None}, "its __metadata__ is not a table of texts."),
        ([HEAD], "its __metadata__ is not a table of texts."),
        ("pt", "its __metadata__ is not a table of texts."),
    ],
)
def test_aliases_that_lead_nowhere(tmp_path: Path, metadata: Any, sentence: str) -> None:
    source = make_checkpoint(tmp_path / "hf")
    tensors = read_tensors(source)
    del tensors[HEAD]
    save(source, tensors, metadata)
    assert sentence in refused(source)


def test_shards_that_disagree(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "hf")
    tensors = read_tensors(source)
    (source / "model.safetensors").unlink()
    half = len(tensors) // 2
    names = [name for name in tensors if name != HEAD]
    for file, part, other in (("a", names[:half], names[0]), ("b", names[half:], names[1])):
        save(source, {name: tensors[name] for name in part}, {HEAD: other}, f"{file}.safetensors")
    index = {name: "a.safetensors" if name in names[:half] else "b.safetensors" for name in names}
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert f"calls lm_head.weight another name of {names[1]}, but another file of the checkpoint one of {names[0]}" in (
        refused(source)
    )


def test_a_long_list_of_aliases_takes_no_time(tmp_path: Path) -> None:
    """Each is the name of the next; with a search of the list for each it would take minutes."""
    source = make_checkpoint(tmp_path / "hf")
    tensors = read_tensors(source)
    save(source, tensors, {f"n{i}": f"n{i + 1}" for i in range(20_000)})
    convert(source, tmp_path / "bundle")
