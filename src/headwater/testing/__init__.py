"""What Headwater is tested with, shipped so that users test their applications with it."""

from headwater.testing.crashdisk import CrashingDisk, RandomCrashDisk, RecordingDisk, SlowSyncDisk
from headwater.testing.simdisk import Fault, SimDisk
from headwater.testing.simprocess import Crashed, SimProcess, WouldDeadlock

__all__ = [
    "Crashed",
    "CrashingDisk",
    "Fault",
    "RandomCrashDisk",
    "RecordingDisk",
    "SimDisk",
    "SimProcess",
    "SlowSyncDisk",
    "WouldDeadlock",
]
