"""What a step costs, learnt online, so that a prefill chunk can be sized by the time the step may take.

A step's seconds are taken as linear in its rows and in the keys its rows attend to. Steps of about the same size share
a bucket, which holds their running mean; the coefficients are the least squares over the buckets, in relative error. A
hundred steps of decodes therefore do not wash out what the last prefill has taught. Pure: seconds come with results.
"""

from __future__ import annotations

from collections.abc import Iterable

ROW_SCALE = 64.0  # rows and keys are scaled to the order of one, which keeps the solution well conditioned
KEY_SCALE = 65536.0
SMOOTHING = 0.1  # weight of a new step in its bucket
MIN_CHUNK = 16  # tokens a prefill may always take: a long prompt moves on however slow the machine
FIRST_CHUNK = 128  # tokens beyond which a step is not trusted before ones of a quarter of its size have been seen
IDLE_FACTOR = 4.0  # a step without decodes may take this many times as long: nobody's stream waits for it

Vector = tuple[float, float, float]


class Bucket:
    """Steps of about the same size: their running means."""

    __slots__ = ("keys", "rows", "seconds", "steps")

    def __init__(self) -> None:
        self.rows = self.keys = self.seconds = 0.0
        self.steps = 0

    def add(self, rows: int, keys: int, seconds: float) -> None:
        self.steps += 1
        weight = max(SMOOTHING, 1 / self.steps)
        self.rows += weight * (rows - self.rows)
        self.keys += weight * (keys - self.keys)
        self.seconds += weight * (seconds - self.seconds)


class StepTime:
    """A model of one worker group's step times."""

    def __init__(self) -> None:
        self._buckets: dict[tuple[int, int], Bucket] = {}
        self._weights: Vector | None = None  # of the features; None when steps have come since they were solved for
        self._largest = 0  # rows of the largest step seen

    def observe(self, rows: int, keys: int, seconds: float) -> None:
        """A step computed `rows` tokens, which attended to `keys` in all, and took `seconds`."""
        size = rows.bit_length(), keys.bit_length() // 2
        bucket = self._buckets.get(size)
        if bucket is None:
            bucket = self._buckets[size] = Bucket()
        bucket.add(rows, keys, seconds)
        self._largest = max(self._largest, rows)
        self._weights = None

    def predict(self, rows: int, keys: int) -> float:
        """Seconds that a step is expected to take."""
        return sum(w * x for w, x in zip(self._solved(), _features(rows, keys), strict=True))

    def chunk(self, rows: int, keys: int, context: int, limit: float, most: int) -> int:
        """How many tokens of a prompt whose first `context` are computed fit beside `rows` decodes.

        The step is to stay within `limit` seconds. At least MIN_CHUNK and at most `most`; without decodes the limit is
        looser.
        """
        most = min(most, max(FIRST_CHUNK, 4 * self._largest))
        if most <= MIN_CHUNK or not self._buckets:
            return most
        left = (limit if rows else limit * IDLE_FACTOR) - self.predict(rows, keys)
        if left <= 0:
            return MIN_CHUNK
        _, per_row, per_key = self._solved()
        # n tokens: n * row + (n * context + n * n / 2) * key <= left
        key = per_key / KEY_SCALE / 2
        row = per_row / ROW_SCALE + context * key * 2
        if row <= 0 and key <= 0:
            return most
        tokens = left / row if key <= 0 else (-row + (row * row + 4 * key * left) ** 0.5) / (2 * key)
        return max(MIN_CHUNK, min(most, int(tokens)))

    def _solved(self) -> Vector:
        if self._weights is None:
            self._weights = _least_squares(self._buckets.values())
        return self._weights


def _least_squares(buckets: Iterable[Bucket]) -> Vector:
    moments = [[1e-9 if i == j else 0.0 for j in range(3)] for i in range(3)]
    targets = [0.0, 0.0, 0.0]
    for bucket in buckets:
        scale = 1 / max(bucket.seconds, 1e-6)
        features = [scale * x for x in _features(bucket.rows, bucket.keys)]
        for i in range(3):
            targets[i] += features[i]
            for j in range(3):
                moments[i][j] += features[i] * features[j]
    return _non_negative(moments, targets)


def _features(rows: float, keys: float) -> Vector:
    return (1.0, rows / ROW_SCALE, keys / KEY_SCALE)


def _non_negative(moments: list[list[float]], targets: list[float]) -> Vector:
    """The least-squares weights, with those that come out negative forced to zero, the most negative first."""
    active = [0, 1, 2]
    while active:
        solution = _solve([[moments[i][j] for j in active] for i in active], [targets[i] for i in active])
        worst = min(range(len(active)), key=solution.__getitem__)
        if solution[worst] >= 0:
            weights = [0.0, 0.0, 0.0]
            for i, weight in zip(active, solution, strict=True):
                weights[i] = weight
            return weights[0], weights[1], weights[2]
        del active[worst]
    return 0.0, 0.0, 0.0


def _solve(matrix: list[list[float]], vector: list[float]) -> list[float]:
    """Gaussian elimination for a symmetric positive matrix, of size 1 to 3; a direction never seen gives zero."""
    n = len(vector)
    rows = [[*line, value] for line, value in zip(matrix, vector, strict=True)]
    for i in range(n):
        pivot = rows[i][i]
        if pivot <= 1e-12:
            rows[i] = [0.0] * (n + 1)
            rows[i][i] = 1.0
            continue
        for k in range(i + 1, n):
            ratio = rows[k][i] / pivot
            rows[k] = [a - ratio * b for a, b in zip(rows[k], rows[i], strict=True)]
    solution = [0.0] * n
    for i in reversed(range(n)):
        solution[i] = (rows[i][n] - sum(rows[i][j] * solution[j] for j in range(i + 1, n))) / rows[i][i]
    return solution
