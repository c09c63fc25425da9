"""What can go wrong on the device, with the code that the driver gives for it and a report for people."""

from __future__ import annotations

__all__ = ["Fault", "ImageError"]


class Fault(Exception):  # noqa: N818 - what the driver calls it
    """Work on the device failed.

    Attributes:
        code: the driver's name of the result, such as ``CUDA_ERROR_ILLEGAL_ADDRESS``.
        told: somebody was given it.
    """

    def __init__(self, code: str, report: str) -> None:
        self.code = code
        self.told = False
        super().__init__(report)


class ImageError(Exception):
    """An image cannot be loaded.

    Attributes:
        code: the driver's name of the result, such as ``CUDA_ERROR_INVALID_PTX``.
    """

    def __init__(self, code: str, why: str) -> None:
        self.code = code
        super().__init__(why)
