"""A listening socket for whose clients no descriptor is left."""

from __future__ import annotations

import errno
import os
import socket
from typing import Any


class FullListener(socket.socket):
    """Has no descriptor for anybody while it `is_full`."""

    is_full = True
    num_refused = 0

    def accept(self) -> tuple[socket.socket, Any]:
        if self.is_full:
            self.num_refused += 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()
