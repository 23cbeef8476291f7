"""A DNS server whose names answer late: ADDRESS FILE DELAY_S. FILE has a line "NAME ADDRESS FROM" for each change.

FROM is in seconds since the epoch. A name has the address of its last line that is not in the future. That there is no
answer comes late, too: torch asks for the name of each address that connects to a store.
"""

import socket
import sys
import time
from pathlib import Path

HEADER_BYTES = 12
FOUND, UNKNOWN = b"\x84\x00", b"\x84\x03"


def question_name(query: bytes) -> tuple[str, int]:
    """The name that is asked for, and where the question ends."""
    labels, at = [], HEADER_BYTES
    while length := query[at]:
        labels.append(query[at + 1 : at + 1 + length].decode())
        at += 1 + length
    return ".".join(labels), at + 5


def answer(query: bytes, addresses: dict[str, str]) -> bytes:
    """The address of the name, or that there is none; IPv6 has none of a name that is known."""
    name, end = question_name(query)
    address = addresses.get(name) if query[end - 4 : end - 2] == b"\x00\x01" else None
    record = b"\xc0\x0c\x00\x01\x00\x01\x00\x00\x00\x00\x00\x04" + socket.inet_aton(address) if address else b""
    flags = FOUND if name in addresses else UNKNOWN
    counts = b"\x00\x01" + len(record[:1]).to_bytes(2, "big") + b"\x00\x00\x00\x00"
    return query[:2] + flags + counts + query[HEADER_BYTES:end] + record


def main() -> None:
    address, file, delay_s = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind((address, 53))
    late: list[tuple[float, bytes, tuple[str, int]]] = []
    while True:
        changes = [line.split() for line in file.read_text().splitlines()]
        addresses = {name: at for name, at, since in changes if float(since) <= time.time()}
        while late and late[0][0] <= time.time():
            _, query, asker = late.pop(0)
            server.sendto(answer(query, addresses), asker)
        server.settimeout(max(0.001, late[0][0] - time.time()) if late else None)
        try:
            query, asker = server.recvfrom(4096)
        except TimeoutError:
            continue
        late.append((time.time() + delay_s, query, asker))


if __name__ == "__main__":
    main()
