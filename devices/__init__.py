"""edgeinfer.devices: what a machine can do.

This room is for device profiles (memory, bandwidth, instruction sets), the probe that measures this machine, bandwidth
curves of DRAM and flash, and the estimator of tokens per second over a plain traffic record. It knows no model and may
import edgeinfer.errors and edgeinfer.config only. Nothing is implemented yet.
"""

__all__: list[str] = []
