"""Cost of scattered reads: the share of the bandwidth by chunk size, and the break-even of a sparse network.

A sparse feed-forward network reads `active_share` of its rows, each of `row_bytes`, at `e` of the sequential bandwidth.
It is faster than the dense one if active_share / e < 1, that is if the share of zero rows exceeds 1 - e. The time of
predicting which rows are needed is not counted here.
"""

from __future__ import annotations

from edgeinfer.base.dataclass import dataclass
from edgeinfer.errors import UsageError

from .profile import DeviceProfile


@dataclass(frozen=True)
class BreakEven:
    """Point at which a sparse feed-forward network is as fast as a dense one on a device."""

    row_bytes: float
    efficiency: float
    """Bandwidth of scattered rows of this size as a share of the sequential bandwidth, at most 1."""

    @property
    def sparsity(self) -> float:
        """Share of zero rows from which on the sparse network is faster."""
        return 1 - self.efficiency

    def relative_time(self, sparsity: float) -> float:
        """Time of the sparse network as a multiple of the dense one's; above 1 it is slower.

        Raises
        ------
        UsageError
            The sparsity is not from 0 to 1.
        """
        if not 0 <= sparsity <= 1:
            raise UsageError(f"A sparsity of {sparsity} is impossible; it is the share of zero rows, from 0 to 1.")
        return (1 - sparsity) / self.efficiency


def break_even(profile: DeviceProfile, row_bytes: float) -> BreakEven:
    """Return from which sparsity on skipping rows of `row_bytes` contiguous bytes pays on a device.

    Raises
    ------
    UsageError
        No bytes, or the device's random reads are not known.
    """
    return BreakEven(row_bytes, memory_efficiency(profile, row_bytes))


def smallest_row(profile: DeviceProfile, sparsity: float) -> int | None:
    """Return the smallest measured chunk from which on a sparsity pays; None if no chunk of the curve does.

    Raises
    ------
    UsageError
        The device's random reads are not known, or the sparsity is impossible.
    """
    sizes = [size for size, _ in profile.memory_random.points] if profile.memory_random else [64]
    pays = [break_even(profile, size).relative_time(sparsity) < 1 for size in sizes]
    worst = max((i for i, good in enumerate(pays) if not good), default=-1)
    return sizes[worst + 1] if worst + 1 < len(sizes) else None


def memory_efficiency(profile: DeviceProfile, chunk_bytes: float) -> float:
    """Bandwidth of scattered chunks of memory as a share of the sequential one, at most 1.

    Raises `UsageError`: no bytes, or the device has no curve of random reads.
    """
    if not chunk_bytes > 0:
        raise UsageError(f"Rows of {chunk_bytes} bytes are impossible; a row has at least 1 byte.")
    if profile.memory_random is None:
        raise UsageError(f"How {profile.name} reads scattered rows is not known, so a sparse model cannot be "
                         "estimated; measure this machine with 'edgeinfer devices --probe'.")
    return min(profile.memory_random.at(max(1, round(chunk_bytes))) / profile.bandwidth_gbs, 1.0)


def storage_gbs(profile: DeviceProfile, chunk_bytes: float) -> float:
    """GB/s of reads of this size from storage; 0 bytes stand for one long read.

    Raises `UsageError`: the device's storage is not known.
    """
    if chunk_bytes and profile.storage_random is not None:
        return profile.storage_random.at(max(1, round(chunk_bytes)))
    if not chunk_bytes and profile.storage_sequential_gbs:
        return profile.storage_sequential_gbs
    kind = "scattered reads" if chunk_bytes else "long reads"
    raise UsageError(f"How fast {profile.name} does {kind} from storage is not known, so offload cannot be estimated; "
                     "measure this machine with 'edgeinfer devices --probe'.")
