"""Targets: files that edgeinfer wrote itself: bundles, prompt caches, device profiles."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import ClassVar

from edgeinfer.bundle import HEADER_FILE, Bundle
from edgeinfer.bundle.header import checksum
from edgeinfer.config import RuntimeConfig
from edgeinfer.converters import convert
from edgeinfer.devices import load_profile
from edgeinfer.runner import Sequence
from edgeinfer.runtime import Session
from edgeinfer.runtime.kv.cache_file import start_digest
from tests.helpers.checkpoints import make_checkpoint

from . import mutate
from .base import PROMPT, Target, WrongTokensError, greedy, tokens_of


class _OfBundle(Target):
    """A target that damages the bundle of a tiny model."""

    def __init__(self, directory: Path):
        super().__init__(directory)
        self.path = directory / "bundle"
        convert(make_checkpoint(directory / "hf", seed=7), self.path)
        self.expected = tokens_of(self.path)

    def canary(self) -> None:
        self.restore()
        if (found := tokens_of(self.path)) != self.expected:
            raise WrongTokensError(f"{found} instead of {self.expected}")

    def restore(self) -> None:
        """Make the bundle whole again."""


class BundleHeader(_OfBundle):
    """bundle.json, changed and sealed again, so that it passes its own checksum."""

    weight = 3.0

    def __init__(self, directory: Path):
        super().__init__(directory)
        self.header = (self.path / HEADER_FILE).read_bytes()

    def restore(self) -> None:
        (self.path / HEADER_FILE).write_bytes(self.header)

    def run(self, rng: random.Random) -> bool:
        header = mutate.tree(rng, json.loads(self.header))
        if isinstance(header, dict) and rng.random() < 0.95:
            header.pop("checksum", None)
            header["checksum"] = checksum(header)
        text = json.dumps(header).encode()
        (self.path / HEADER_FILE).write_bytes(mutate.data(rng, text) if rng.random() < 0.1 else text)
        self.input_bytes = len(text)
        tokens_of(self.path, self)  # another epsilon is another model: which tokens it gives is its own affair
        return True


class StoredBytes(_OfBundle):
    """Damage without a new checksum: bundles that open all the same must give the same tokens."""

    weight = 1.5

    def __init__(self, directory: Path):
        super().__init__(directory)
        self.files = {path: path.read_bytes() for path in sorted(self.path.iterdir()) if path.is_file()}

    def restore(self) -> None:
        for path, stored in self.files.items():
            path.write_bytes(stored)

    def run(self, rng: random.Random) -> bool:
        path = rng.choice([*self.files, self.path / "weights.bin", self.path / "weights.bin"])
        stored = self.files[path]
        changed = bytearray(stored)
        if rng.random() < 0.7:
            for _ in range(rng.choice((1, 1, 3))):
                changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        else:
            changed = bytearray(mutate.data(rng, stored))
        self.input_bytes = len(changed)
        path.write_bytes(changed)
        try:
            if (found := tokens_of(self.path, self)) != self.expected and bytes(changed) != stored:
                raise WrongTokensError(f"{path.name} was damaged: {found} instead of {self.expected}")
        finally:
            path.write_bytes(stored)
        return True


class PromptCache(_OfBundle):
    """A saved prompt: its header changed and sealed again, or its bytes changed and not."""

    weight = 4.0

    def __init__(self, directory: Path):
        super().__init__(directory)
        self.bundle = Bundle.open(self.path)
        self.session = Session(self.bundle, RuntimeConfig(ctx=64, threads=1, prefill_chunk=16))
        self.file = directory / "cache"
        self.next = self.write()
        self.stored = self.file.read_bytes()
        size = struct.unpack("<Q", self.stored[8:16])[0]
        self.header, self.blocks = json.loads(self.stored[16 : 16 + size]), self.stored[16 + size :]

    def canary(self) -> None:
        if (found := greedy(self.session)) != self.expected:
            raise WrongTokensError(f"{found} instead of {self.expected}")

    def run(self, rng: random.Random) -> bool:
        signed = rng.random() < 0.6
        if signed:
            header = mutate.tree(rng, self.header, 2)
            if isinstance(header, dict):
                blocks = mutate.data(rng, self.blocks) if rng.random() < 0.3 else self.blocks
                header.pop("sha256", None)
                digest = start_digest(header)
                digest.update(blocks)
                header["sha256"] = digest.hexdigest()
            else:
                blocks = self.blocks
            text = json.dumps(header).encode()
            stored = self.stored[:8] + struct.pack("<Q", len(text)) + text + blocks
        else:
            stored = mutate.data(rng, self.stored)
        self.file.write_bytes(stored)
        self.input_bytes = len(stored)
        free = self.session.kv.pool.n_free
        try:
            found = self.read()
        finally:
            if self.session.kv.pool.n_free != free:
                raise AssertionError(f"{free} free blocks became {self.session.kv.pool.n_free}")
        if not signed and found != self.next and stored != self.stored:
            raise WrongTokensError(f"a damaged {self.file.name} gave {found} instead of {self.next}")
        return True

    def write(self) -> int:
        """Write the file; returns the token after the prompt and another one."""
        sequence = self.session.new_sequence()
        self.session.prefill(sequence, PROMPT)
        self.session.save(sequence, self.file)
        return self._next(sequence)

    def read(self) -> int:
        """Read the file; return the tokens that follow."""
        return self._next(self.session.load(self.file))

    def _next(self, sequence: Sequence) -> int:
        try:
            return int(self.session.decode([sequence], [9])[0].argmax())
        finally:
            self.session.release(sequence)


class PrefixCache(PromptCache):
    """A saved prefix cache, with a prompt of one block."""

    prompt: ClassVar = [*PROMPT, *PROMPT, 11, 12]

    def write(self) -> int:
        sequence = self.session.new_sequence()
        self.session.prefill(sequence, self.prompt)
        self.session.cache_prefix(sequence)
        self.session.save_prefixes(self.file)
        self.session.drop_prefixes()
        return self._next(sequence)

    def read(self) -> int:
        self.session.load_prefixes(self.file)
        sequence = self.session.from_prefix([*self.prompt, 9])
        self.session.drop_prefixes()
        if rest := self.prompt[len(sequence) :]:
            self.session.prefill(sequence, rest)
        return self._next(sequence)


class DeviceFile(Target):
    """Device profiles in TOML."""

    weight = 6.0

    def __init__(self, directory: Path):
        super().__init__(directory)
        from edgeinfer.devices import profiles
        from edgeinfer.devices.store import profile_table, to_toml

        self.tables = [profile_table(profile) for profile in profiles().values()]
        self.to_toml = to_toml
        self.file = directory / "device.toml"

    def run(self, rng: random.Random) -> bool:
        table = rng.choice(self.tables)
        if rng.random() < 0.7:
            try:
                text = self.to_toml(mutate.tree(rng, table))
            except (TypeError, ValueError, AttributeError, KeyError):  # values that TOML does not have
                text = mutate.text(rng, self.to_toml(table))
        else:
            text = mutate.text(rng, self.to_toml(table))
        stored = text.encode("utf-8", "surrogatepass")
        self.file.write_bytes(mutate.data(rng, stored) if rng.random() < 0.2 else stored)
        self.input_bytes = len(stored)
        load_profile(str(self.file))
        return True
