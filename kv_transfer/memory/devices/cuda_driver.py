"""The CUDA driver API, as much of it as moving KV takes, through ctypes.

`libcuda.so.1` belongs to the driver, so it is on every host that has a GPU; it needs neither torch
nor the CUDA toolkit. Every call's result is checked: `CudaError` names the call and what the driver
says. Calls apply to the context that is current in the calling thread.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_char, c_char_p, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from functools import cache
from typing import Any

from kv_transfer.memory.devices.cuda_copies import CudaCopies
from kv_transfer.memory.devices.device import DeviceError

_SUCCESS = 0
_NOT_READY = 600
_CONTEXT_IS_ACTIVE = 708

IPC_HANDLE_BYTES = 64
UUID_BYTES = 16
_PCI_TEXT_BYTES = 32

_HOST_REGISTER_PORTABLE, _HOST_REGISTER_DEVICEMAP = 1, 2
_IPC_LAZY_PEER_ACCESS = 1
_P2P_NATIVE_ATOMICS = 3
_STREAM_NON_BLOCKING = 1
_EVENT_DISABLE_TIMING = 2
_CONTEXT_BLOCKING_SYNC = 4
_MEMORY_UNIFIED = 4
_WAIT_UNTIL_AT_LEAST = 0


class CudaError(DeviceError):
    """A call of the CUDA driver failed."""

    def __init__(self, call: str, code: int, meaning: str) -> None:
        super().__init__(f"{call} failed with CUDA error {code}: {meaning}")
        self.call = call
        self.code = code


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", c_char * IPC_HANDLE_BYTES),)


class _Uuid(ctypes.Structure):
    _fields_ = (("bytes", c_char * UUID_BYTES),)


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (
        ("source_x", c_size_t),
        ("source_y", c_size_t),
        ("source_kind", c_uint),
        ("source_host", c_void_p),
        ("source", c_uint64),
        ("source_array", c_void_p),
        ("source_pitch", c_size_t),
        ("target_x", c_size_t),
        ("target_y", c_size_t),
        ("target_kind", c_uint),
        ("target_host", c_void_p),
        ("target", c_uint64),
        ("target_array", c_void_p),
        ("target_pitch", c_size_t),
        ("row_bytes", c_size_t),
        ("num_rows", c_size_t),
    )


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (c_void_p,),
    "cuDeviceGetCount": (c_void_p,),
    "cuDeviceGet": (c_void_p, c_int),
    "cuDeviceGetUuid_v2": (c_void_p, c_int),
    "cuDeviceGetPCIBusId": (c_char_p, c_int, c_int),
    "cuDeviceGetP2PAttribute": (c_void_p, c_uint, c_int, c_int),
    "cuDevicePrimaryCtxSetFlags_v2": (c_int, c_uint),
    "cuDevicePrimaryCtxRetain": (c_void_p, c_int),
    "cuCtxSetCurrent": (c_void_p,),
    "cuCtxGetDevice": (c_void_p,),
    "cuCtxSynchronize": (),
    "cuMemAlloc_v2": (c_void_p, c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemGetAddressRange_v2": (c_void_p, c_void_p, c_uint64),
    "cuIpcGetMemHandle": (c_void_p, c_uint64),
    "cuIpcOpenMemHandle_v2": (c_void_p, _IpcHandle, c_uint),
    "cuIpcCloseMemHandle": (c_uint64,),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuMemHostGetDevicePointer_v2": (c_void_p, c_void_p, c_uint),
    "cuStreamCreate": (c_void_p, c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamWriteValue32_v2": (c_void_p, c_uint64, c_uint32, c_uint),
    "cuStreamWaitValue32_v2": (c_void_p, c_uint64, c_uint32, c_uint),
    "cuEventCreate": (c_void_p, c_uint),
    "cuEventDestroy_v2": (c_void_p,),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuDeviceTotalMem_v2": (c_void_p, c_int),
    "cuEventQuery": (c_void_p,),
    "cuEventSynchronize": (c_void_p,),
    "cuMemcpy2DAsync_v2": (c_void_p, c_void_p),
}


class CudaDriver:
    """Streams, events and contexts are the driver's own handles, addresses are plain numbers."""

    def __init__(self) -> None:
        """Raises `DeviceError` on a host without a driver, `CudaError` without a usable GPU."""
        try:
            library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise DeviceError(
                f"the CUDA driver cannot be loaded ({error}); is this a GPU host?"
            ) from error
        self._library = library
        self._calls: dict[str, Any] = {}
        for name, arguments in _SIGNATURES.items():
            try:
                call = getattr(library, name)
            except AttributeError:
                raise DeviceError(
                    f"the CUDA driver has no {name}; it must be of CUDA 12 or newer"
                ) from None
            call.argtypes, call.restype = arguments, c_int
            self._calls[name] = call
        self._write_value = self._calls["cuStreamWriteValue32_v2"]
        self._query = self._calls["cuEventQuery"]
        self.copies = CudaCopies(library, self._check)
        self._do("cuInit", 0)

    def _do(self, name: str, *arguments: Any) -> None:
        self._check(name, self._calls[name](*arguments))

    def _check(self, name: str, code: int) -> None:
        if code != _SUCCESS:
            raise self._error(name, code)

    def _error(self, name: str, code: int) -> CudaError:
        text = ctypes.c_char_p()
        self._library.cuGetErrorString(c_int(code), byref(text))
        return CudaError(name, code, (text.value or b"unknown").decode())

    # Devices and contexts ---------------------------------------------------------------------

    def version(self) -> int:
        """Returns 1000 * major + 10 * minor."""
        number = c_int()
        self._do("cuDriverGetVersion", byref(number))
        return number.value

    def device_uuids(self) -> list[bytes]:
        """Returns UUIDs of the devices that this process may see, in order."""
        count = c_int()
        self._do("cuDeviceGetCount", byref(count))
        return [self._uuid(self._device(index)) for index in range(count.value)]

    def total_memory(self, index: int) -> int:
        """Returns the bytes of a device's memory."""
        size = c_size_t()
        self._do("cuDeviceTotalMem_v2", byref(size), self._device(index))
        return size.value

    def current_uuid(self) -> bytes:
        """Returns the UUID of the device whose context is current."""
        device = c_int()
        self._do("cuCtxGetDevice", byref(device))
        return self._uuid(device.value)

    def pci_address(self, index: int) -> str:
        """Returns the address of a device as /sys names it: 0000:17:00.0."""
        text = ctypes.create_string_buffer(_PCI_TEXT_BYTES)
        self._do("cuDeviceGetPCIBusId", text, _PCI_TEXT_BYTES, self._device(index))
        domain, _, rest = text.value.decode().lower().partition(":")
        return f"{domain[-4:]}:{rest}"

    def has_native_atomics(self, index: int, peer: int) -> bool:
        """Returns whether atomic operations of one device on another's memory are such on the link
        between them, as on NVLink."""
        value = c_int()
        devices = self._device(index), self._device(peer)
        self._do("cuDeviceGetP2PAttribute", byref(value), _P2P_NATIVE_ATOMICS, *devices)
        return value.value != 0

    def use_device(self, index: int) -> None:
        """Makes the primary context of this device current. Waiting threads sleep."""
        device = self._device(index)
        code = self._calls["cuDevicePrimaryCtxSetFlags_v2"](device, _CONTEXT_BLOCKING_SYNC)
        if code not in (_SUCCESS, _CONTEXT_IS_ACTIVE):
            raise self._error("cuDevicePrimaryCtxSetFlags", code)
        context = c_void_p()
        self._do("cuDevicePrimaryCtxRetain", byref(context), device)
        self._do("cuCtxSetCurrent", context)

    def synchronize_context(self) -> None:
        """Waits for all work of this process on the device."""
        self._do("cuCtxSynchronize")

    def _device(self, index: int) -> int:
        device = c_int()
        self._do("cuDeviceGet", byref(device), index)
        return device.value

    def _uuid(self, device: int) -> bytes:
        uuid = _Uuid()
        self._do("cuDeviceGetUuid_v2", byref(uuid), device)
        return bytes(uuid)

    # Memory -----------------------------------------------------------------------------------

    def allocate(self, num_bytes: int) -> int:
        """Returns the address of new memory of the current device. Its contents are not defined."""
        address = c_uint64()
        self._do("cuMemAlloc_v2", byref(address), num_bytes)
        return address.value

    def free(self, address: int) -> None:
        """No copy may use the memory any more."""
        self._do("cuMemFree_v2", address)

    def allocation_of(self, address: int) -> tuple[int, int]:
        """Returns (start, bytes) of the allocation that `address` lies in."""
        start, size = c_uint64(), c_size_t()
        self._do("cuMemGetAddressRange_v2", byref(start), byref(size), address)
        return start.value, size.value

    def ipc_handle(self, address: int) -> bytes:
        """Returns the handle of a whole allocation, for other processes of this host."""
        handle = _IpcHandle()
        self._do("cuIpcGetMemHandle", byref(handle), address)
        return bytes(handle)

    def open_ipc(self, handle: bytes) -> int:
        """Address of another process's allocation. Peer GPUs are reached directly."""
        address = c_uint64()
        self._do(
            "cuIpcOpenMemHandle_v2",
            byref(address),
            _IpcHandle.from_buffer_copy(handle),
            _IPC_LAZY_PEER_ACCESS,
        )
        return address.value

    def close_ipc(self, address: int) -> None:
        self._do("cuIpcCloseMemHandle", address)

    def register_host(self, address: int, num_bytes: int) -> None:
        """Pins pages of this process: devices read and write them without help."""
        flags = _HOST_REGISTER_PORTABLE | _HOST_REGISTER_DEVICEMAP
        self._do("cuMemHostRegister_v2", address, num_bytes, flags)

    def unregister_host(self, address: int) -> None:
        self._do("cuMemHostUnregister", address)

    def device_address(self, host_address: int) -> int:
        """Returns the address at which the device sees registered host memory."""
        address = c_uint64()
        self._do("cuMemHostGetDevicePointer_v2", byref(address), host_address, 0)
        return address.value

    # Streams and events -----------------------------------------------------------------------

    def new_stream(self) -> int:
        stream = c_void_p()
        self._do("cuStreamCreate", byref(stream), _STREAM_NON_BLOCKING)
        return stream.value or 0

    def synchronize(self, stream: int) -> None:
        self._do("cuStreamSynchronize", stream)

    def destroy_stream(self, stream: int) -> None:
        self._do("cuStreamDestroy_v2", stream)

    def new_event(self) -> int:
        """Returns an event to be polled. Waiting for it keeps a core busy: an event for
        sleepers would interrupt the host each time it happens, though a waiting thread is
        rare."""
        event = c_void_p()
        self._do("cuEventCreate", byref(event), _EVENT_DISABLE_TIMING)
        return event.value or 0

    def record(self, event: int, stream: int) -> None:
        self._do("cuEventRecord", event, stream)

    def has_happened(self, event: int) -> bool:
        """Raises `CudaError` when anything before the event failed."""
        code = self._query(event)
        if code not in (_SUCCESS, _NOT_READY):
            raise self._error("cuEventQuery", code)
        return bool(code == _SUCCESS)

    def wait_for(self, event: int) -> None:
        self._do("cuEventSynchronize", event)

    def destroy_event(self, event: int) -> None:
        self._do("cuEventDestroy_v2", event)

    # Work on streams --------------------------------------------------------------------------

    def copy_rows(
        self,
        target: int,
        target_pitch: int,
        source: int,
        source_pitch: int,
        row_bytes: int,
        num_rows: int,
        stream: int,
    ) -> None:
        copy = _Copy2D(
            source_kind=_MEMORY_UNIFIED,
            source=source,
            source_pitch=source_pitch,
            target_kind=_MEMORY_UNIFIED,
            target=target,
            target_pitch=target_pitch,
            row_bytes=row_bytes,
            num_rows=num_rows,
        )
        self._do("cuMemcpy2DAsync_v2", byref(copy), stream)

    def write_value(self, stream: int, address: int, value: int) -> None:
        """When the stream gets there, after everything before is visible to all, `value` is
        written to four bytes of device-visible memory."""
        self._check("cuStreamWriteValue32", self._write_value(stream, address, value, 0))

    def wait_value(self, stream: int, address: int, value: int) -> None:
        """Lets the stream go on once four bytes of device-visible memory are at least `value`; what
        was copied to the device before they were written is seen by what follows."""
        self._do("cuStreamWaitValue32_v2", stream, address, value, _WAIT_UNTIL_AT_LEAST)


@cache
def cuda_driver() -> CudaDriver:
    """Returns the one of this process. Raises `DeviceError`."""
    return CudaDriver()
