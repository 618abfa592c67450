"""A draw: a random number that is a function of seed, purpose and event number, for whole arrays of event numbers at once.

There is no state that would have to be carried from one event to the next, so any slice of the events can be made alone, in any order
and in any process. The mixing is splitmix64's (public domain): counter in, 64 well-mixed bits out, in wrapping unsigned arithmetic that
is the same on every machine.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Numbers = npt.NDArray[np.int64]

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_HALF = np.uint64(32)
_LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz ", np.uint8)


class Draws:
    """The draws of one seed. Purposes are names: draws of different names are independent of each other."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def below(self, bound: int | Numbers, purpose: str, numbers: Numbers) -> Numbers:
        """For each event number a whole number from 0 to below the bound, which is less than 2^32 and may differ from event to event."""
        drawn = self._bits(purpose, numbers)
        drawn >>= _HALF
        drawn *= np.asarray(bound, np.uint64)
        drawn >>= _HALF
        return drawn.view(np.int64)

    def chance(self, share: float, purpose: str, numbers: Numbers) -> npt.NDArray[np.bool_]:
        """True for that share of the event numbers."""
        return self.below(1 << 31, purpose, numbers) < round(share * (1 << 31))

    def words(self, count: int, shortest: int, longest: int, purpose: str, *, spaces: bool = False) -> pa.StringArray:
        """So many random strings of small letters, to be taken from."""
        spread = longest - shortest + 1
        lengths = shortest + self.below(spread, f"{purpose}: lengths", np.arange(count))
        ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        letters = self.below(27 if spaces else 26, f"{purpose}: letters", np.arange(ends[-1]))
        return pa.StringArray.from_buffers(count, pa.py_buffer(ends), pa.py_buffer(_LETTERS[letters]))

    def _bits(self, purpose: str, numbers: Numbers) -> npt.NDArray[np.uint64]:
        key = hashlib.blake2b(f"{self._seed}: {purpose}".encode(), digest_size=8).digest()
        bits = numbers.view(np.uint64) * _STEP
        bits += np.frombuffer(key, "<u8")
        for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
            bits ^= bits >> np.uint64(shift)
            bits *= factor
        bits ^= bits >> np.uint64(31)
        return bits
