"""edgeinfer.backends: other executors of the same graph.

`onnx/` lowers it to ONNX with onnxruntime's operators and writes files that others can open (docs/onnx.md). Its
packages, onnx and onnxruntime, come with the extras `onnx` and `gpu` and are imported where they are needed.
"""

from typing import TYPE_CHECKING

from edgeinfer.lazy import lazily

if TYPE_CHECKING:
    from .onnx.export import ExportReport, export
    from .onnx.flavour import ATTENTIONS, DTYPES, QK_NORMS, TARGETS, Flavour
    from .onnx.packages import check_wheels, import_onnxruntime
    from .onnx.verify import Verified, is_export, verify_export

__all__ = ["ATTENTIONS", "DTYPES", "QK_NORMS", "TARGETS", "ExportReport", "Flavour", "Verified", "check_wheels",
           "export", "import_onnxruntime", "is_export", "verify_export"]
__getattr__ = lazily(__name__, {
    "onnx.export": "ExportReport export",
    "onnx.flavour": "ATTENTIONS DTYPES QK_NORMS TARGETS Flavour",
    "onnx.packages": "check_wheels import_onnxruntime",
    "onnx.verify": "Verified is_export verify_export",
})
