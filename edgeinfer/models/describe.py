"""Descriptions of models from a bundle, checkpoint, GGUF file or name; no weights are read."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeinfer import converters

from ..base.validation import similar
from ..bundle import Bundle, Quantisation, is_bundle, weights_file_bytes
from ..config import Recipe
from ..errors import CheckpointError, ModelNotFoundError, UsageError
from ..graph import ModelConfig, build_graph, builtin_shapes, expected_types, is_quantised, read_config, requested_types
from ..quant import embedding_type
from .description import ModelDescription
from .file_types import types_of_file
from .names import DEMO, KNOWN_NAMES, LISTING, demo_path, is_hub_id, missing_path, unknown_model
from .resolve import gguf_path
from .spoken import COARSE_TYPES, FILE_TYPES, Spoken, near_shapes, spoken
from .storage import GROUP_SIZE, WEIGHTS, Storage

if TYPE_CHECKING:
    from edgeinfer.converters import FileDescription, GgufHeader
    from edgeinfer.devices import DeviceProfile

CONFIG_FILE = "config.json"
_SHAPE_WEIGHTS = {"bitnet": "q2"}
"""Types of the weights of built-in shapes whose checkpoints have their own, by model_type; others are q4."""


def describe(
    model: str | Path, weights: str | None = None, group_size: int | None = None, recipe: Recipe | None = None,
    profile: DeviceProfile | None = None,
) -> ModelDescription:
    """Describe a model from any of its forms; no weights are read or downloaded.

    Parameters
    ----------
    model : str or Path
        A bundle; a checkpoint directory or its config.json alone; a GGUF file, also ``ollama:NAME``; ``demo``; the name
        of a built-in shape (see `builtin_shapes`) in any case; or an id on the hub, of which only config.json is
        fetched.
    weights : str, optional
        Storage of the matrices, with the defaults of converting for embedding and head. By default a bundle's own, else
        that of checkpoints which are converted on the way; q2 for a built-in shape of BitNet.
    group_size : int, optional
    recipe : Recipe, optional
        The passes of the run that is described.
    profile : DeviceProfile, optional
        Of the device that it runs on, by default this machine's: it decides which layers leave out neurons.

    Raises
    ------
    ModelNotFoundError
        There is no such model; the message has the nearest names.
    BundleError, CheckpointError
        The files cannot be read, or contradict themselves.
    UnsupportedModelError
        It is of a family that edgeinfer does not know.
    UsageError
        For an unknown type or group size.
    """
    name = os.fspath(model)
    if not name:
        raise ModelNotFoundError("The name of the model is empty.")
    path = gguf_path(name, download=False, storage=Storage(weights, group_size)) or Path(name).expanduser()
    if name == DEMO and not path.exists():
        path = demo_path()
    if path.is_dir() and is_bundle(path):
        return replace(_from_bundle(name, path, weights, group_size, recipe, profile), path=path)
    meant = None if path.exists() or name in KNOWN_NAMES or is_hub_id(name) else spoken(name)
    if meant and meant.refused:
        raise UsageError(meant.refused)
    if meant and meant.shape and (meant.file_type or meant.weights or meant.unknown_type):
        return _of_type(name, meant, weights, group_size, recipe)
    try:
        if path.is_file() and path.stat().st_size:
            from edgeinfer.converters import is_gguf

            if is_gguf(path):
                return replace(describe_gguf_file(name, path, weights, group_size, recipe), path=path)
        config, source, own = _config(name, path)
        if is_quantised(config):
            found = _from_packed(name, path, config, weights, group_size, recipe)
        else:
            found = describe_config(config, name, source, weights or own, group_size, recipe)
        return replace(found, path=path) if any(path.glob("*.safetensors")) else found
    except CheckpointError as error:
        if str(error).startswith(CONFIG_FILE) and path.name != CONFIG_FILE and path.is_file():  # GGUF: other names
            raise type(error)(f"{path}, as a {error}") from None
        raise


def describe_gguf_file(
    name: str, path: Path, weights: str | None = None, group_size: int | None = None, recipe: Recipe | None = None,
    headers: list[GgufHeader] | None = None,
) -> ModelDescription:
    """Describe the model of a GGUF file, whose headers may have been read before; raises as `describe`."""
    found, source = converters.describe_gguf(path, weights, group_size, headers), f"GGUF file {path}"
    if found.model is None:
        described = describe_config(found.fields, name, source, weights, group_size, recipe)
        return replace(described, file_types=found.file_types, file_says=found.note)
    return _as_stored(name, source, found, recipe)


def _of_type(name: str, meant: Spoken, weights: str | None, group_size: int | None, recipe: Recipe | None
             ) -> ModelDescription:
    """A built-in shape with the type of weights that its name states."""
    assert meant.shape
    stated = meant.file_type or meant.weights
    if stated is None:
        raise UsageError(f"{name!r} states {meant.unknown_type}, which cannot be described without its file; known are "
                         f"{', '.join(FILE_TYPES)}, q4, int8, f16 and f32.")
    if weights is not None and weights != meant.weights:
        raise UsageError(f"{name!r} states {stated}, and --weights {weights}; leave one of them out.")
    source, recipe = meant.shape.origin, recipe or Recipe()
    if meant.file_type is None:
        source += f", in {stated} (for {meant.stated})" if meant.stated else ""
        return describe_config(dict(meant.shape.config), name, source, stated, group_size, recipe)
    model = read_config(dict(meant.shape.config))
    type_of = types_of_file(meant.file_type, model.num_hidden_layers, model.tie_word_embeddings)
    graph = build_graph(model, type_of, recipe)
    kinds = [type_of(weight) for weight in graph.weights if weight.kind in ("matrix", "ffn", "experts")]
    kind = max(dict.fromkeys(kinds), key=kinds.count)
    ends = [type_of(weight).dtype for weight in graph.weights if weight.kind in ("embedding", "head")]
    quantisation = Quantisation(kind.dtype, kind.group_size, ends[0], ends[-1])
    return ModelDescription(name, f"{source}, as {_file_in_words(meant)}", model, quantisation, graph,
                            weights_file_bytes(graph), recipe=recipe)


def _file_in_words(meant: Spoken) -> str:
    """Describe a file type in words: its name, its meaning, and the storage type that holds such weights."""
    kind = f"a {meant.file_type} file"
    if meant.stated and meant.stated.replace("-", "_") != meant.file_type:
        kind += f" (for {meant.stated})"
    return kind + (", held in q4" if meant.file_type in COARSE_TYPES else "")


def _from_packed(
    name: str, path: Path, config: dict[str, Any], weights: str | None, group_size: int | None, recipe: Recipe | None
) -> ModelDescription:
    """Describe a model whose weights are quantised; without a directory of them, by its config."""
    found = converters.describe_packed(config, path if path.is_dir() else None, weights, group_size)
    return _as_stored(name, f"quantised checkpoint {name}", found, recipe)


def _as_stored(name: str, source: str, found: FileDescription, recipe: Recipe | None) -> ModelDescription:
    """A model of which is known how each weight will be stored."""
    assert found.model and found.type_of and found.quantisation
    graph = build_graph(found.model, found.type_of, recipe or Recipe())
    nbytes = weights_file_bytes(graph)
    return ModelDescription(name, source, found.model, found.quantisation, graph, nbytes, recipe=recipe or Recipe(),
                            file_types=found.file_types, file_says=found.note, file_refused=found.refused)


def describe_config(
    config: dict[str, Any], name: str, source: str, weights: str | None = None, group_size: int | None = None,
    recipe: Recipe | None = None,
) -> ModelDescription:
    """Describe the model of a parsed config.json; raises as `describe`."""
    asked = weights or WEIGHTS, group_size or GROUP_SIZE
    return _described(name, source, read_config(config), *asked, recipe or Recipe())


def _described(
    name: str, source: str, model: ModelConfig, weights: str, group_size: int, recipe: Recipe
) -> ModelDescription:
    graph = build_graph(model, requested_types(weights, group_size), recipe)
    quantisation = Quantisation(weights, group_size, embedding_type(weights), embedding_type(weights))
    nbytes = weights_file_bytes(graph)
    return ModelDescription(name, source, model, quantisation, graph, nbytes, recipe=recipe)


def _from_bundle(
    name: str, path: Path, weights: str | None, group_size: int | None, recipe: Recipe | None,
    profile: DeviceProfile | None,
) -> ModelDescription:
    from ..runtime import decide

    recipe = recipe or Recipe()
    with Bundle.open(path) as bundle:
        own, config = bundle.quantisation, bundle.config
        wanted = (weights or own.weights, group_size or own.group_size)
        if wanted != (own.weights, own.group_size):
            return _described(name, f"bundle {path}, as if converted again", config, *wanted, recipe)
        recipe, sparse = decide(recipe, bundle, profile, contents=False)  # a run that asks has no memory for it
        graph = build_graph(config, expected_types(bundle.types), recipe)
        bundle.check_graph(graph)
        return ModelDescription(name, f"bundle {path}", config, own, graph, bundle.weights_bytes, recipe=recipe,
                                sparse=sparse, bundle=path)


def _config(name: str, path: Path) -> tuple[dict[str, Any], str, str | None]:
    """Return the fields of config.json that the name stands for, where they come from, and the type of a shape's
    weights if it is not the default."""
    if path.is_file():
        if not path.stat().st_size:
            raise CheckpointError(f"{path} is empty; download it again.")
        return converters.read_json(path), f"file {path}", None
    if path.is_dir():
        if (path / CONFIG_FILE).is_file():
            return converters.read_json(path / CONFIG_FILE), f"checkpoint {path}", None
        if name.lower() not in builtin_shapes():
            raise ModelNotFoundError(f"{path} is neither a bundle (it has no bundle.json) nor a checkpoint (it has no "
                                     f"{CONFIG_FILE}).")
    if name.lower() in builtin_shapes() or not (name in KNOWN_NAMES or is_hub_id(name)):
        if shape := spoken(name).shape:
            return dict(shape.config), shape.origin, _SHAPE_WEIGHTS.get(shape.config["model_type"])
    else:
        repo_id = KNOWN_NAMES.get(name, name)
        try:
            found = converters.read_json(converters.fetch_config(repo_id))
            return found, f"{CONFIG_FILE} of {repo_id} on the hub", None
        except CheckpointError:  # no network, or a repository of GGUF files alone
            if not (shape := spoken(repo_id).shape):
                raise
            source = f"{shape.origin}; no {CONFIG_FILE} of {repo_id} was had"
            return dict(shape.config), source, _SHAPE_WEIGHTS.get(shape.config["model_type"])
    raise ModelNotFoundError(_unknown(name))


def _unknown(name: str) -> str:
    if os.path.lexists(Path(name).expanduser()):
        return f"{name} is neither a file nor a directory, or a link that leads nowhere."
    if missing := missing_path(name):
        near = near_shapes(name) if missing.endswith(".") and name.lower().endswith(".gguf") else []
        return f"{missing} Built-in shapes are {', '.join(map(repr, near))}." if near else missing
    shapes = builtin_shapes()
    known = similar(name.lower(), [DEMO, *shapes, *KNOWN_NAMES], n=3, cutoff=0.5)
    like = near_shapes(name) if known or len(name) > 3 or name[:1].isdigit() else []
    near = list(dict.fromkeys([*(one for one in known if one not in shapes), *like, *known]))[:3]
    return unknown_model(name, near, "Give a GGUF file, checkpoint, bundle or config.json, an id on the hub such as "
                         f"owner/name, or a built-in shape such as {next(iter(shapes))}; '{LISTING}' lists the shapes.")
