"""edgeinfer.backends: other executors of the same graph.

`onnx/` lowers it to ONNX with onnxruntime's operators, writes files that others can open, and runs it on onnxruntime's
providers (docs/explanation/onnx.md). Its packages, onnx and onnxruntime, come with the extras `onnx` and `gpu` and
are imported where they are needed.
"""

from typing import TYPE_CHECKING

from edgeinfer.base.lazy_import import lazily

if TYPE_CHECKING:
    from .onnx.devices import PROVIDERS, Provider, provider_of, why_not
    from .onnx.driver import gpu_free_bytes, read_gpu
    from .onnx.export import ExportReport, export
    from .onnx.fitting import (
        check_draft,
        device_fits,
        draft_planner,
        fill_device,
        fit_device,
        longest_ctx,
        memory_of,
        most_sequences,
        smaller,
    )
    from .onnx.flavour import Flavour
    from .onnx.known_sizes import known_of, known_planner
    from .onnx.on_card import OnCard
    from .onnx.packages import check_wheels, import_onnxruntime
    from .onnx.planning import DevicePlanner, device_planner
    from .onnx.runner import OnnxRunner
    from .onnx.sizes import Sizes
    from .onnx.states import UNTRIED_STATES
    from .onnx.verify import is_export, verify_export

__all__ = ["PROVIDERS", "UNTRIED_STATES", "DevicePlanner", "ExportReport", "Flavour", "OnCard", "OnnxRunner",
           "Provider", "Sizes", "check_draft", "check_wheels", "device_fits", "device_planner", "draft_planner",
           "export", "fill_device", "fit_device", "gpu_free_bytes", "import_onnxruntime", "is_export", "known_of",
           "known_planner", "longest_ctx", "memory_of", "most_sequences", "provider_of", "read_gpu", "smaller",
           "verify_export", "why_not"]
__getattr__ = lazily(__name__, {
    "onnx.devices": "PROVIDERS Provider provider_of why_not",
    "onnx.driver": "gpu_free_bytes read_gpu",
    "onnx.export": "ExportReport export",
    "onnx.flavour": "Flavour",
    "onnx.packages": "check_wheels import_onnxruntime",
    "onnx.fitting": "check_draft device_fits draft_planner fill_device fit_device longest_ctx memory_of most_sequences "
                    "smaller",
    "onnx.known_sizes": "known_of known_planner",
    "onnx.on_card": "OnCard",
    "onnx.planning": "DevicePlanner device_planner",
    "onnx.runner": "OnnxRunner",
    "onnx.sizes": "Sizes",
    "onnx.states": "UNTRIED_STATES",
    "onnx.verify": "is_export verify_export",
})
