"""What Headwater is tested with, shipped so that users test their applications with it."""

from headwater.testing.app_test import CRASH, AppTest, Crash
from headwater.testing.crash.disk import CrashingDisk, RandomCrashDisk, RecordingDisk, SlowSyncDisk
from headwater.testing.simulation.disk import Fault, SimDisk
from headwater.testing.simulation.process import Crashed, SimProcess, WouldDeadlock
from headwater.testing.transform import transform

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
