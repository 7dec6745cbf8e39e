"""Speed of a model, beside the limits of the machine measured in the same minutes. Nothing here prints.

Rows carry llama-bench's names: ``pp512`` processes a prompt of 512 tokens, ``tg128`` generates 128 tokens one by one,
and ``tg128 @ d4096`` does so after 4096 tokens of context.
"""

from typing import TYPE_CHECKING

from edgeinfer.base.lazy_import import lazily

if TYPE_CHECKING:
    from .calibration import CALM_SHARE, SHAPES, Lengths, Shape
    from .machine import ProbeRequest, probe_machine
    from .neurons import FfnBench, FfnShape, seconds
    from .probe import CHUNK_SIZES, MachineProbe, thread_counts
    from .profile import operation_name
    from .repetitions import measure, token_ids
    from .results import Case, Measurement, OperationTime, Profile, Row, make_cases, needed_ctx
    from .served import measure_served
    from .serving import Load, RequestLength, make_lengths, measure_serving, parse_goodput, read_lengths
    from .speculation import COUNTS, REPLAYED_TOKENS, Replayed, SpeculationBench, measure_speculation
    from .startup import first_token_ms, prompt_of
    from .storage import StorageProbe
    from .traffic import bytes_per_token, operations_per_token

__all__ = ["CALM_SHARE", "CHUNK_SIZES", "COUNTS", "REPLAYED_TOKENS", "SHAPES", "Case", "FfnBench", "FfnShape",
           "Lengths", "Load", "MachineProbe", "Measurement", "OperationTime", "ProbeRequest", "Profile", "Replayed",
           "RequestLength", "Row", "Shape", "SpeculationBench", "StorageProbe", "bytes_per_token", "first_token_ms",
           "make_cases", "make_lengths", "measure", "measure_served", "measure_serving", "measure_speculation",
           "needed_ctx", "operation_name", "operations_per_token", "parse_goodput", "probe_machine", "prompt_of",
           "read_lengths", "seconds", "thread_counts", "token_ids"]
__getattr__ = lazily(__name__, {
    "calibration": "CALM_SHARE SHAPES Lengths Shape", "probe": "CHUNK_SIZES MachineProbe thread_counts",
    "neurons": "FfnBench FfnShape seconds",
    "machine": "ProbeRequest probe_machine", "storage": "StorageProbe",
    "repetitions": "measure token_ids", "profile": "operation_name",
    "results": "Measurement OperationTime Profile Row Case make_cases needed_ctx",
    "served": "measure_served",
    "serving": "Load RequestLength make_lengths measure_serving parse_goodput read_lengths",
    "speculation": "COUNTS REPLAYED_TOKENS Replayed SpeculationBench measure_speculation",
    "startup": "first_token_ms prompt_of", "traffic": "bytes_per_token operations_per_token",
})
