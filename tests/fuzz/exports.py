"""Target: exports to ONNX: their verification, their opening by a runner, and the options of `export`."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import onnx

from edgeinfer.backends import Flavour, OnnxRunner, export, provider_of, verify_export
from edgeinfer.backends.onnx import stored
from edgeinfer.backends.onnx.model import GRAPH_KEY, graph_sha256
from edgeinfer.bundle import Bundle
from edgeinfer.config import RuntimeConfig
from edgeinfer.converters import convert
from tests.helpers.checkpoints import make_checkpoint

from . import mutate
from .base import Target, WrongTokensError, greedy
from .calls import check_command

FLAGS = {
    "--for": ("session", "genai", "onnx", ""), "--dtype": ("f16", "f32", "bf16", "x" * 999),
    "--attention": ("gqa", "paged", "sparse"), "--qk-norm": ("apart", "fused", "no"),
    "--ctx": ("1", "7", "128", "0", "-1", "99999999999999999999", "x", "1e3", ""), "--overwrite": (), "--json": (),
    "--nonsense": (),
}
PLACES = ("new.onnx", "new.onnx", "new", "folder", "m.onnx", "link.onnx", "file", "file/m.onnx", "a/b/c.onnx", "", ".",
          "..", "/", "/dev/null", "\0.onnx", "x" * 20_000 + ".onnx", ".onnx", "-", "ä.onnx", "\udcff.onnx", "bundle")
MODELS = ("bundle", "bundle", "bundle", "bundle", "hf", "m.onnx", "folder", "no-such-model", "tinyllama-1.1b", "")
FIELDS = ("target", "dtype", "attention", "ctx", "qk_norm", "top_k")


class Export(Target):
    """A model of a tiny bundle, its data, a folder for onnxruntime-genai, and a lowered model in the cache."""

    weight = 0.8

    def __init__(self, directory: Path):
        super().__init__(directory)
        convert(make_checkpoint(directory / "hf", seed=7), directory / "bundle")
        self.bundle, self.made = Bundle.open(directory / "bundle"), directory / "made"
        export(self.bundle, self.made / "m.onnx", Flavour(dtype="f32"))
        export(self.bundle, self.made / "folder", Flavour("genai"))
        self.cache = directory / "cache"
        stored.cache_root = lambda: self.cache  # other targets keep theirs
        self.expected = self.tokens()
        self.lowered = directory / "lowered"
        shutil.copytree(self.cache, self.lowered)
        self.kinds = (self.altered, self.altered, self.sealed, self.sealed, self.sealed, self.opened, self.called,
                      self.asked)

    def run(self, rng: random.Random) -> bool:
        work = self.directory / "work"
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(self.made, work)
        return rng.choice(self.kinds)(rng, work)

    def canary(self) -> None:
        if (found := self.tokens()) != self.expected:
            raise WrongTokensError(f"{found} instead of {self.expected}")

    def tokens(self) -> list[int]:
        """Return the first tokens of the model on onnxruntime's CPU provider."""
        provider = provider_of("onnx-cpu")
        assert provider
        with Bundle.open(self.directory / "bundle") as bundle:
            runner = OnnxRunner(bundle, RuntimeConfig(ctx=64, threads=1, prefill_chunk=16, kv="f32"), provider)
            self.plan_bytes = runner.plan.total_bytes
            try:
                return greedy(runner)
            finally:
                runner.close()

    def altered(self, rng: random.Random, work: Path) -> bool:
        """Verify a damaged export without a new checksum: it must be refused."""
        path = work / rng.choice(("m.onnx", "folder"))
        inside = [file for file in (path.iterdir() if path.is_dir() else work.glob("m.*"))
                  if file.suffix in (".onnx", ".data") or file.name == "tokenizer.json"]
        file = rng.choice(sorted(inside))
        before = file.read_bytes()
        if rng.random() < 0.1:
            self.replace(rng, file)
        else:
            file.write_bytes(mutate.data(rng, before))
            self.input_bytes = file.stat().st_size
        verify_export(path)
        if file.read_bytes() != before and (file.suffix != ".onnx" or not self.same(before, file.read_bytes())):
            raise WrongTokensError(f"{file.name} was altered, and passed")
        return True

    @staticmethod
    def same(before: bytes, after: bytes) -> bool:
        """Return whether two files hold the same model: protobuf has several ways to write one."""
        return bool(onnx.load_model_from_string(before) == onnx.load_model_from_string(after))

    @staticmethod
    def replace(rng: random.Random, file: Path) -> None:
        """Put something in a file's place that is none."""
        file.unlink()
        kind = rng.randrange(5)
        if kind == 0:
            file.mkdir()
        elif kind == 1:
            os.mkfifo(file)
        elif kind == 2:
            file.symlink_to("/dev/zero")
        elif kind == 3:
            file.symlink_to(file.name)

    def sealed(self, rng: random.Random, work: Path) -> bool:
        """Verify a model with other metadata and other places of tensors, sealed by somebody who knows how."""
        path = work / "m.onnx"
        model = onnx.load_model_from_string(path.read_bytes())
        for _ in range(rng.randint(1, 3)):
            self.change(rng, model)
        for entry in [entry for entry in model.metadata_props if entry.key == GRAPH_KEY]:
            model.metadata_props.remove(entry)
        model.metadata_props.add(key=GRAPH_KEY, value=graph_sha256(model))
        path.write_bytes(model.SerializeToString())
        self.input_bytes = path.stat().st_size
        verify_export(path)
        return True

    def change(self, rng: random.Random, model: Any) -> None:
        """Change one thing."""
        kind = rng.randrange(5)
        if kind == 0:
            entry = rng.choice(model.metadata_props)
            if entry.key == "edgeinfer.tensors" and rng.random() < 0.8:
                entry.value = json.dumps(mutate.tree(rng, json.loads(entry.value)))
            else:
                entry.value = self.text(rng, entry.value)
        elif kind == 1 and len(model.graph.initializer):
            tensor = rng.choice(model.graph.initializer)
            if len(tensor.external_data):
                where = rng.choice(tensor.external_data)
                where.value = self.text(rng, where.value)
            else:
                tensor.name = self.text(rng, tensor.name)
        elif kind == 2 and len(model.graph.initializer):
            model.graph.initializer.remove(rng.choice(model.graph.initializer))
        elif kind == 3 and len(model.metadata_props) > 1:
            model.metadata_props.remove(rng.choice(model.metadata_props))
        else:
            names = {"location": self.text(rng, "m.data")}
            for tensor in model.graph.initializer:
                for where in tensor.external_data:
                    where.value = names.get(where.key, where.value)

    @staticmethod
    def text(rng: random.Random, before: str) -> str:
        """Return another text that protobuf takes."""
        number = str(rng.choice((-1, 0, 1, 4095, 4096, 2**31, 2**63, 10**30)))
        changed = rng.choice((number, number, str(mutate.value(rng)), mutate.text(rng, before)))
        return changed.encode("utf-8", "replace").decode()

    def opened(self, rng: random.Random, work: Path) -> bool:
        """Open a lowered model of the cache that was damaged: it is made again, or refused."""
        shutil.rmtree(self.cache)
        shutil.copytree(self.lowered, self.cache)
        for file in rng.sample(sorted(path for path in self.cache.rglob("*") if path.is_file()), rng.choice((1, 1, 2))):
            if rng.random() < 0.2:
                self.replace(rng, file)
            else:
                file.write_bytes(mutate.data(rng, file.read_bytes()))
        try:
            if (found := self.tokens()) != self.expected:
                raise WrongTokensError(f"{found} instead of {self.expected}")
        finally:
            shutil.rmtree(self.cache)
            shutil.copytree(self.lowered, self.cache)
        return True

    def called(self, rng: random.Random, work: Path) -> bool:
        """Export by Python with options of any type."""
        options = {field: mutate.value(rng) if rng.random() < 0.5 else rng.choice(("f32", 1, 7, "paged", "fused"))
                   for field in rng.sample(FIELDS, rng.randint(1, 2))}
        place = mutate.value(rng) if rng.random() < 0.1 else work / "new.onnx"
        export(self.bundle, place, Flavour(**options))
        verify_export(work / "new.onnx")
        return True

    def asked(self, rng: random.Random, work: Path) -> bool:
        """Type a command line; whatever came of it, what was there is whole and nothing else is left."""
        for name in ("bundle", "hf"):
            (work / name).symlink_to(self.directory / name)
        (work / "file").write_text("mine")
        (work / "link.onnx").symlink_to("m.onnx")
        line = ["export", rng.choice(MODELS), rng.choice(PLACES)]
        for flag in rng.sample(sorted(FLAGS), rng.randint(0, 3)):
            line += [flag, rng.choice(FLAGS[flag])] if FLAGS[flag] else [flag]
        if rng.random() < 0.05:
            rng.shuffle(line)
        if rng.random() < 0.2:
            line = ["verify", rng.choice((*PLACES, *MODELS))]
        self.plan_bytes = 100 << 20
        before = Path.cwd()
        os.chdir(work)
        try:
            done = check_command(line, b"")
            verify_export("m.onnx")
            verify_export("folder")
            if left := [path.name for path in work.iterdir() if path.name.startswith(".") and path.suffix != ".lock"]:
                raise AssertionError(f"{line} left {left}")
        finally:
            os.chdir(before)
        return done
