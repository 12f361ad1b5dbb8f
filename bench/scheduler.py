"""Cost of the scheduler core: CPU microseconds per step (schedule and update) over the number of running decodes.

python -m bench.scheduler [--json]
"""

from __future__ import annotations

import argparse
import json
import time

from services.scheduler.core import Scheduler
from services.scheduler.request import Sequence
from shared.config import EngineConfig
from shared.messages import Request, pack_ids
from shared.sampling import SamplingParams

PROMPT = 64  # tokens


def measure(running: int, steps: int) -> tuple[float, float]:
    """Median CPU microseconds of `schedule` and of `update` with so many decodes and two plans in flight."""
    config = EngineConfig(max_num_seqs=running, max_num_batched_tokens=max(2048, running))
    tokens = PROMPT + steps + 64
    scheduler = Scheduler(config, running * (tokens // config.block_size + 2), 8192, [2])
    for id in range(running):
        prompt = pack_ids([id, *range(PROMPT - 1)])
        params = SamplingParams(max_tokens=steps + 64, seed=id, ignore_eos=True)
        scheduler.add(Sequence(b"api%d" % (id % 2), Request(id, 0, prompt, params), 0.0, id))
    while scheduler.num_waiting or any(seq.total < PROMPT + 2 for seq in scheduler.running):
        plan = scheduler.schedule(0.0)
        assert plan is not None
        scheduler.update(plan.step, [7] * sum(plan.samples))
    ahead = scheduler.schedule(0.0)
    schedule_times, update_times = [], []
    for _ in range(steps):
        start = time.thread_time()
        plan = scheduler.schedule(0.0)
        middle = time.thread_time()
        assert ahead is not None
        results = [7] * len(ahead.slots)
        ready = time.thread_time()
        scheduler.update(ahead.step, results)
        end = time.thread_time()
        schedule_times.append(middle - start)
        update_times.append(end - ready)
        ahead = plan
    return sorted(schedule_times)[steps // 2] * 1e6, sorted(update_times)[steps // 2] * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    options = parser.parse_args()
    rows = []
    for running in (1, 32, 256, 1024):
        schedule, update = measure(running, steps=200)
        rows.append({"running": running, "schedule_us": round(schedule, 1), "update_us": round(update, 1)})
    if options.json:
        print(json.dumps(rows))
        return
    print("running  schedule us  update us  total us  us per sequence")
    for row in rows:
        total = row["schedule_us"] + row["update_us"]
        print(
            f"{row['running']:7} {row['schedule_us']:12.1f} {row['update_us']:10.1f} {total:9.1f}"
            f" {total / row['running']:16.2f}"
        )


if __name__ == "__main__":
    main()
