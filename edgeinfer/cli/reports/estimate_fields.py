"""Fields of the JSON object of `edgeinfer estimate`."""

from __future__ import annotations

from ... import registry
from . import decision, neurons, windows
from .drafting import FIELD as SPECULATION_FIELD
from .energy import FIELD as ENERGY_FIELD
from .explain import FIELD as EXPLAIN_FIELD
from .storage import FIELD as STORAGE_FIELD
from .storage import SKIPPING_FIELD
from .users import FIELD as USERS_FIELD
from .ways import FIELD as WAYS_FIELD

JSON_FIELDS = {
    "estimate": {
        "model": "as given",
        "device": "name of the profile; with `device_title`, `device_class`, `bandwidth_gbs`",
        "ctx": "context in tokens; with `prompt`, `kv`, `weights`, `group_size`",
        "sequences": "that decode together, each with a context of its own; tokens per second are those of all",
        "decode_tok_per_s": "tokens per second at the end of the context",
        "decode_empty_tok_per_s": "tokens per second in an empty context, as published speeds are mostly measured",
        "low": "with `high` the band that holds 80 % of measurements",
        "ceiling_tok_per_s": "pure bandwidth: the bits of their types, without scales, for every weight that a token "
        "uses and every key and value that it sees, no other time; with --all-devices in an empty context and at the "
        "vendor's peak of the memory, so that no speed of the row is above",
        "program": "whose speed it is; with `unit` (cpu, gpu, npu) and `unit_words`; edgeinfer itself uses processors",
        "others": "per other program, or version of the device, of the sources: `name`, `decode_tok_per_s`; the band "
        "reaches to them",
        "remark": "the consequence, if edgeinfer cannot use the unit; else empty",
        "accepted": "tokens that a pass yields; with `draft_cost`, the share of a token's time that drafting takes "
        "for a pass, and `draft_cost_assumed`",
        "prefill_tok_per_s": "of the prompt in an empty context; null where the device's peak is not known",
        "prefill_low": "with `prefill_high` its band",
        "ttft_ms": "time of the prompt, without loading; null where the device's peak is not known",
        "bytes_per_token": "read from memory for one token at the end of the context",
        "weight_bytes": "of all weights with their scales, as the device holds them; `bundle_bytes` as a bundle has "
        "them, and `weight_bytes_read` those that a token reads",
        "notes": "remarks on the lengths: on a context that the model does not have, and where the context cuts an "
        "answer off",
        "kv_bytes": "keys and values of the whole context, with their scales, as far as windows let layers keep them",
        "windows": windows.FIELD,
        "kv_read": "of a token at the end of the context: `key_bytes`, `value_bytes`; `chosen`, whether rows of V are "
        "selected; `crossover_depth`, the depth from which that is faster, or null where it is not up to "
        "`longest_depth`; `assumed`, the assumption about scores",
        "pure": "figures without scales: `weight_bytes` (4 bits a weight), `kv_bytes` (a byte each), `parameters`",
        "bits_per_weight": "stored bits with scales, over all weights",
        "terms_ms": "milliseconds of one token, and of the prompt, by cause",
        "basis": "'this machine, calibrated', 'class NAME' or 'unknown'; `error` and `error_source` of the band",
        "file_types": "of a GGUF file or a quantised checkpoint: bytes by type, else null; `file_note` explains "
        "the figures",
        "fits": "as in `plan`: whether a run fits the device's memory, `memory_bytes`, of which the system keeps a "
        "part, and of which the run may take `budget_bytes` (`limited`, if --budget set it), on cards `device_bytes`, "
        "where --budget limits the process beside it, `process_budget_bytes`, "
        "with weights read from storage where `run` does so automatically, as `mode` "
        "says; `total_bytes` is all that it takes (`unstreamed_bytes` with all weights in memory), of the process "
        "beside a card, and `run_kv` its type of the KV cache",
        "contexts": "per context `depth`, `decode_tok_per_s`, `low`, `high`",
        "break_even": "sparse FFN: `row_bytes`, `efficiency`, `sparsity` from which on it is faster, and by sparsity "
        "`smallest_row_bytes` and `relative_time`; null where scattered reads are not known, "
        "and on cards, where onnxruntime skips no neurons",
        "neurons": neurons.FIELD,
        "answer": "with -n: `tokens`, `ttft_ms`, `tpot_ms` in the middle of the answer, `total_ms` = TTFT + "
        "TPOT (n - 1); else null",
        "ways": WAYS_FIELD + "; then there are no other fields",
        "explain": EXPLAIN_FIELD,
        "energy": ENERGY_FIELD + "; `energy_asked` says whether --energy was given",
        "users": USERS_FIELD,
        "storage": STORAGE_FIELD + "; `storage_named` says whether --storage set it",
        "skipping": SKIPPING_FIELD,
        "speculation": SPECULATION_FIELD,
        **registry.fields("estimate"),
        "decision": decision.FIELD + "; the estimate is of that way with all weights in memory; null for devices",
        "devices": "with --all-devices, instead of the device's fields: per device the same fields without `contexts`",
    },
}
"""Fields of the JSON object, by command."""
