"""Target: checkpoints whose weights are quantised, with configs, headers and parts that lie."""

from __future__ import annotations

import json
import random
import shutil
import struct
from pathlib import Path

from edgeinfer.converters import convert, describe_packed, open_checkpoint
from tests.helpers.packers import FORMS, make_packed

from . import mutate
from .base import Target, tokens_of


class Packed(Target):
    """The packing in config.json, the header and the data of the parts; accepted ones are read, or run."""

    weight = 3.0

    def __init__(self, directory: Path):
        super().__init__(directory)
        self.path, self.out = directory / "hf", directory / "out"
        self.stored = []
        for form in FORMS:
            make_packed(self.path, form)
            data = (self.path / "model.safetensors").read_bytes()
            size = struct.unpack("<Q", data[:8])[0]
            self.stored.append((json.loads((self.path / "config.json").read_text()), json.loads(data[8 : 8 + size]),
                                data[8 + size :]))

    def run(self, rng: random.Random) -> bool:
        config, header, data = rng.choice(self.stored)
        which = rng.random()
        if which < 0.5:
            key = rng.choice([key for key in config if key.startswith("quantization")])
            config = {**config, key: mutate.tree(rng, config[key])}
        elif which < 0.75:
            header = mutate.tree(rng, header)
        else:
            data = self._damaged(rng, data)
        text = json.dumps(header).encode()
        (self.path / "config.json").write_text(json.dumps(config))
        (self.path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
        self.input_bytes = len(text) + len(data)
        if rng.random() < 0.3:
            describe_packed(config, self.path if rng.random() < 0.5 else None)
            return True
        if rng.random() < 0.3:
            shutil.rmtree(self.out, ignore_errors=True)
            convert(self.path, self.out, weights=rng.choice((None, None, "q4", "f32")))
            tokens_of(self.out, self)
            return True
        with open_checkpoint(self.path) as checkpoint:
            for name in rng.sample(sorted(checkpoint.files), min(3, len(checkpoint.files))):
                checkpoint.read_rows(name, 0, 1)
        return True

    @staticmethod
    def _damaged(rng: random.Random, data: bytes) -> bytes:
        """Words at their limits somewhere, of the same length so that the header still fits."""
        changed = bytearray(data)
        for _ in range(rng.choice((1, 1, 5, 100))):
            at = rng.randrange(len(changed) - 8)
            changed[at : at + 4] = struct.pack("<I", rng.choice(mutate.WORDS) & 0xFFFFFFFF)
        return bytes(changed)
