"""The worker without its bus: plans in, results out."""

from __future__ import annotations

import numpy as np

from services.worker.batch import Batch
from services.worker.executor import Executor, StepBatch
from shared.config import EngineConfig
from shared.messages import Plan, Result
from shared.model_info import ModelInfo


class Runner:
    """Runs plans, in order, on an executor whose weights are loaded and whose KV cache is allocated."""

    def __init__(self, executor: Executor, info: ModelInfo, config: EngineConfig) -> None:
        self.executor = executor
        self._num_ids = info.tokenizer_size
        self._batch = Batch(config.block_size, info.eos_token_ids)

    def run(self, plan: Plan) -> Result:
        """Runs one step. A token of -1 in the result: that row's logits are not numbers. Raises PlanError."""
        if plan.copies:
            self.executor.copy_blocks(list(zip(plan.copies[::2], plan.copies[1::2], strict=True)))
        step = self._batch.apply(plan)
        tokens: list[int] = []
        if step is not None:
            tokens, _ = self.executor.forward_and_sample(step, self._batch.sampling_rows(), self._num_ids)
            self._batch.append(tokens)
        return Result(plan.epoch, plan.step, tokens)

    def reset(self) -> None:
        """Frees all slots; what the KV cache holds no longer counts."""
        self._batch.clear()

    def warm_up(self) -> None:
        """Computes one token in the first block: what cannot run fails before the worker is ready."""
        step = StepBatch(
            tokens=np.zeros(1, np.int32),
            positions=np.zeros(1, np.int32),
            query_start=np.array([0, 1], np.int32),
            context_lens=np.ones(1, np.int32),
            block_tables=np.zeros((1, 1), np.int32),
            logit_rows=np.zeros(1, np.int32),
        )
        self.executor.forward_and_sample(step, [None], self._num_ids)
