"""What this process has to tell the scheduler, gathered over one turn of the event loop."""

from __future__ import annotations

import time
from collections.abc import Callable

from shared.journal import Entry, Journal
from shared.messages import Abort, Message, Request, Submit
from shared.turn import Turn

SUBMIT_BYTES = 8 << 20  # of ids in one Submit, about


class Outbox:
    """Submits and aborts, one message of each kind per turn, more only where it would be huge.

    `send` returns False when it cannot; what it did not take is kept for the next `tick`.

    Closed while the scheduler is away: all that is not finished is in the journal, and is submitted when it is back.
    """

    def __init__(self, journal: Journal, send: Callable[[Message], bool], turn: Turn) -> None:
        self._journal = journal
        self._send = send
        self._turn = turn
        self._open = False
        self._scheduled = False
        self._submits: dict[int, Entry] = {}
        self._retries: list[Entry] = []
        self._aborts: list[int] = []

    @property
    def is_open(self) -> bool:
        """A scheduler takes messages."""
        return self._open

    def restart(self) -> None:
        """A scheduler is there that knows nothing: submits the journal, in order of arrival, before any new work."""
        self.shut()
        self._open = True
        for entry in self._journal.unfinished():
            self._journal.renew(entry)
            self._submits[entry.id] = entry
        self.flush()

    def shut(self) -> None:
        """The scheduler is gone."""
        self._open = False
        self._submits.clear()
        self._retries.clear()
        self._aborts.clear()

    def submit(self, entry: Entry) -> None:
        """A new entry."""
        if self._open:
            self._submits[entry.id] = entry
            self._schedule()

    def resubmit(self, entry: Entry) -> None:
        """Ids of this entry were lost on the way."""
        self.abort(entry.id)
        self._journal.renew(entry)
        self.submit(entry)

    def retry(self, entry: Entry) -> None:
        """The scheduler had no room: submits the entry again at the next tick."""
        self._retries.append(entry)

    def abort(self, id: int) -> None:
        """This sequence is no longer wanted. Idempotent."""
        if self._open:
            self._aborts.append(id)
            self._schedule()

    def tick(self) -> None:
        """Time for what was refused or could not be sent."""
        for entry in self._retries:
            self.submit(entry)
        self._retries.clear()
        self.flush()

    def flush(self) -> None:
        """Sends what has gathered. Aborts go first: of an entry resubmitted, they mean the attempt before."""
        self._scheduled = False
        if self._aborts and self._send(Abort(self._aborts)):
            self._aborts = []
        self._submits = {id: e for id, e in self._submits.items() if self._journal.get(id) and not e.finish}
        while self._submits:
            requests = self._batch()
            if not self._send(Submit(requests)):
                return
            for request in requests:
                del self._submits[request.id]

    def _batch(self) -> list[Request]:
        """The oldest submissions, as many as make a message of reasonable size."""
        now = time.monotonic()
        requests: list[Request] = []
        size = 0
        for entry in self._submits.values():
            if size > SUBMIT_BYTES:
                break
            requests.append(self._journal.submission(entry, now))
            size += len(entry.prompt) + 4 * len(entry.output)
        return requests

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._turn.call(self.flush)
