"""What an api process knows of the engine; for /health, /v1/models and admission."""

from __future__ import annotations

import msgspec

from shared.config import EngineConfig
from shared.messages import Stats
from shared.model_info import ModelInfo


class EngineState(msgspec.Struct):
    """What is known of the engine; updated in place as messages arrive."""

    ready: bool = False  # a request sent now would be served
    reason: str = "connecting to the scheduler"  # why not ready, for people; "" when ready
    engine: EngineConfig | None = None  # None until the first Welcome, then kept while the scheduler is away
    model: ModelInfo | None = None
    stats: Stats | None = None  # the scheduler's last; stale while it is away
    heard: float = 0.0  # time.monotonic() of the last Stats
    epoch: int = 0  # of the scheduler last heard
    tokenizers: int = 0  # connected links

    def judge(self, trouble: str) -> None:
        """Sets `ready` and `reason`; `trouble` is what keeps the scheduler from being asked at all, or ""."""
        self.reason = trouble or self._trouble()
        self.ready = not self.reason

    def _trouble(self) -> str:
        if self.stats is None or self.stats.epoch != self.epoch:
            return "the scheduler is starting"
        if not self.stats.ready:
            return self.stats.reason or "the engine is not ready"
        if not self.tokenizers:
            return "no tokenizer is connected"
        return ""
