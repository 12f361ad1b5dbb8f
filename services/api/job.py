"""The generations that answer one HTTP request: one per prompt, each with n samples."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import msgspec

from services.api.metrics import Metrics, Record
from shared.engine import EngineClient, Generation, Sample, SampleDelta
from shared.errors import RequestError
from shared.sampling import SamplingParams


class PromptTokensDetails(msgspec.Struct):
    """How the prompt tokens were come by."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """OpenAI's usage object; the prompt counts once however many samples."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    def at_start(self) -> Usage:
        """The same before the first token."""
        return msgspec.structs.replace(self, completion_tokens=0, total_tokens=self.prompt_tokens)


class Job:
    """Starts generating when made; whoever makes it must call `close`.

    Choice `p * n + s` is sample s of prompt p.
    """

    def __init__(
        self,
        engine: EngineClient,
        metrics: Metrics,
        model: str,
        prompts: Sequence[tuple[array[int], SamplingParams]],
        cache_salt: str,
        arrival: float,
    ) -> None:
        """Raises RequestError when the engine refuses a prompt."""
        self.n = prompts[0][1].n
        self.choices = len(prompts) * self.n
        self._generations: list[Generation] = []
        self._records: list[Record] = []
        self._prompt_tokens = sum(len(prompt) for prompt, _ in prompts)
        try:
            for prompt, params in prompts:
                self._generations.append(engine.generate(prompt, params, cache_salt=cache_salt))
                self._records.append(metrics.begin(model, len(prompt), self.n, params.max_tokens or 0, arrival))
        except RequestError:
            for record in self._records:
                record.drop()
            self.close()
            raise

    @property
    def usage(self) -> Usage:
        """What has been used so far."""
        samples = [sample for generation in self._generations for sample in generation.samples]
        completion = sum(len(sample.ids) for sample in samples)
        cached = sum(generation.samples[0].cached_tokens for generation in self._generations)
        prompt = self._prompt_tokens
        return Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached))

    def listen(self, listener: Callable[[], None] | None) -> None:
        """From now on `listener` is called when there is something to `take`, or the job has ended."""
        for generation in self._generations:
            generation.listen(listener)

    def take(self) -> list[SampleDelta]:
        """What is new, with the index of the choice in each delta; it counts as delivered."""
        if len(self._generations) == 1:
            fresh = self._generations[0].take()
            self._records[0].deltas(fresh)
            return fresh
        fresh = []
        for position, (generation, record) in enumerate(zip(self._generations, self._records, strict=True)):
            deltas = generation.take()
            record.deltas(deltas)
            for delta in deltas:
                delta.index += position * self.n
            fresh += deltas
        return fresh

    @property
    def error(self) -> RequestError | None:
        """Why the job has failed, if it has."""
        return next((generation.error for generation in self._generations if generation.error is not None), None)

    @property
    def finished(self) -> bool:
        """All choices have ended, or one cannot go on."""
        return all(generation.finished for generation in self._generations) or self.error is not None

    async def samples(self) -> list[Sample]:
        """All choices, in order, once they have ended. Raises RequestError."""
        found: list[Sample] = []
        for position, generation in enumerate(self._generations):
            record = self._records[position]
            async for deltas in generation:
                record.deltas(deltas)  # the first token's time; the rest needs no wake-up per step
                if not record.untouched:
                    break
            samples = await generation.result()
            record.samples(samples)
            found += samples
        return found

    def close(self) -> None:
        """Aborts what still runs, and counts every request with how it ended. Idempotent."""
        for record, generation in zip(self._records, self._generations, strict=False):
            if (error := generation.error) is not None:
                if record.untouched and error.status != 500:
                    record.drop()
                record.finish("error")
            elif all(sample.finish_reason for sample in generation.samples):
                lengths = any(sample.finish_reason == "length" for sample in generation.samples)
                record.finish("length" if lengths else "stop")
            else:
                record.samples(generation.samples)
                record.finish("abort")
        for generation in self._generations:
            generation.abort()
