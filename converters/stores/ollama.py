"""Models in ollama's store on this machine: a manifest names blobs, one of which is a GGUF file.

The blob is used where it is. Nothing is asked of a running ollama, nothing is written.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from edgeinfer.base.validation import similar
from edgeinfer.errors import CheckpointError, ModelNotFoundError

from ..checkpoint.json_file import read_json

OLLAMA = "ollama:"
"""Beginning of the names of its models."""
REGISTRY, LIBRARY, TAG = "registry.ollama.ai", "library", "latest"
MODEL_LAYER = "application/vnd.ollama.image.model"
ADAPTER_LAYER = "application/vnd.ollama.image.adapter"
_PART = r"[A-Za-z0-9_][A-Za-z0-9_.\-]*"
_NAME = re.compile(rf"(?:({_PART}(?::[0-9]+)?)/)?(?:({_PART})/)?({_PART})(?::({_PART}))?")
_DIGEST = re.compile(r"sha256[:-][0-9a-f]{64}")


SERVICE = Path("/usr/share/ollama/.ollama/models")
"""The store of the service that ollama's installer sets up on Linux, which runs as a user of its own."""


def store() -> Path:
    """Return the folder of ollama's models: OLLAMA_MODELS, else ``~/.ollama/models``, else that of its service."""
    if given := os.environ.get("OLLAMA_MODELS"):
        with suppress(RuntimeError):  # ~ without a home: a folder of that name
            return Path(given).expanduser()
        return Path(given)
    own = Path.home() / ".ollama" / "models"
    return SERVICE if not (own / "manifests").is_dir() and (SERVICE / "manifests").is_dir() else own


def ollama_file(name: str) -> Path:
    """Return the GGUF file of a model that ollama has pulled.

    Parameters
    ----------
    name : str
        As ``ollama run`` takes it: ``llama3.2``, ``llama3.2:1b``, ``owner/model:tag``, ``host/owner/model:tag``.

    Raises
    ------
    ModelNotFoundError
        The store has no such model; the message has the nearest names.
    CheckpointError
        Its manifest is damaged or has no model, or the blob is missing.
    """
    match = _NAME.fullmatch(name)
    if not match:
        raise ModelNotFoundError(f"{name!r} is not the name of an ollama model; names look like llama3.2:1b.")
    host, owner, model, tag = match[1], match[2], match[3], match[4] or TAG
    if host and not owner:
        host, owner = None, host
    root = store()
    manifest = root / "manifests" / (host or REGISTRY) / (owner or LIBRARY) / model / tag
    if not manifest.is_file():
        raise ModelNotFoundError(_unknown(name, model, root))
    digest = _model_digest(read_json(manifest), name, manifest)
    blob = root / "blobs" / digest.replace(":", "-")
    if not blob.is_file():
        raise CheckpointError(f"ollama's model {name} lacks its file {blob}; pull it again: ollama pull {name}.")
    return blob


def _model_digest(manifest: dict[str, Any], name: str, path: Path) -> str:
    layers = manifest.get("layers")
    layers = layers if isinstance(layers, list) else []
    models = [layer for layer in layers if isinstance(layer, dict) and layer.get("mediaType") == MODEL_LAYER]
    if not models:
        raise CheckpointError(f"The manifest {path} has no model layer ({MODEL_LAYER}): {name} is an adapter or "
                              "runs elsewhere; choose another tag.")
    if any(isinstance(layer, dict) and layer.get("mediaType") == ADAPTER_LAYER for layer in layers):
        raise CheckpointError(f"ollama's model {name} has an adapter, which edgeinfer does not support; choose "
                              "a tag without one.")
    digest = models[0].get("digest")
    if len(models) > 1 or not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise CheckpointError(f"The manifest {path} is damaged: its model layer has the digest "
                              f"{digest!r:.80}; pull it again: ollama pull {name}.")
    return digest


def _unknown(name: str, model: str, root: Path) -> str:
    names = pulled(root)
    if not names:
        return (f"ollama's store {root} has no models; pull one (ollama pull {name}), or set OLLAMA_MODELS to the "
                "store that has.")
    near = [other for other in names if other.split(":")[0].rpartition("/")[2] == model][:3]
    near = near or similar(name, names, n=3, cutoff=0.4) or names[:3]
    return f"ollama has not pulled {name!r} (store {root}); nearest: {', '.join(near)}."


def pulled(root: Path) -> list[str]:
    """Names of the models in a store, as ollama calls them; sorted."""
    manifests = root / "manifests"
    found = []
    try:
        for path in manifests.glob("*/*/*/*"):
            host, owner, model, tag = path.relative_to(manifests).parts
            if path.is_file() and not path.name.startswith("."):
                short = model if owner == LIBRARY else f"{owner}/{model}"
                found.append(f"{short if host == REGISTRY else f'{host}/{owner}/{model}'}:{tag}")
    except OSError:
        return []
    return sorted(found)
