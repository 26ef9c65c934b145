"""A server of this process that listens on all interfaces, made to hear one address alone.

TensorFlow's runtime binds to every address of the machine and cannot be told otherwise. So the
kernel is: a filter on the socket drops what is sent to another address, before there is a
connection. Some kernels keep filters to the administrator; a server on the loopback device is
bound to that device then. Who had connected before, by another address, is cut off.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import socket
import struct
import time
from collections.abc import Iterator

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_ATTACH_FILTER = 26  # Linux's; Python has no name for it
# The kernel's small language for filters: load a byte or a word of the packet, shift, compare and
# jump, return how much of the packet to keep.
_BYTE, _WORD, _SHIFT, _COMPARE, _KEEP = 0x30, 0x20, 0x74, 0x15, 0x06
_HEADER = -0x100000  # where the header of the network's protocol begins
_ADDRESSED_TO = {4: 16, 6: 24}  # the place of the receiver's address in it
_ACCEPTED = 0.1  # seconds in which a server lets in whoever has come


def hear_only(host: str, port: int) -> None:
    """Lets the server of this process at a port hear what is sent to one address of the machine.

    Args:
        host: The address, as numbers.
        port: The server's port.

    Raises:
        OSError: The kernel has no such filters, or not for us, or there is no such server.
    """
    address = _plain(host)
    servers = 0
    for own in _sockets(port):
        if own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            _narrow(own, address)
            servers += 1
    if not servers:
        raise OSError(f"no server of this process listens at port {port}")
    time.sleep(_ACCEPTED)  # who is still waiting to be let in has no socket here
    for own in _sockets(port):
        if not own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and _address(own) != address:
            with contextlib.suppress(OSError):  # it has gone by itself
                own.shutdown(socket.SHUT_RDWR)


def _narrow(own: socket.socket, address: Address) -> None:
    program = _filter(address)
    buffer = ctypes.create_string_buffer(program)
    option = struct.pack("HP", len(program) // 8, ctypes.addressof(buffer))
    try:
        own.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, option)
    except PermissionError:
        # Not for other addresses: what a machine sends to itself comes by the loopback device.
        if not address.is_loopback:
            raise
        own.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo\0")


def _filter(address: Address) -> bytes:
    """Keeps the packets that are sent to an address, drops all others."""
    first = _HEADER + _ADDRESSED_TO[address.version]
    words = struct.unpack(f"!{len(address.packed) // 4}I", address.packed)
    lines = [(_BYTE, _HEADER), (_SHIFT, 4), (_COMPARE, address.version)]  # its upper half
    for index, word in enumerate(words):
        lines += [(_WORD, first + 4 * index), (_COMPARE, word)]
    drop = len(lines) + 1
    lines += [(_KEEP, 0xFFFFFFFF), (_KEEP, 0)]
    return b"".join(
        # Where to go on, counted from the next line: if a comparison holds, and if not.
        struct.pack("HBBI", code, 0, drop - place - 1 if code == _COMPARE else 0, value % 2**32)
        for place, (code, value) in enumerate(lines)
    )


def _sockets(port: int) -> Iterator[socket.socket]:
    """The sockets of this process that have a port on this side, as second handles."""
    numbers = {f"socket:[{number}]" for number in _numbers(port)}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it has gone meanwhile
            if os.readlink(f"/proc/self/fd/{name}") in numbers:
                with contextlib.closing(_second(int(name))) as own:
                    if own.getsockname()[1] == port:  # the number may be another one's by now
                        yield own


def _second(descriptor: int) -> socket.socket:
    """A second handle of a socket."""
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _numbers(port: int) -> Iterator[str]:
    """The numbers by which the kernel knows the sockets at a port."""
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError), open(f"/proc/self/net/{table}") as lines:
            for line in lines:
                _, local, *rest = line.split()
                if local.endswith(f":{port:04X}"):
                    yield rest[7]


def _address(own: socket.socket) -> Address:
    return _plain(own.getsockname()[0])


def _plain(host: str) -> Address:
    """An address without a scope; one of IPv4 as such, also if it is written as one of IPv6."""
    found: Address = ipaddress.ip_address(host.partition("%")[0])
    return getattr(found, "ipv4_mapped", None) or found
