"""The sides of a comparison: where their models come from, how they are started, which settings they have."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.peers.worker import Worker, WorkerError
from edgeinfer.converters import SHAPES, convert, write_random_bundle
from edgeinfer.graph import Weight, WeightType, fitting, requested_types

HERE = Path(__file__).resolve().parent
OURS, LLAMA, OPENVINO = "edgeinfer", "llama.cpp", "openvino-genai"
CTX_LIMIT = 1 << 17
"""Context that the models claim: none was trained."""
SHALLOW = ({"kv": "f16", "flash": True}, {"kv": "f16", "flash": False})
DEEP = (*SHALLOW, {"kv": "q8_0", "flash": True})
"""llama.cpp's settings: all are measured and the best counts. Keys and values of 8 bits need flash attention."""
WRITE_SECONDS = 3600
ALIKE = ("q4_0",)
"""Formats that are our own type with other names; of the others our bundle is an import."""


@dataclass(frozen=True)
class Match:
    """One model of ours against one of a peer."""

    peer: str
    python: str
    """Interpreter of the peer's environment."""
    words: str
    """The peer's model and settings, for the table."""
    group_size: int
    """Group size of edgeinfer's weights."""
    model: Callable[[str], Path]
    """Makes the peer's model of a shape, unless it is there."""
    load: dict[str, Any]
    """More arguments of the peer's request `load`."""
    imports: bool = False
    """True if our bundle is made of the peer's file, with its codes, instead of weights of our own type."""

    def settings(self, depth: int) -> list[tuple[dict[str, Any], str]]:
        """Contexts to measure at a depth, with their words."""
        if self.peer != LLAMA:
            return [({}, self.words)]
        return [(setting, f"{self.words}, KV {setting['kv']}, flash attention {'on' if setting['flash'] else 'off'}")
                for setting in (DEEP if depth else SHALLOW)]


class Models:
    """Models with random weights in a directory; each is made once.

    Parameters
    ----------
    directory : Path
    tell : called with a sentence when a model is written
    """

    def __init__(self, directory: Path, tell: Callable[[str], None]):
        self.directory, self._tell = directory, tell

    def ours(self, match: Match, shape: str) -> Path:
        """edgeinfer's side of a match."""
        return self.imported(match.model(shape)) if match.imports else self.bundle(shape, match.group_size)

    def bundle(self, shape: str, group_size: int) -> Path:
        """edgeinfer's: q4, embedding and head int8."""
        path = self.directory / f"{shape}-q4-g{group_size}"
        if not path.exists():
            self._tell(f"writing {path.name}")
            config = replace(SHAPES[shape], max_position_embeddings=CTX_LIMIT)
            write_random_bundle(config, path, group_size=group_size)
        return path

    def mixed(self, shape: str, mixture: Path) -> Path:
        """edgeinfer's with the types that equal_quality.py found, by kind of matrix and depth; the head is q6."""
        path = self.directory / f"{shape}-{mixture.stem}"
        if not path.exists():
            self._tell(f"writing {path.name}")
            config, given = replace(SHAPES[shape], max_position_embeddings=CTX_LIMIT), json.loads(mixture.read_text())
            types = {name: WeightType.of(*stored) for name, stored in given["types"].items()}
            layers = 1 + max(int(name.split(".")[1]) for name in types)
            others = requested_types(embedding="q4", head="q6")

            def type_of(weight: Weight) -> WeightType:
                if weight.kind != "matrix":
                    return others(weight)
                _, layer, kind = weight.name.split(".")
                return fitting(types[f"layers.{int(layer) * layers // config.num_hidden_layers}.{kind}"], weight.shape)

            write_random_bundle(config, path, types=type_of)
        return path

    def imported(self, file: Path) -> Path:
        """edgeinfer's of a GGUF file: its codes, in our layout."""
        path = file.with_name(f"{file.stem}-imported")
        if not path.exists():
            self._tell(f"importing {file.name}")
            convert(str(file), path)
        return path

    def gguf(self, python: str, shape: str, kind: str) -> Path:
        """llama.cpp's, written by its own package."""
        path = self.directory / f"{shape}-{kind}.gguf"
        return self._written(path, shape, [python, str(HERE / "gguf_models.py"), "--format", kind])

    def openvino(self, python: str, shape: str, group_size: int) -> Path:
        """OpenVINO's, likewise."""
        path = self.directory / f"{shape}-openvino-g{group_size}"
        return self._written(path, shape, [python, str(HERE / "openvino_models.py"), "--group-size", str(group_size)])

    def _written(self, path: Path, shape: str, command: list[str]) -> Path:
        if path.exists():
            return path
        self._tell(f"writing {path.name}")
        partial = path.with_suffix(".partial")
        remove(partial)
        fields = json.dumps({**asdict(SHAPES[shape]), "rope_theta": SHAPES[shape].rope.theta})
        done = subprocess.run([*command, "--shape", fields, "--output", str(partial)], capture_output=True, text=True,
                              timeout=WRITE_SECONDS)
        if done.returncode:
            remove(partial)
            raise WorkerError(f"{path.name} cannot be written: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
        partial.rename(path)
        return path


def remove(path: Path) -> None:
    """Delete a file or directory, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def llama_matches(python: str, models: Models, formats: list[str]) -> list[Match]:
    """llama.cpp with each format."""
    def maker(kind: str) -> Callable[[str], Path]:
        return lambda shape: models.gguf(python, shape, kind)

    return [Match(LLAMA, python, kind, 32, maker(kind), {}, imports=kind not in ALIKE) for kind in formats]


def openvino_matches(python: str, models: Models) -> list[Match]:
    """OpenVINO as its exporters and its plugin have it, and with groups of 128 on both sides and its best setting."""
    def model(shape: str) -> Path:
        return models.openvino(python, shape, 128)

    best = {"DYNAMIC_QUANTIZATION_GROUP_SIZE": "128"}
    return [
        Match(OPENVINO, python, "int4, groups of 128, as it comes", 32, model, {}),
        Match(OPENVINO, python, "int4, groups of 128 on both sides, DYNAMIC_QUANTIZATION_GROUP_SIZE=128", 128, model,
              {"properties": best}),
    ]


def start(side: str, python: str = sys.executable) -> Worker:
    """Start a worker: ours (also as the probe of the machine) or a peer's."""
    scripts = {LLAMA: "llama_cpp_worker.py", OPENVINO: "openvino_worker.py"}
    return Worker(side, [python, str(HERE / scripts.get(side, "edgeinfer_worker.py"))])
