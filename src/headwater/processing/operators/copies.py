"""Copies: rows that every partition of an operator's state gets, such as the changes of searches and of rules.

Each row is exploded to one for each partition, under a number whose hash belongs to it (see decision 0025).
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from headwater.processing.operators.operator import Input, state_partitions
from headwater.processing.spark.hashing import hashes_of

_COPY = "_copy"


def copied(rows: DataFrame) -> Input:
    """Rows as an input of which every state partition gets all."""
    # Numbers in a literal are INT, which hashes otherwise than the BIGINT that `owning_keys` hashes.
    numbers = F.lit(owning_keys(state_partitions())).cast("array<bigint>")
    return Input(rows.withColumn(_COPY, F.explode(numbers)), [_COPY])


def owning_keys(partitions: int) -> list[int]:
    """For each state partition a number whose hash belongs to it."""
    numbers = np.arange(64 * partitions)
    owner = np.mod(hashes_of([pa.array(numbers)])[0], partitions)
    return [int(np.flatnonzero(owner == partition)[0]) for partition in range(partitions)]
