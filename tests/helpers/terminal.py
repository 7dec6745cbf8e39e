"""A program on a pseudo-terminal, which stands for the person."""

from __future__ import annotations

import os
import re
import select
import subprocess
import time

import psutil

from tests.helpers.command_line import PYTHON, environment, listening


class Terminal:
    """A program on a pseudo-terminal."""

    def __init__(self, *arguments: object, columns: int = 0, **variables: str):
        import fcntl
        import pty
        import struct
        import termios

        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.child = subprocess.Popen(
            [*PYTHON, *map(str, arguments)], stdin=slave, stdout=slave, stderr=slave, close_fds=True,
            env=environment(**{"TERM": "dumb", **variables}), start_new_session=True,
            preexec_fn=self._own_terminal(slave),
        )
        os.close(slave)
        self.shown = ""
        self._read = 0

    @staticmethod
    def _own_terminal(slave: int) -> object:
        def make() -> None:  # so that the terminal turns Ctrl-C into a signal for this program
            import fcntl
            import termios

            fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
            listening()

        return make

    def type(self, text: str) -> None:
        """Type a text."""
        os.write(self.master, text.encode())

    def prompted(self) -> None:
        """Wait for the prompt, and until the program sleeps: what is typed before the editor listens may be lost."""
        self.expect("> ")
        process, still, before = psutil.Process(self.child.pid), 0, -1.0
        while still < 3 and self.child.poll() is None:
            time.sleep(0.1)
            took = sum(process.cpu_times()[:2])
            still = still + 1 if took == before and process.status() == psutil.STATUS_SLEEPING else 0
            before = took

    def expect(self, pattern: str, limit_s: float = 600) -> str:
        """Wait until the program shows something new that matches; gives what it showed until then."""
        end = time.monotonic() + limit_s
        while True:
            if match := re.search(pattern, self.shown[self._read :]):
                text = self.shown[self._read : self._read + match.end()]
                self._read += match.end()
                return text
            if time.monotonic() > end or not self._more(end):
                raise AssertionError(f"{pattern!r} did not come; shown: {self.shown[self._read :]!r}")

    def _more(self, end: float) -> bool:
        ready, _, _ = select.select([self.master], [], [], max(0.0, end - time.monotonic()))
        try:
            data = os.read(self.master, 65536) if ready else b""
        except OSError:  # Linux reports the end of a terminal's last program as an error
            return False
        self.shown += data.decode("utf-8", "replace").replace("\r\n", "\n")
        return bool(data)

    def ended(self, limit_s: float = 600) -> int:
        """Wait for the program's end; gives its exit code."""
        end = time.monotonic() + limit_s
        while self.child.poll() is None and time.monotonic() < end:
            self._more(time.monotonic() + 0.05)
        return self.child.wait(600)

    def close(self) -> None:
        if self.child.poll() is None:
            self.child.kill()
            self.child.wait()
        os.close(self.master)
