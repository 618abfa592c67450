"""A holder of a stage on Kafka, as a program: it commits epochs and may die in a transaction, or sleeps until another has come."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import headwater as hw
from headwater.model.errors import Fenced
from headwater.testing.contracts.stages import marker, rows

EPOCHS = 6


def commit(url: str, killed_in: int) -> None:
    """Goes on with the last batch, as Spark does; may die when its transaction is begun and not committed."""
    with hw.open_log(url) as log:
        stage = log.stage("s")
        start = 0 if stage.last is None else stage.last.epoch
        for epoch in range(start, EPOCHS):
            if epoch == killed_in:
                store: Any = log.store
                producer = store._stages.holder("s", stage.number)._producer
                producer.begin_transaction()
                producer.produce(f"{store._prefix}b", b'{"n": -1, "k": "lost"}', b"lost", 0)
                producer.flush(5)
                os.kill(os.getpid(), signal.SIGKILL)
            stage.commit(marker(epoch), [("b", rows(epoch))])


def sleep(url: str) -> None:
    """Is stopped between two batches."""
    with hw.open_log(url) as log:
        stage = log.stage("s")
        stage.commit(marker(0), [("b", rows(0))])
        store: Any = log.store
        records = store._stages
        holder = records.holder("s", stage.number)
        print("asleep", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
        try:
            holder.commit([records.parcel("s", marker(9))])
        except Fenced:
            print("fenced by the brokers", flush=True)
        try:
            stage.commit(marker(1), [("b", rows(1))])
        except Fenced:
            print("fenced by the number", flush=True)


if __name__ == "__main__":
    if sys.argv[2] == "commit":
        commit(sys.argv[1], int(sys.argv[3]))
    else:
        sleep(sys.argv[1])
