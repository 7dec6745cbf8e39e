"""Targets: the files of a checkpoint that conversion reads, and GGUF headers."""

from __future__ import annotations

import json
import random
import shutil
import struct
from contextlib import suppress
from pathlib import Path

import numpy as np

from edgeinfer.converters import Checkpoint, convert, describe_gguf, open_checkpoint
from edgeinfer.errors import CheckpointError
from edgeinfer.graph import build_graph, builtin_shapes, read_config, requested_types
from edgeinfer.models.describe import describe_config
from tests.helpers.checkpoints import ARCHITECTURES, make_checkpoint, tiny_config
from tests.system.test_gguf_header import fields_of, header, tensors_of

from . import mutate
from .base import Target, tokens_of


class Config(Target):
    """config.json and generation_config.json: fields of every family, known and not."""

    weight = 6.0

    def __init__(self, directory: Path):
        super().__init__(directory)
        self.configs = [tiny_config(kind) for kind in ARCHITECTURES]
        self.configs += [dict(shape.config) for shape in builtin_shapes().values()]

    def run(self, rng: random.Random) -> bool:
        config = mutate.tree(rng, rng.choice(self.configs))
        generation = mutate.tree(rng, {"bos_token_id": 1, "eos_token_id": [2, 3]}) if rng.random() < 0.3 else None
        if isinstance(config, dict) and rng.random() < 0.3:
            describe_config(config, "fuzz", "fuzz")
        else:
            build_graph(read_config(config, generation), requested_types("q4"))
        return True


class Safetensors(Target):
    """The header and the data of model.safetensors, the header framed again so that it is read."""

    weight = 4.0

    def __init__(self, directory: Path):
        super().__init__(directory)
        self.path = make_checkpoint(directory / "hf", tokenizer=False)
        self.file = self.path / "model.safetensors"
        stored = self.file.read_bytes()
        size = struct.unpack("<Q", stored[:8])[0]
        self.header, self.data = json.loads(stored[8 : 8 + size]), stored[8 + size :]

    def run(self, rng: random.Random) -> bool:
        if rng.random() < 0.7:
            text = json.dumps(mutate.tree(rng, self.header)).encode()
            text = mutate.data(rng, text) if rng.random() < 0.2 else text
            stored = struct.pack("<Q", len(text)) + text + self.data
        else:
            text = json.dumps(self.header).encode()
            stored = mutate.data(rng, struct.pack("<Q", len(text)) + text + self.data)
        self.file.write_bytes(stored)
        self.input_bytes = len(stored)
        with Checkpoint.open(self.path) as checkpoint:
            checkpoint.check(build_graph(checkpoint.config, requested_types("q4")))
            for name in rng.sample(sorted(checkpoint.files), min(2, len(checkpoint.files))):
                if checkpoint.tensor(name).shape:
                    checkpoint.read_rows(name, 0, 1)
        return True


class ShardIndex(Target):
    """model.safetensors.index.json over three shards."""

    weight = 3.0

    def __init__(self, directory: Path):
        super().__init__(directory)
        self.path = make_checkpoint(directory / "hf", tokenizer=False, shards=3)
        self.file = self.path / "model.safetensors.index.json"
        self.index = json.loads(self.file.read_text())

    def run(self, rng: random.Random) -> bool:
        text = json.dumps(mutate.tree(rng, self.index)).encode()
        self.file.write_bytes(mutate.data(rng, text) if rng.random() < 0.2 else text)
        with Checkpoint.open(self.path) as checkpoint:
            checkpoint.check(build_graph(checkpoint.config, requested_types("q4")))
        return True


class Conversion(Target):
    """Convert a damaged checkpoint; accepted ones open and run, and nothing half-written stays."""

    weight = 0.3

    def __init__(self, directory: Path):
        super().__init__(directory)
        self.sources = [make_checkpoint(directory / kind, kind, tie_word_embeddings=kind == "qwen2")
                        for kind in ARCHITECTURES]
        self.work, self.target = directory / "work", directory / "out" / "bundle"

    def run(self, rng: random.Random) -> bool:
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.rmtree(self.target.parent, ignore_errors=True)
        self.target.parent.mkdir()
        shutil.copytree(rng.choice(self.sources), self.work)
        for file in rng.sample(sorted(self.work.iterdir()), rng.choice((1, 1, 2))):
            stored = file.read_bytes()
            if file.suffix == ".json":
                file.write_text(json.dumps(mutate.tree(rng, json.loads(stored), 2)))
            elif rng.random() < 0.5:  # values that no training gives
                at = 8 + struct.unpack("<Q", stored[:8])[0] + 4 * rng.randrange(1000)
                word = np.float32(rng.choice((np.nan, np.inf, 1e38, 0, 1e-42))).tobytes()
                file.write_bytes(stored[:at] + word + stored[at + 4 :])
            else:
                file.write_bytes(mutate.data(rng, stored))
        self.input_bytes = sum(file.stat().st_size for file in self.work.iterdir())
        try:
            convert(self.work, self.target, weights=rng.choice(("q4", "int8", "f16", "f32")))
        finally:
            left = [path.name for path in self.target.parent.iterdir() if path != self.target]
            locks = [name for name in left if name.endswith(".lock")]
            if len(left) > len(locks):
                raise AssertionError(f"left behind: {left}")
        tokens_of(self.target, self)
        return True


class Gguf(Target):
    """GGUF headers: fields and tensors that lie, and bytes that are none."""

    weight = 6.0

    def __init__(self, directory: Path):
        super().__init__(directory)
        self.file = directory / "model.gguf"
        fields = fields_of("smollm2-135m")
        fields["tokenizer.ggml.token_type"] = fields["tokenizer.ggml.token_type"][:100]
        del fields["tokenizer.ggml.tokens"]  # of which there would have to be as many as the embedding has rows
        self.tensors = tensors_of("smollm2-135m")
        self.fields = fields

    def run(self, rng: random.Random) -> bool:
        if rng.random() < 0.6:
            fields = dict(self.fields)
            for key in rng.sample(sorted(fields), rng.choice((1, 2, 3))):
                fields[key] = rng.choice((0, 1, 7, 2**31, 2**32 - 1, 0.0, 1e38, float("nan"), "", "x" * 99, [1], ["a"]))
            if rng.random() < 0.2:
                del fields[rng.choice(sorted(fields))]
            stored = header(fields, self.tensors, rng.choice((2, 3, 3, 3)))
        else:
            stored = mutate.data(rng, header(self.fields, self.tensors))
        self.file.write_bytes(stored)
        self.input_bytes = len(stored)
        describe_gguf(self.file, "q4")
        with suppress(CheckpointError):  # there are no data, which a plan does not need
            open_checkpoint(self.file).close()
        return True
