"""The random numbers of a job."""

from __future__ import annotations

from hashlib import blake2b

XTC = b"xtc"
"""Purpose of the random number that decides whether XTC is applied."""


class UniformNumbers:
    """Random numbers that depend only on a seed, a position and a purpose.

    Therefore an attempt that resumes a job draws with the same random numbers as an uninterrupted attempt.

    Args:
        seed: The seed, at least 0 and below 2**64.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed.to_bytes(8, "little")

    def at(self, position: int, purpose: bytes = b"") -> float:
        """Return a uniform random number in [0, 1).

        The number is the upper 53 bits of the 64-bit BLAKE2b hash of the position, with the seed as the key and the
        purpose as the personalization, divided by 2**53.
        """
        digest = blake2b(position.to_bytes(8, "little"), digest_size=8, key=self._seed, person=purpose).digest()
        return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
