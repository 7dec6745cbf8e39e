"""--device: why a provider cannot be used, in one sentence each, and what runs on onnxruntime's CPU provider."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edgeinfer import LLM
from edgeinfer.backends import PROVIDERS, provider_of
from edgeinfer.backends.onnx import devices, driver, packages
from edgeinfer.bundle import Bundle
from edgeinfer.cli.output import figures
from edgeinfer.config import RuntimeConfig
from edgeinfer.converters import convert
from edgeinfer.errors import BundleError, RequestError, UsageError
from edgeinfer.evaluate import OUTPUT_ROWS, evaluate, token_stream
from edgeinfer.memory_planner import DEVICE, Region
from edgeinfer.opening import opened_on, session
from edgeinfer.runner import Runner
from edgeinfer.text import Tokenizer
from tests.command_line import edgeinfer
from tests.sessions import TINY, tokens, write_model

PROMPT = "Once upon a time"


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lowered models do not fill the developer's cache, and kernels still come from it."""
    monkeypatch.setattr("edgeinfer.backends.onnx.stored.cache_root",
                        lambda: tmp_path_factory.getbasetemp() / "onnx-cache")


# -- what cannot be used -----------------------------------------------------------------------------------------------


class Driver:
    """libcuda of a machine with one GPU."""

    def __init__(self, cuda: int = 13000, capability: tuple[int, int] = (9, 0), count: int = 1):
        self._cuda, self._count = cuda, count
        self._attributes = {75: capability[0], 76: capability[1]}

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = self._cuda
        return 0

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self._count
        return 0

    def cuDeviceGet(self, device: Any, number: int) -> int:
        return 0

    def cuDeviceGetName(self, name: Any, length: int, device: Any) -> int:
        name.value = b"NVIDIA Test"
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> int:
        value._obj.value = self._attributes[attribute]
        return 0

    def cuDeviceTotalMem_v2(self, total: Any, device: Any) -> int:
        total._obj.value = 12_000_000_000
        return 0


    def cuDeviceGetPCIBusId(self, bus: Any, length: int, device: int) -> int:
        bus.value = b"0000:01:00.0"
        return 0


class Management:
    """NVML of that machine."""

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByPciBusId_v2(self, bus: Any, handle: Any) -> int:
        return int(bus.value != b"0000:01:00.0")

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        memory._obj.free = 11_000_000_000
        return 0


