"""Groups of published rows, and the constants that are fitted to each."""

from __future__ import annotations

from dataclasses import dataclass, field

from .fit import Values
from .rows import Row

GPU_FAMILIES = {"pascal": 3.1, "volta": 2.1, "turing": 2.4, "ampere": 1.6, "ga100": 1.6, "hopper": 1.8, "ada": 1.35,
                "blackwell": 1.35}
"""Expected fixed time of a token by generation of NVIDIA's GPUs, in milliseconds."""
CORES = {"neon": 0.45, "little": 0.6, "middle": 1.8, "big": 2.6, "apple": 3.5, "avx2": 3.0, "atom": 1.5, "avx512": 3.5,
         "scalar": 0.1}
SHARES = {"arm-sbc": 0.7, "arm-phone": 0.7, "arm-laptop": 0.65, "arm-server": 0.55, "riscv-sbc": 0.5, "apple-cpu": 0.8,
          "x86-desktop": 0.8, "x86-laptop": 0.7, "x86-server": 0.6}
NVIDIA_T0 = tuple(f"{family}.t0_ms" for family in GPU_FAMILIES)
NVIDIA = {"f_w": (0.92, 10.0), "issue_bytes_per_clock": (8.0, 2.0),
          **{f"{family}.t0_ms": (ms, 1.0) for family, ms in GPU_FAMILIES.items()}}


@dataclass(frozen=True)
class Group:
    """Rows that are judged together."""

    name: str
    title: str
    rows: tuple[str, ...]
    """Groups of the file."""
    priors: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Constants that are fitted, with expected values and weights; none: those of classes.toml are used."""
    bound: float | None = None
    """Largest mean absolute error that passes."""
    target: str = ""
    note: str = ""
    ablations: dict[str, Values] = field(default_factory=dict)
    """Simpler models, by their missing part: constants that are held at these values, or are absent at 0."""
    experts: bool = False
    """Takes mixtures of experts alone; else, but for processors, all other models."""
    rest: str = ""
    """Another group, of servers, that is fitted with this one and judged apart."""

    def takes(self, row: Row) -> bool:
        """Return whether a row belongs to it."""
        return row.decodes and row.group in self.rows and (row.group == "edge" or row.experts == self.experts)


OTHERS = ("llmfit", "geerling", "jetson", "amd-other", "apple-2024", "igpu")
GROUPS = (
    Group("apple", "Apple GPUs, llama.cpp on Metal", ("apple",),
          {"f_w": (0.93, 5.0), "joined": (0.92, 5.0), "t0_ms": (5.0, 1.0), "t0_power": (1.5, 1.0)}, 0.04, "4 %",
          "t0 is the time of a token at a GPU clock of 1.4 GHz; joined is the share of the bandwidth of two dies.",
          {"two dies deliver like one": {"joined": 1.0}, "t0 is the same at every clock": {"t0_power": 1e-9}}),
    Group("nvidia", "NVIDIA GPUs, llama.cpp of 2025", ("nvidia",), NVIDIA, 0.06, "6 %",
          "The memory, and the bytes per cycle of the multiprocessors, both limit it; t0 is of a generation.",
          {"multiprocessors ask for any number of bytes": {"issue_bytes_per_clock": 1e3},
           "all generations have one t0": dict.fromkeys(NVIDIA_T0, 0.0)}),
    Group("nvidia-2024", "NVIDIA GPUs, llama.cpp of 2024", ("nvidia-2024",), NVIDIA, 0.06, "6 %",
          "The same with an older program, whose fixed times were longer.",
          {"multiprocessors ask for any number of bytes": {"issue_bytes_per_clock": 1e3}}),
    Group("amd", "AMD GPUs, llama.cpp", ("amd",),
          {"f_w": (0.9, 5.0), "t0_ms": (1.2, 1.0), "shared": (0.9, 4.0), "ROCm": (2.0, 1.0)}, 0.08, "8 %",
          "shared is the GPU's share of memory that a processor uses, too; ROCm has longer fixed times than Vulkan.",
          {"the GPU has all of the memory": {"shared": 1.0}, "both programs have one t0": {"ROCm": 1.0}}),
    Group("intel", "Intel's cards, llama.cpp on Vulkan", ("intel",),
          {"f_w": (0.8, 4.0), "alchemist.t0_ms": (11.0, 0.5), "battlemage.t0_ms": (4.5, 0.5)}, 0.2, "",
          "Few rows of one thread."),
    Group("edge", "Boards, laptops, desktops and phones: processors, many programs", ("edge",),
          {**{f"{name}.f_w": (share, 8.0) for name, share in SHARES.items()}, "t0_ms": (2.0, 2.0),
           **{f"{name}.thread_ms": (0.15, 1.0) for name in ("arm-server", "x86-server")},
           **{f"cores.{name}": (value, 4.0) for name, value in CORES.items()}, "T-MAC": (1.3, 1.0)}, 0.20,
          "20 %, median 15 %",
          "Two limits: the memory, and the bytes that each core decodes in a cycle, by kind of core. Servers, "
          "whose many threads wait for each other (thread_ms for each, of 32 layers), are fitted with these and judged "
          "apart.",
          {"cores decode any number of bytes": {f"cores.{name}": 1e3 for name in CORES}}, rest="servers"),
    Group("npu", "Neural units of Rockchip, rknn-llm", ("npu",), {"f_w": (0.8, 4.0), "t0_ms": (1.0, 0.5)}, 0.2, "",
          "Two devices."),
    Group("localscore", "GPUs with LocalScore (llamafile), means of users",
          ("localscore-nvidia", "localscore-apple", "localscore-amd"), {}, None, "",
          "Another program, and means over users; predicted with the shipped constants."),
    Group("experts", "Mixtures of experts on GPUs", (*OTHERS, "nvidia"),
          {"experts_issue": (0.5, 1.0), "cuda-consumer.experts_ms": (0.3, 3.0), "radeon.experts_ms": (2.0, 1.0),
           "recurrent_ms": (1.5, 1.0)}, 0.15, "10 %",
          "experts_issue is a factor of the bytes that a multiprocessor of NVIDIA's asks for in a cycle, experts_ms "
          "the routing of 32 layers with CUDA and, elsewhere, with Vulkan and Metal; recurrent_ms is added if layers "
          "are recurrent. The other constants are the shipped ones.",
          {"experts are read like other weights": {"experts_issue": 1.0, "cuda-consumer.experts_ms": 1e-9,
                                                   "radeon.experts_ms": 1e-9, "recurrent_ms": 1e-9},
           "all GPUs route alike": {"radeon.experts_ms": 0.29}},
          experts=True),
    Group("others", "GPUs with ollama, llmfit, TinyChat and others", OTHERS, {}, None, "",
          "Predicted with the shipped constants."),
)
SERVERS = ("x86-server", "arm-server")
