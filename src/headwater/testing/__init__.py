"""What Headwater is tested with, shipped so that users test their applications with it."""

from headwater.testing.app_test import CRASH, AppTest, Crash
from headwater.testing.app_transform import transform
from headwater.testing.crashdisk import CrashingDisk, RandomCrashDisk, RecordingDisk, SlowSyncDisk
from headwater.testing.simdisk import Fault, SimDisk
from headwater.testing.simprocess import Crashed, SimProcess, WouldDeadlock

__all__ = [
    "CRASH",
    "AppTest",
    "Crash",
    "Crashed",
    "CrashingDisk",
    "Fault",
    "RandomCrashDisk",
    "RecordingDisk",
    "SimDisk",
    "SimProcess",
    "SlowSyncDisk",
    "WouldDeadlock",
    "transform",
]