@pytest.fixture
def gpu_wheel(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """An onnxruntime-gpu 1.31.1 that is complete, on a machine with a GPU."""
    found = SimpleNamespace(get_available_providers=lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"])
    monkeypatch.setattr(packages, "installed", lambda name: "1.31.1" if name == "onnxruntime-gpu" else "")
    monkeypatch.setattr(devices, "installed", packages.installed)
    monkeypatch.setattr(devices, "import_onnxruntime", lambda: found)
    monkeypatch.setattr(driver, "load_driver", Driver)
    monkeypatch.setattr(devices.ctypes, "CDLL", lambda name: None)
    return found


def refused(device: str = "cuda") -> str:
    with pytest.raises(UsageError) as caught:
        provider_of(device)
    return str(caught.value)


def test_a_gpu_that_works(gpu_wheel: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    assert provider_of("cuda") == provider_of("auto") == PROVIDERS["cuda"]
    assert capsys.readouterr().err == "edgeinfer: Device auto took cuda.\n"
    assert driver.read_gpu() == ("NVIDIA Test", (9, 0), 12_000_000_000, 13000)
    assert provider_of("cpu") is None


@pytest.mark.parametrize(("made", "said"), [
    ({"cuda": 12040}, "NVIDIA's driver runs CUDA up to 12.4, and onnxruntime-gpu 1.31.1 is for CUDA 13; update the "
                      "driver to 580 or newer, or run with --device cpu."),
    ({"capability": (10, 0)}, "NVIDIA Test has compute capability 10.0, for which onnxruntime-gpu 1.31.1 has no code"),
    ({"capability": (7, 0)}, "compute capability 7.0, for which"),
    ({"count": 0}, "NVIDIA's driver finds no GPU that this process may use; see nvidia-smi and CUDA_VISIBLE_DEVICES"),
])
def test_drivers_and_gpus(made: dict[str, Any], said: str, gpu_wheel: SimpleNamespace,
                          monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "load_driver", lambda: Driver(**made))
    assert said in refused()


def test_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "load_driver", Driver)
    monkeypatch.setattr(driver, "load_management", Management)
    assert driver.gpu_free_bytes() == 11_000_000_000
    monkeypatch.setattr(Management, "nvmlInit_v2", lambda self: 9)
    with pytest.raises(UsageError, match="NVIDIA's driver does not say how much memory is free; see nvidia-smi"):
        driver.gpu_free_bytes()


def test_the_line_of_statistics_has_the_memory_of_the_gpu(both: tuple[LLM, LLM]) -> None:
    done = both[1].complete(PROMPT, max_tokens=2)
    assert "GPU" not in figures(done, both[1].plan, 1000)
    planned = replace(both[1].plan, regions=(Region("kv", 3_000_000, "", DEVICE),))
    assert "| GPU 2.0 MB of 3.0 MB planned |" in figures(done, planned, 1000, 2_000_000)


def test_no_driver(gpu_wheel: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise OSError

    monkeypatch.setattr(driver, "load_driver", absent)
    assert refused() == ("There is no NVIDIA driver on this system (libcuda.so.1 was not found); install one, or run "
                         "with --device cpu.")


@pytest.mark.skipif("linux" not in __import__("sys").platform, reason="libraries are looked for by Linux's names")
@pytest.mark.parametrize(("library", "package"), devices.LIBRARIES.items())
def test_libraries(library: str, package: str, gpu_wheel: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> None:
        if name == library:
            raise OSError

    monkeypatch.setattr(devices.ctypes, "CDLL", load)
    assert refused() == (f"CUDA's library {library} is missing; the package {package} has it: pip install "
                         f"'edgeinfer[gpu]', or {package} alone.")


def test_wheels(gpu_wheel: SimpleNamespace, monkeypatch: pytest.MonkeyPatch,
                capsys: pytest.CaptureFixture[str]) -> None:
    gpu_wheel.get_available_providers = lambda: ["CPUExecutionProvider"]
    assert "was built without a CUDA provider; install it anew" in refused()
    for versions, said in (
        ({"onnxruntime": "1.32.0"}, "onnxruntime 1.32.0 is installed, which has no CUDA provider; replace it: pip "
                                    "uninstall -y onnxruntime, then pip install 'edgeinfer[gpu]'."),
        ({"onnxruntime": "1.32.0", "onnxruntime-gpu": "1.31.1"},
         "are both installed, and overwrite each other's files; uninstall both, then install one"),
        ({"onnxruntime-gpu": "1.26.0"}, "onnxruntime-gpu 1.26.0 lacks operators of this model; 1.29 is the first"),
        ({}, "onnxruntime is not installed: pip install 'edgeinfer[gpu]' for CUDA"),
    ):
        found: dict[str, str] = versions
        monkeypatch.setattr(packages, "installed", lambda name, found=found: found.get(name, ""))
        monkeypatch.setattr(devices, "installed", packages.installed)
        assert said in refused()
        assert provider_of("auto") is None
        err = capsys.readouterr().err
        assert err.startswith("edgeinfer: Device auto took cpu, our own kernels, because CUDA cannot be used: ")
        assert said in err
    assert refused("gpu") == "device is 'gpu'; choose one of cpu, cuda, auto, onnx-cpu."


def test_a_session_that_is_not_where_it_should_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """A provider that does not start, that is replaced, and one that leaves a node to another."""
    node = SimpleNamespace(op_type="GroupQueryAttention", name="n1")
    parts = [SimpleNamespace(ep_name="CUDAExecutionProvider", get_nodes=list),
             SimpleNamespace(ep_name="CPUExecutionProvider", get_nodes=lambda: [node])]
    session = SimpleNamespace(get_providers=lambda: ["CPUExecutionProvider"],
                              get_provider_graph_assignment_info=lambda: parts)
    entries: dict[str, str] = {}
    asked: list[Any] = []

    def make(model: str, options: Any, providers: Any) -> Any:
        asked.append(providers)
        return session

    fake = SimpleNamespace(InferenceSession=make, SessionOptions=lambda: SimpleNamespace(
        add_session_config_entry=entries.__setitem__))
    monkeypatch.setattr(devices, "import_onnxruntime", lambda: fake)
    with pytest.raises(UsageError, match=r"^onnxruntime gave CPUExecutionProvider instead of CUDAExecutionProvider"):
        PROVIDERS["cuda"].open("m", 1)
    assert entries["session.disable_cpu_ep_fallback"] == entries["ep.cuda.fpa_intb_gemm"] == "1"
    assert asked[0][0][1]["arena_extend_strategy"] == "kSameAsRequested"
    session.get_providers = lambda: ["CUDAExecutionProvider"]
    with pytest.raises(UsageError, match=r"^1 operations of the model would not run on CUDAExecutionProvider, such as "
                                         r"GroupQueryAttention n1; choose another --device"):
        PROVIDERS["cuda"].open("m", 1)

    def broken(*given: Any, **more: Any) -> None:
        raise RuntimeError("CUDA failure 35: driver\nstack")

    fake.InferenceSession = broken
    with pytest.raises(UsageError, match=r"^onnxruntime cannot open the model on CUDAExecutionProvider: CUDA failure "
                                         r"35: driver Nothing falls back to another device"):
        PROVIDERS["cuda"].open("m", 1)


# -- requests on onnxruntime's CPU provider ----------------------------------------------------------------------------

needs_onnxruntime = pytest.mark.skipif(not packages.installed("onnxruntime"), reason="extra 'onnx' is not installed")


def opened(device: str, **options: Any) -> LLM:
    return LLM("demo", **{"ctx": 192, "threads": 1, "kv": "f32", "device": device, **options})


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, LLM]]:
    """The demo on our own kernels, and on onnxruntime."""
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (extra 'onnx')")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("edgeinfer.backends.onnx.stored.cache_root",
                      lambda: tmp_path_factory.getbasetemp() / "onnx-cache")
        with opened("cpu", max_sequences=4, beams=4) as ours, opened("onnx-cpu", max_sequences=4, beams=4) as theirs:
            yield ours, theirs


def gaps(runner: Runner, ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """The likeliest token behind each, and by how much it leads."""
    sequence, rows = runner.new_sequence(), list[np.ndarray]()
    for _, logits in runner.score(sequence, ids):
        rows.append(logits.copy())
    runner.release(sequence)
    logits = np.concatenate(rows)
    second, first = np.partition(logits, -2)[:, -2:].T
    return logits.argmax(-1), first - second


def agree(ours: LLM, theirs: LLM, found: list[int], want: list[int], prompt: list[int]) -> bool:
    """Whether two texts are the same up to a token of which neither runner is sure."""
    same = next((i for i, (a, b) in enumerate(zip(found, want, strict=False)) if a != b), min(len(found), len(want)))
    if found == want:
        return True
    return bool(gaps(ours.runner, prompt + want[:same])[1][-1] < 1e-2)


def test_greedy_texts_of_f32_models_are_those_of_our_kernels(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    path = write_model(tmp_path, TINY, "f32")
    with LLM(path, ctx=128, threads=1, kv="f32") as ours, LLM(path, ctx=128, threads=1, device="onnx-cpu") as theirs:
        for seed in range(6):
            prompt = tokens(9 + seed, seed)
            want, found = (llm.complete(prompt, temperature=0, max_tokens=40).token_ids for llm in (ours, theirs))
            assert agree(ours, theirs, list(found), list(want), prompt), seed


def divergence(path: Path, text: str) -> Any:
    """Of our kernels, with KV in f32, from onnxruntime on the same bundle."""
    config = RuntimeConfig(ctx=192, threads=1, kv="f32", outputs=OUTPUT_ROWS)
    provider = provider_of("onnx-cpu")
    assert provider
    with ExitStack() as stack:
        ours = session(stack.enter_context(Bundle.open(path)), config, None, None)
        stack.callback(ours.close)
        theirs = opened_on(provider, stack.enter_context(Bundle.open(path)), config, None, None, stack)[0]
        tokenizer = Tokenizer.open(path, {"bos_token_id": ours.model.bos_token_id})
        found = evaluate(ours, token_stream(tokenizer, text), reference=theirs, window=128).divergence
    print(found)
    return found


def test_the_divergence_between_the_two_runners(both: tuple[LLM, LLM]) -> None:
    """Mean KLD of at most 1e-3: our kernels quantise activations, onnxruntime does not."""
    text = "\f".join(both[0].generate(PROMPT, seed=seed, max_tokens=120) for seed in range(3))
    found = divergence(both[0].path, text)
    assert 0 < found.kld_mean <= 1e-3 and found.same_top > 0.97


@needs_onnxruntime
@pytest.mark.parametrize("name", ["fables-5m-silu", "fables-5m-relu", "fables-draft"])
def test_the_divergence_on_real_models(name: str, shared_data: Callable[[str], Path], tmp_path: Path) -> None:
    convert(shared_data(f"models/{name}"), tmp_path / "b", weights="q4")
    text = (Path(__file__).parent / "data" / "box_of_robbers.txt").read_text(encoding="utf-8")[:3000]
    assert 0 < divergence(tmp_path / "b", text).kld_mean <= 1e-3


@pytest.mark.parametrize("options", [
    {"temperature": 0}, {"seed": 5}, {"seed": 7, "n": 3}, {"seed": 1, "temperature": 1.3, "top_k": 0, "top_p": 0.8},
    {"beams": 4, "n": 2, "length_penalty": 0.7}, {"temperature": 0, "repetition_penalty": 1.3, "stop": "park"},
    {"temperature": 0, "logit_bias": {262: -100.0}, "logprobs": 3},
], ids=str)
def test_requests(options: dict[str, Any], both: tuple[LLM, LLM]) -> None:
    """Everything above the runner works; where nothing is close, the texts are those of our kernels."""
    ours, theirs = (llm.complete(PROMPT, max_tokens=24, **options) for llm in both)
    assert ours.finish_reason == theirs.finish_reason and len(ours.choices) == len(theirs.choices)
    assert ours.token_ids[:8] == theirs.token_ids[:8]
    assert both[1].runner.kv.pool.n_free == 4  # type: ignore[attr-defined]


def test_looked_up_guesses_do_not_change_a_text(both: tuple[LLM, LLM]) -> None:
    ids = both[0].tokenizer.encode(PROMPT + ", the cat and the dog. The cat and the dog. The cat and")
    want = both[1].complete(ids, temperature=0, max_tokens=40, speculate="off").token_ids
    done = both[1].complete(ids, temperature=0, max_tokens=40, speculate="lookup")
    assert done.token_ids == want and done.speculation and done.speculation.drafter == "lookup"
    assert done.speculation.walks and done.speculation.drafted


def test_a_draft_model_runs_on_the_same_device(tmp_path: Path) -> None:
    """Two samples, within one plan; the texts are those without guesses."""
    pytest.importorskip("onnxruntime")
    small = write_model(tmp_path, replace(TINY, num_hidden_layers=1), "int8")
    options: dict[str, Any] = {"ctx": 96, "threads": 1, "device": "onnx-cpu", "max_sequences": 2}
    request: dict[str, Any] = {"seed": 4, "n": 2, "max_tokens": 40, "ignore_eos": True}
    with LLM(write_model(tmp_path), **options, speculate="off") as llm:
        want = [choice.token_ids for choice in llm.complete(tokens(12), **request).choices]
    with LLM(write_model(tmp_path), **options, speculate="draft", draft=small) as llm:
        assert {"kv", "draft_kv", "draft_prepacked"} <= {region.name for region in llm.plan.regions}
        for _ in range(2):
            done = llm.complete(tokens(12), **request)
            assert [choice.token_ids for choice in done.choices] == want
            assert done.speculation and done.speculation.drafter == "draft" and done.speculation.drafted


def test_chats_go_on_where_they_were(both: tuple[LLM, LLM]) -> None:
    for _ in both[1].stream(PROMPT, temperature=0, max_tokens=8, reuse=True):
        pass
    stream = both[1].stream(PROMPT + ", there", temperature=0, max_tokens=4, reuse=True)
    text = "".join(stream)
    assert stream.completion.cached_tokens >= 4
    assert text == both[1].generate(PROMPT + ", there", temperature=0, max_tokens=4)


def test_prompt_caches_are_refused(both: tuple[LLM, LLM], tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"This model cannot save prompts, so .*cache was not written; leave"):
        list(both[1].stream(PROMPT, prompt_cache=tmp_path / "cache", max_tokens=4))
    (tmp_path / "cache").write_text("x")
    with pytest.raises(BundleError, match="This model cannot read the prompt cache"):
        list(both[1].stream(PROMPT, prompt_cache=tmp_path / "cache", max_tokens=4))
    assert both[1].generate(PROMPT, max_tokens=2, temperature=0)


def test_a_cancelled_stream_and_a_closed_model() -> None:
    pytest.importorskip("onnxruntime")
    with opened("onnx-cpu") as llm:
        stream = llm.stream(PROMPT, temperature=0, max_tokens=100, ignore_eos=True)
        next(stream)
        llm.cancel()
        list(stream)
        assert stream.completion.finish_reason == "cancelled" and 0 < stream.completion.completion_tokens < 90
        stream = llm.stream(PROMPT, temperature=0, max_tokens=100, ignore_eos=True)
        next(stream)
        llm.close()
        assert list(stream) == [] and stream.completion.finish_reason == "cancelled"
        with pytest.raises(RequestError, match="The model is run by onnxruntime CPUExecutionProvider, not by our own"):
            _ = llm.session


@needs_onnxruntime
@pytest.mark.parametrize(("options", "said"), [
    ({"kv": "int8"}, "--kv int8 is not offered on device onnx-cpu"),
    ({"attention": "eps:0.1"}, "has no pass attention"), ({"lazy": "keep=0.5"}, "--lazy is not offered"),
    ({"speculate": "self"}, "speculate is 'self', and device onnx-cpu runs no part of a model by itself"),
    ({"recipe": "fuse_input+early_exit:layers=2"}, "has no pass early_exit"),
    ({"device": "x"}, "device is 'x'; choose"),
    ({"device": 3}, "device is 3; it must be text"),
])
def test_llm_refuses_what_the_device_cannot_do(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said), opened("onnx-cpu", **options) if "device" not in options \
            else opened(options["device"]):
        pass


# -- the command line --------------------------------------------------------------------------------------------------


@needs_onnxruntime
def test_run(no_variables: None, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ("run", "demo", PROMPT, "-n", "8", "--temp", "0", "-c", "128", "-t", "1", "--json")
    ours, theirs = edgeinfer(*given).json, edgeinfer(*given, "--device", "onnx-cpu").json
    assert theirs["text"] == ours["text"] and theirs["isa"] == "onnxruntime CPUExecutionProvider"
    assert theirs["kv"] == "f32" and ours["kv"] == "int8"
    assert edgeinfer(*given, "--device", "onnx-cpu", "--kv", "f16").json["kv"] == "f16"
    monkeypatch.setenv("EDGEINFER_KV", "int8")
    assert edgeinfer(*given, "--device", "onnx-cpu").json["kv"] == "f32"
    told = edgeinfer(*given[:-1], "--device", "onnx-cpu", "--kv", "int8")
    assert told.code == 2 and told.sentence.startswith("--kv int8 is not offered on device onnx-cpu")
    assert edgeinfer(*given[:-1], "--device", "cuda").sentence.startswith("onnxruntime ")


@needs_onnxruntime
def test_eval_on_one_device_against_the_other(no_variables: None, tmp_path: Path) -> None:
    (tmp_path / "t").write_text("Once upon a time, there was a little girl named Lily. She loved to play outside in "
                                "the park. One day, she went to the park to play with her friends. " * 2)
    given = ("eval", "demo", "--text", tmp_path / "t", "-c", "64", "-t", "1", "--device", "onnx-cpu", "--json")
    report = edgeinfer(*given, "--reference", "demo").json
    assert 0 < report["kld_mean"] <= 1e-3
    same = edgeinfer(*given, "--reference", "demo", "--reference-device", "onnx-cpu").json
    assert same["kld_mean"] < 1e-12
    told = edgeinfer(*given[:-1], "--reference-device", "onnx-cpu")
    assert told.code == 2 and told.sentence.startswith("--reference-device onnx-cpu is about a reference; add")


@needs_onnxruntime
def test_bench(no_variables: None) -> None:
    given = ("bench", "demo", "-p", "16", "-n", "4", "-r", "1", "-t", "1", "--device", "onnx-cpu")
    out = edgeinfer(*given, "--json").json
    assert [row["test"] for row in out["rows"]] == ["pp16", "tg4"] and out["device"] == "onnx-cpu"
    assert out["rows"][1]["bytes_per_token"] > 3e6 and out["device_bytes"] == 0 and out["kv"] == "f32"
    told = edgeinfer(*given, "--profile")
    assert told.code == 2 and told.sentence.startswith("--profile is about our own kernels, and --device is onnx-cpu")


@needs_onnxruntime
def test_plan(no_variables: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What run will take, and for cuda both sides, without a GPU."""
    given = ("demo", "-c", "128", "-t", "1", "--device", "onnx-cpu", "--samples", "1")
    planned = edgeinfer("plan", *given, "--json").json
    ran = edgeinfer("run", given[0], PROMPT, "-n", "2", "--json", *given[1:]).json
    assert planned["total_bytes"] == ran["planned_bytes"] and planned["fits"] and planned["device_bytes"] == 0
    assert planned["max_ctx"] == 1024 and planned["max_sequences"] == 64
    small = edgeinfer("plan", "demo", "--device", "onnx-cpu", "--budget", "200MB", "-t", "1")
    assert small.code == 3 and "layers are not streamed on device onnx-cpu" in small.err
    seven = ("plan", "llama-2-7b", "--weights", "q4", "--device", "cuda", "--samples", "8")
    out = edgeinfer(*seven, "--json").json
    kinds = {region["name"]: region["kind"] for region in out["regions"]}
    on_device = [name for name in kinds if kinds[name] == "device"]
    assert on_device == ["weights", "prepacked", "kv", "arena", "context"]
    assert out["device_budget_bytes"] is None and out["max_sequences"] is None and out["kv"] == "f16"
    assert next(r["bytes"] for r in out["regions"] if r["name"] == "kv") == 8 * 4096 * 524288
    monkeypatch.setattr(driver, "load_driver", Driver)
    monkeypatch.setattr(driver, "load_management", Management)
    out = edgeinfer(*seven, "--json")
    assert out.code == 3 and out.json["device_budget_bytes"] == 11_000_000_000 and out.json["max_sequences"] == 1
    (fits,) = out.json["alternatives"]
    assert 512 <= fits["options"]["ctx"] < 1024 and "of the GPU's memory" in json.dumps(out.json["error"])
    assert "GPU      " in edgeinfer(*seven).out
    told = edgeinfer("plan", "demo", "--device", "cuda", "--kv", "f32")
    assert told.code == 2 and "attention in f32 does not exist there" in told.sentence


@needs_onnxruntime
def test_what_is_to_be_run_on_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole check on the CPU provider; without a GPU every part of it is said not to have run."""
    from benchmarks import gpu_check

    quick = gpu_check.QUICK.__class__((1, 2), (0, 8), (16,), (1, 3), 4, 16, 0)
    monkeypatch.setattr(gpu_check, "QUICK", quick)
    assert gpu_check.main(["--device", "onnx-cpu", "--models", "demo", "--quick", "--out", str(tmp_path / "o")]) == 0
    rows = json.loads((tmp_path / "o").read_text())
    assert [row["verdict"] for row in rows if row["wanted"]] == ["ok"] * 3
    whats = " ".join(row["what"] for row in rows)
    for part in ("f16 beside", "2 sequences at depth 8", "prompt of 16", "3 arriving", "growth"):
        assert part in whats
    assert gpu_check.main(["--out", str(tmp_path / "o")]) == 0
    assert {row["verdict"] for row in json.loads((tmp_path / "o").read_text())} == {"not run"}
    assert capsys.readouterr().out.count("which has no CUDA provider") == len(gpu_check.PARTS)
    late = ["--device", "onnx-cpu", "--models", "demo", "--quick", "--minutes", "0", "--out", str(tmp_path / "o")]
    assert gpu_check.main(late) == 0
    assert {row["found"] for row in json.loads((tmp_path / "o").read_text())} == {"out of time"}


def test_ctypes_is_what_the_driver_is_read_with() -> None:
    """The stand-in above takes the same arguments as the library."""
    assert ctypes.byref(ctypes.c_int(3))._obj.value == 3  # type: ignore[attr-defined]
