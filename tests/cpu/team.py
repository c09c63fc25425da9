"""Memory of several CPU devices behind one multicast address."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from drvkit.cpu import driver as cpu
from drvkit.driver import open_driver

NBYTES = 2 << 20
_FD = cpu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


class Team:
    """Devices 0 to ``count - 1``. Where multicast is not opted in to, there is none.

    Args:
        own: those of this process; by default all.
        fd: what another process has exported of the same.
        bound: their memory is bound from the beginning.

    Attributes:
        address: the multicast address.
        views: where the memory of each device is.
    """

    def __init__(
        self, count: int, *, own: Iterable[int] | None = None, fd: int | None = None, bound: bool = True
    ) -> None:
        self.driver: Any = open_driver("cpu")
        devices = range(count) if own is None else own
        if fd is None:
            wanted = cpu.CUmulticastObjectProp()
            wanted.numDevices, wanted.size, wanted.handleTypes = count, NBYTES, int(_FD)
            self._handle = self.driver.create_multicast(wanted, enable=True)
        else:
            self._handle = self.driver.cuMemImportFromShareableHandle(fd, _FD)
        for device in devices:
            self.driver.cuMulticastAddDevice(self._handle, device)
        self._parts = {device: self._part(device) for device in devices}
        self.views = [self._mapped(part) for part in self._parts.values()]
        self.address = self._mapped(self._handle)
        for device in self._parts if bound else ():
            self.bind(device)

    def _part(self, device: int) -> Any:
        wanted = cpu.CUmemAllocationProp()
        wanted.type = cpu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        wanted.location.type = cpu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        wanted.location.id, wanted.requestedHandleTypes = device, _FD
        return self.driver.cuMemCreate(NBYTES, wanted, 0)

    def _mapped(self, handle: Any) -> int:
        address = self.driver.cuMemAddressReserve(NBYTES, 0, 0, 0)
        self.driver.cuMemMap(address, NBYTES, 0, handle, 0)
        access = cpu.CUmemAccessDesc()
        access.location.type, access.location.id = cpu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, 0
        access.flags = cpu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self.driver.cuMemSetAccess(address, NBYTES, [access], 1)
        return int(address)

    def export(self) -> int:
        """A file descriptor for other processes."""
        return int(self.driver.cuMemExportToShareableHandle(self._handle, _FD, 0))

    def bind(self, device: int) -> None:
        """Waits until all devices have been added."""
        self.driver.cuMulticastBindMem(self._handle, 0, self._parts[device], 0, NBYTES, 0)

    def unbind(self, device: int) -> None:
        self.driver.cuMulticastUnbind(self._handle, device, 0, NBYTES)

    def close(self) -> None:
        for address in (self.address, *self.views):
            self.driver.cuMemUnmap(address, NBYTES)
            self.driver.cuMemAddressFree(address, NBYTES)
        for handle in (self._handle, *self._parts.values()):
            self.driver.cuMemRelease(handle)
