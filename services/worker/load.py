"""From a model's files to a `Runner` with weights and KV cache, telling how far it is."""

from __future__ import annotations

import logging
from pathlib import Path

from services.worker.backends import compute_threads, make_executor
from services.worker.compute import Say
from services.worker.loader import Weights, weight_formats, weights
from services.worker.memory import num_blocks, read_memory
from services.worker.models import decoder_spec
from services.worker.runner import Runner
from shared.config import EngineConfig
from shared.hub import resolve
from shared.messages import Plan, Result
from shared.model_config import read_config
from shared.model_info import ModelInfo
from shared.phases import Phases

log = logging.getLogger(__name__)


class LoadedEngine:
    """A `Runner` and the facts the scheduler wants to know of it."""

    def __init__(self, runner: Runner, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.block_bytes = runner.executor.block_bytes()
        self.backend = runner.executor.backend
        self.arithmetic = runner.executor.arithmetic
        self.device = "cpu"
        self._runner = runner

    def run(self, plan: Plan) -> Result:
        """Runs one step."""
        return self._runner.run(plan)

    def reset(self) -> None:
        """Clears all slots."""
        self._runner.reset()


def load(engine: EngineConfig, model: ModelInfo, say: Say, phases: Phases | None = None) -> LoadedEngine:
    """Loads the model, and logs what `phases` hold then.

    Raises StartupError where it cannot; before any weight is read where the headers tell.
    """
    phases = phases or Phases()
    phases.end("waiting")
    path = Path(model.path)
    if not path.exists():
        say(f"fetching {engine.model or 'the bundled model'}")
        path = resolve(engine.model, engine.revision)
    spec = decoder_spec(read_config(path), model.max_model_len)
    executor = make_executor(spec, engine, model, weight_formats(path, spec, engine.quantization))
    tensors = weights(path, spec, compute_threads(engine))
    memory = read_memory()
    blocks = num_blocks(engine, model, executor.block_bytes(), executor.weight_bytes(), memory.total, memory.available)
    phases.end("headers")
    executor.load(told(tensors, spec.num_layers, say))
    phases.end("weights")
    executor.allocate_kv(blocks)
    runner = Runner(executor, model, engine)
    say("warming up")
    runner.warm_up()
    phases.end("warm-up")
    log.info("started in %s", phases)
    return LoadedEngine(runner, blocks)


def told(tensors: Weights, num_layers: int, say: Say) -> Weights:
    """Passes the tensors on and says how many layers have been begun, ten times at most."""
    begun: set[str] = set()
    stride = -(-num_layers // 10)
    for name, tensor in tensors:
        if name.startswith("layers."):
            layer = name.split(".")[1]
            if layer not in begun:
                begun.add(layer)
                if len(begun) % stride == 0 or len(begun) == num_layers:
                    say(f"loading layer {len(begun)}/{num_layers}")
        yield name, tensor
