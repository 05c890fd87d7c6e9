"""Frames of the next clip, read while the device still works on this one.

A step of training at 25k tokens is a prefill of the target and two passes of a drafter, a second or
two; reading 128 frames of a long video takes as long, on a CPU that would otherwise wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor


class ReadAhead:
    """Frames of a clip by its id; one clip of those expected is read ahead, in a thread.

    Args:
        read: frames (T, H, W, 3) uint8 of a clip by its id; called by one thread alone.
    """

    def __init__(self, read: Callable[[str], Tensor]) -> None:
        self._read = read
        self._pool = ThreadPoolExecutor(1, "frames")
        self._coming: deque[str] = deque()
        self._ahead: tuple[str, Future[Tensor]] | None = None

    def expect(self, clip_ids: Sequence[str]) -> None:
        """Which clips will be asked for, in this order; replaces what was expected before."""
        self._coming = deque(clip_ids)

    def __call__(self, clip_id: str) -> Tensor:
        """The frames of a clip, expected or not.

        Raises:
            InputError: of `read`, for this clip; a clip read ahead raises when it is asked for.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead[0] != clip_id:
            ahead = clip_id, self._pool.submit(self._read, clip_id)
        frames = ahead[1].result()
        while clip_id in self._coming and self._coming.popleft() != clip_id:
            pass
        if self._coming:
            self._ahead = self._coming[0], self._pool.submit(self._read, self._coming[0])
        return frames

    def close(self) -> None:
        """Waits for a read that has begun, so that its reader can be closed."""
        self._pool.shutdown(cancel_futures=True)
