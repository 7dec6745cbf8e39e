"""A Hugging Face checkpoint directory: its config, its safetensors files, and the files that travel with them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from edgeinfer.base.dataclass import dataclass
from edgeinfer.bundle import Quantisation, own_weights
from edgeinfer.config import GROUP_SIZES
from edgeinfer.errors import CheckpointError
from edgeinfer.graph import (
    Graph,
    ModelConfig,
    TypeOf,
    Weight,
    build_draft_head,
    build_graph,
    read_config,
    requested_types,
    seeing_models,
)
from edgeinfer.quant import WeightType, quantise
from edgeinfer.text import FOLDER

from .convolutions import with_channels_last, with_convolutions_apart
from .expert_names import with_experts
from .json_file import CONFIG_FILE, read_json
from .safe_path import checkpoint_file
from .safetensors_file import SourceTensor
from .shards import TensorFile, open_shards
from .tensor_check import HEAD, check_tensors, misfit
from .text_tensors import Names, is_buffer, names_of_text, predicts_ahead, unread_keys

GENERATION_FILE = "generation_config.json"
TRAVELLING = re.compile(
    r"tokenizer\.json|tokenizer\.model|tokenizer_config\.json|special_tokens_map\.json|added_tokens\.json|vocab\.json"
    r"|merges\.txt|generation_config\.json|chat_template\.jinja|chat_template\.json|LICENSE[A-Za-z0-9_.\-]{0,40}"
    r"|README\.md"
)
"""Files that a bundle takes along: tokenizer, chat template, licence and card; never code, never pickles."""
MAX_DOCUMENT, MAX_TEXTS, MAX_FILES = 8 << 20, 128 << 20, 64
"""Bytes of a licence or card, bytes of a file of the tokenizer or of templates (Gemma's are 34 MB), and files."""
TEMPLATE = re.compile(r"[A-Za-z0-9_\-]{1,64}\.jinja")
"""Names of further chat templates in a folder, which a bundle takes along."""
RATES = ".A_log"
"""Rates of decay, a vector of the heads, which Kimi's checkpoints have with further axes of one element."""
WEIGHTS = "q4"
"""Default type of the matrices."""


def quantisation_of(type_of: Callable[[Weight], WeightType], weights: str, group_size: int) -> Quantisation:
    """The request as the bundle's header states it."""
    embedding, head = (type_of(Weight(kind, (1, 1), kind)).dtype for kind in ("embedding", "head"))
    return Quantisation(weights, group_size, embedding, head)


@dataclass
class Checkpoint:
    """An open checkpoint; use `Checkpoint.open`. A context manager."""

    path: Path
    config: ModelConfig
    files: dict[str, TensorFile]
    """The file of each stored tensor, by the tensor's name."""
    aliases: dict[str, str]
    """Further names of stored tensors."""
    pictures: frozenset[str] = frozenset()
    """Stored tensors of the part of a model that sees pictures."""
    config_source: ClassVar[str] = CONFIG_FILE
    """File that determines the sizes of the checkpoint's tensors."""

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Read config and headers; no weights yet.

        Raises
        ------
        CheckpointError
            If a file is missing or damaged.
        UnsupportedModelError
            If the model's mathematics is not implemented.
        """
        path = Path(path)
        fields, generation = checkpoint_fields(path)
        config = read_config(fields, generation)
        files, aliases = open_shards(path)
        config, names = text_model(fields, config, files)
        return cls(path, config, files, {**names.aliases, **aliases}, names.pictures)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        for file in self.files.values():
            file.close()

    def stored(self, name: str) -> str:
        """Name under which a tensor is stored: its own, or that of the one that it shares its elements with."""
        return self.aliases.get(name, name)

    def tensor(self, name: str) -> SourceTensor:
        """Type and shape of one tensor."""
        found = self.files[self.stored(name)].tensors[self.stored(name)]
        return replace(found, shape=(prod(found.shape),)) if name.endswith(RATES) else found

    def read(self, name: str, starts: Sequence[int], count: int) -> NDArray[np.float32]:
        """Read `count` elements from each of the elements `starts` on, as float32 of shape (len(starts), count)."""
        return self.files[self.stored(name)].read(self.stored(name), starts, count)

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        """Rows start to stop of a tensor as float32 of shape (rows, elements per row)."""
        size = prod(self.tensor(name).shape[1:])
        return self.read(name, [start * size], (stop - start) * size).reshape(-1, size)

    @property
    def travelling_files(self) -> dict[str, Path]:
        """Tokenizer, chat templates, licence and card by their names in a bundle, which has no folders; sorted."""
        names = {p.name: p.name for p in self.path.iterdir() if TRAVELLING.fullmatch(p.name) and not p.is_dir()}
        names |= {f"chat_template.{p.name}": f"{FOLDER}/{p.name}" for p in self.path.glob(f"{FOLDER}/*")
                  if TEMPLATE.fullmatch(p.name) and not p.is_dir()}
        return {name: path for name, where in sorted(names.items())
                if (path := checkpoint_file(self.path, where)) and not self._is_long_document(name, path)}

    def check_travelling_files(self) -> None:
        """Raise `CheckpointError` for more or larger files than a tokenizer can have: they are copied whole."""
        files = self.travelling_files
        if len(files) > MAX_FILES:
            raise CheckpointError(f"{self.path} has {len(files)} files for its texts and licences, and a bundle takes "
                                  f"{MAX_FILES} at most; remove those that do not belong to the model.")
        for name, path in files.items():
            if (nbytes := path.stat().st_size) > MAX_TEXTS:
                raise CheckpointError(f"{path} has {nbytes} bytes, and {name} may have {MAX_TEXTS} at most; download "
                                      "it again.")

    @staticmethod
    def _is_long_document(name: str, path: Path) -> bool:
        """Return whether a licence or card is so long that it is left out."""
        return name.startswith(("LICENSE", "README")) and path.stat().st_size > MAX_DOCUMENT

    @property
    def _document_remarks(self) -> tuple[str, ...]:
        """Say which licence or card is left out."""
        long = [path for path in self.path.iterdir() if TRAVELLING.fullmatch(path.name) and path.is_file()
                and self._is_long_document(path.name, path)] if self.path.is_dir() else []
        return tuple(f"{path.name} has {path.stat().st_size} bytes, over the {MAX_DOCUMENT} that a bundle takes along "
                     "of a document, and is left out." for path in sorted(long))

    @property
    def label(self) -> str:
        """Name of the source that a bundle records, for people."""
        return self.path.resolve().name

    @property
    def made_files(self) -> dict[str, bytes]:
        """Return the files of the bundle that are made, not copied from the checkpoint; their content by name."""
        return {}

    @property
    def remarks(self) -> tuple[str, ...]:
        """Sentences for the person who converts it."""
        return (*self._left_out, *self._document_remarks, *self._unread_remarks)

    @property
    def _left_out(self) -> tuple[str, ...]:
        """Say which parts of the checkpoint are not those of a text model of the next token."""
        found = []
        kind = f"the bundle is the text model, a {self.config.model_type}"
        hears = "hears and " if any("audio" in name for name in self.pictures) else ""
        drafts = self.predicted if self._without_head else ()
        for names, what, why in ((self.pictures, f"what {hears}sees pictures", kind),
                                 (drafts, "layers that predict further tokens", self._without_head)):
            if names:
                found.append(f"{len(names)} tensors of {what} ({self._megabytes(names)}) are left out: {why}.")
        return tuple(found)

    @property
    def predicted(self) -> frozenset[str]:
        """Tensors of layers that predict more than the next token."""
        return frozenset(self.stored(name) for name in (*self.files, *self.aliases)
                         if predicts_ahead(name, self.config))

    def _megabytes(self, names: Collection[str]) -> str:
        return f"{sum(self.tensor(name).nbytes for name in names) / 1e6:.1f} MB"

    @property
    def _unread_remarks(self) -> tuple[str, ...]:
        if not (unread := self._unread):
            return ()
        return (f"{len(unread)} tensors of K and V ({self._megabytes(unread)}) are left out: their layers read those "
                "of layers before them.",)

    @property
    def _unread(self) -> frozenset[str]:
        return unread_keys(self.files, self.config.kv_layers) - self.pictures

    @property
    def ignored(self) -> frozenset[str]:
        """Tensors that are not weights, or none of the text model."""
        own = frozenset(name for name in self.files if is_buffer(name))
        return own | self.pictures | self.predicted | self._unread

    @property
    def quantised(self) -> Collection[str]:
        """Names of quantised tensors."""
        return ()

    def file_types(self, weight: Weight) -> tuple[str, ...]:
        """Names of the quantised types that the tensors of a weight have; none if a checkpoint has floats."""
        return ()

    def moved(self, weight: Weight, stored: WeightType, count: Callable[[str, int], None],
              sums: list[quantise.ErrorSums]) -> Iterator[NDArray[np.uint8]] | None:
        """The stored bytes of a weight that needs no calculation; None if values must be read.

        `sums` gets errors where factors are rounded on the way.
        """
        return None

    def graph(self, type_of: TypeOf) -> Graph:
        """The forward pass, its weights' sources by the checkpoint's names."""
        return self.named(build_graph(self.config, type_of))

    def draft_head(self, type_of: TypeOf) -> Graph | None:
        """The graph of the head for further tokens with its own weights alone; None unless the checkpoint has all of
        their tensors."""
        return None if self._without_head else self._draft_head(type_of)

    @cached_property
    def _without_head(self) -> str:
        """Return why there is no such head, or an empty text."""
        head = self._draft_head(requested_types("f32"))
        return misfit(self, head) if head else "the bundle has those of the next one"

    def _draft_head(self, type_of: TypeOf) -> Graph | None:
        """The graph of a head of which the checkpoint has some tensors at least."""
        head = build_draft_head(self.config, type_of) if self.predicted else None
        return self.named(replace(head, weights=own_weights(head))) if head else None

    def named(self, graph: Graph) -> Graph:
        """Return a graph whose weights' sources have the checkpoint's names."""
        found = with_experts(graph, {*self.files, *self.aliases}, self.quantised,
                             lambda name: tuple(self.tensor(name).shape))

        def shape_of(name: str) -> tuple[int, ...] | None:
            return tuple(self.tensor(name).shape) if self.stored(name) in self.files else None

        return with_channels_last(with_convolutions_apart(found, shape_of), shape_of)

    def storage(self, weights: str | None, group_size: int | None, embedding: str | None, head: str | None,
                ffn_layout: str) -> tuple[TypeOf, Quantisation]:
        """Return the storage type of each weight, as requested, and its description for the bundle's header."""
        weights, group_size = weights or WEIGHTS, GROUP_SIZES[0] if group_size is None else group_size
        type_of = requested_types(weights, group_size, embedding, head, ffn_layout)
        return type_of, quantisation_of(type_of, weights, group_size)

    def check(self, graph: Graph, compare: bool = True) -> list[str]:
        """Compare the tensors with those that the graph needs; see `check_tensors`."""
        return check_tensors(self, graph, compare)


def checkpoint_fields(path: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Read config.json and generation_config.json, if it exists; raises `CheckpointError`."""
    if not path.exists():
        raise CheckpointError(f"There is no checkpoint at {path}: no such directory.")
    if not path.is_dir():
        what = "a file" if path.is_file() else "not a plain file"
        raise CheckpointError(f"{path} is {what}; give the directory that holds {CONFIG_FILE} and the weights, or "
                              "a GGUF file.")
    config_file, generation_file = (checkpoint_file(path, name) for name in (CONFIG_FILE, GENERATION_FILE))
    if config_file is None:
        raise CheckpointError(f"{path} is not a checkpoint: it has no {CONFIG_FILE}.")
    return read_json(config_file), read_json(generation_file) if generation_file else None


def text_model(fields: Mapping[str, Any], config: ModelConfig, stored: Collection[str]) -> tuple[ModelConfig, Names]:
    """Return the config, completed from the tensors' names, and how these names differ from the architecture's."""
    wrapped = fields.get("model_type") in seeing_models()
    names = names_of_text(stored, config, wrapped)
    if wrapped and fields.get("tie_word_embeddings") is None:  # whose default differs by the model and the version
        config = replace(config, tie_word_embeddings=HEAD not in {*stored, *names.aliases})
    return config, names
